"""Data sets by name, batches ahead of time, and what importing all this does not do."""

import itertools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from mixedres.data import NAMES, InMemory, Synthetic, load, prefetch

ROOT = pathlib.Path(__file__).parents[2]


def test_digits_by_name():
    source = load("digits", image_size=8, batch_size=32, pad=2, flip=True)
    assert isinstance(source, InMemory)
    assert (source.image_shape, source.train_examples) == ((8, 8, 1), 1437)
    assert (source.pad, source.flip) == (2, True)
    assert load("digits", image_size=8, batch_size=32).pad == 0


def test_synthetic_by_name():
    options = {"channels": 2, "num_classes": 5, "train_examples": 77}
    source = load("synthetic", image_size=12, batch_size=6, **options)
    assert isinstance(source, Synthetic)
    assert source.image_shape == (12, 12, 2)
    assert (source.num_classes, source.train_examples, source.eval_examples) == (5, 77, 6)
    assert (source.mean, source.std) == ((127.0, 127.0), (60.0, 60.0))
    [batch] = source.eval_batches(6)
    assert batch["mask"].all()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("mnist", {}, ("'mnist'", "unknown", *NAMES)),
        ("", {}, ("''", "unknown", "digits", "synthetic")),
        ("imagenet2012", {}, ("'imagenet2012'", "--config.data.name=synthetic")),
        ("cifar10", {}, ("'cifar10'", "--config.data.name=synthetic")),
        ("synthetic", {"num_classes": 5}, ("num_classes", "train_examples")),
        ("synthetic", {"train_examples": 5}, ("num_classes", "train_examples")),
    ],
)
def test_errors_say_what_is_allowed(name, options, words):
    with pytest.raises(ValueError) as error:
        load(name, image_size=8, batch_size=4, **options)
    assert all(word in str(error.value) for word in words), str(error.value)


class Host:
    """A stream that counts what was read of it, and what was sent to the device."""

    def __init__(self, items):
        self.items, self.read, self.sent = items, 0, []

    def __iter__(self):
        for item in self.items:
            self.read += 1
            yield item

    def put(self, item):
        self.sent.append(item)
        return ("on device", item)


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_prefetch_reads_depth_batches_ahead_and_no_more(depth):
    host = Host(itertools.count())
    batches = prefetch(host, host.put, depth)
    assert host.read == 0
    for used in range(1, 20):
        assert next(batches) == ("on device", used - 1)
        assert host.read == len(host.sent) == used + depth
    assert host.sent == list(range(19 + depth))


def test_prefetch_is_two_ahead_by_default():
    host = Host(itertools.count())
    next(prefetch(host, host.put))
    assert host.sent == [0, 1, 2]


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4, 9])
def test_prefetch_of_a_finite_stream_ends(length, depth):
    host = Host([object() for _ in range(length)])
    assert list(prefetch(host, host.put, depth)) == [("on device", item) for item in host.items]
    assert host.sent == host.items


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_the_same_object_is_sent_once(depth):
    a, b = np.zeros(3), np.zeros(3)  # equal, and yet two
    host = Host([a, a, a, b, b, a, a])
    batches = list(prefetch(host, host.put, depth))
    assert [id(item) for item in host.sent] == [id(a), id(b), id(a)]
    assert [id(item) for _, item in batches] == [id(item) for item in host.items]
    # One object on the device, as well, however long it has been repeated.
    host = Host(itertools.repeat(a, 50))
    assert len({id(batch) for batch in prefetch(host, host.put, depth)}) == 1
    assert len(host.sent) == 1


def test_an_error_of_the_stream_arrives():
    def broken():
        yield from range(3)
        raise OSError("disk")

    batches = prefetch(broken(), lambda x: x, 1)
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(OSError, match="disk"):
        next(batches)


def test_importing_starts_no_device():
    # Nor jax at all: workers that only read data have no use for it.
    code = "import sys, mixedres.data; print('\\n'.join(sys.modules))"
    command = [sys.executable, "-W", "error", "-c", code]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "mixedres.data.sources" in loaded
    roots = {name.split(".")[0] for name in loaded}
    assert not roots & {"jax", "jaxlib", "flax", "jmp", "optax", "absl", "tensorflow"}
    assert not roots & {"sklearn", "scipy"}  # slow, and only the digits need them
    assert {name for name in loaded if name.startswith("mixedres.")} == {
        "mixedres.data",
        *(f"mixedres.data.{name}" for name in ("digits", "load", "prefetch", "sources")),
    }
