"""Fuzzing: mutations are what they say, the judge sees every kind of failure, and no mutant makes a command fail."""

import json
import os
import shutil
import time
import warnings

import jax
import numpy as np
import pytest
import safetensors.numpy

from mixedres._internal import files
from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError
from tests.data import made
from tests.fuzz import formats, mutations
from tests.fuzz.judge import judge
from tests.fuzz.mutations import PARTS

DATA = bytes(range(256)) * 3
KINDS = (*PARTS, "data", "config", "checkpoint")
RUN_KINDS = ("metrics", "data", "config", "checkpoint", "workdir")


def mutants(mutation, *arguments, count=200):
    """Returns mutants, which are the same at every call."""
    found, again = (
        [mutation(mutations.generator(0, "test", number), *arguments) for number in range(count)] for _ in range(2)
    )
    assert found == again
    return found


def is_read(read, data):
    """Returns whether a function returns something for the data, without an exception."""
    try:
        return read(data) is not False
    except Exception:
        return False


def test_mutations_change_data_of_any_size():
    assert sum(mutant != DATA for mutant in mutants(mutations.blind, DATA, b"other" * 20)) > 150
    assert all(isinstance(mutant, bytes) for data in (b"", b"x") for mutant in mutants(mutations.blind, data))
    found = mutants(mutations.json_text, json.dumps({"a": {"b": [1, 2.5, "c"]}, "d": None}).encode())
    assert sum(is_read(json.loads, text) for text in found) > 100 and len(set(found)) > 120


@pytest.fixture(scope="module")
def intact_parts():
    """Returns an intact file of each format that consists of parts; other libraries write those with sums."""
    records = [made.models_record(**example) for example in made.examples(3)]
    return {
        "png": made.encoded(made.photo(20, 30), "PNG"),
        "jpeg": made.encoded(made.photo(20, 30), "JPEG"),
        "safetensors": safetensors.numpy.save({"a": np.ones((4, 4), np.float32), "b": np.ones(6, np.float16)}),
        "tfrecord": b"".join(map(made.framed, records)),
        "array_record": PARTS["array_record"].join(records),
        "metrics": b'{"step": 1}\n{"step": 2}\n{"step": 3}',
        "cifar": formats._cifar(),
    }


@pytest.mark.parametrize("name", PARTS)
def test_mutants_keep_lengths_and_sums(name, intact_parts):
    intact, (split, join, _) = intact_parts[name], PARTS[name]
    assert split(join(split(intact))) == split(intact)
    found = mutants(PARTS[name], intact, intact)
    assert sum(is_read(lambda data: join(split(data)) == data, mutant) for mutant in set(found)) > 60


def test_repaired_checksums_hold(tmp_path):
    intact = {formats.STEP + name: content for name, content in {"_METADATA": b'{"a": 1}', "d/x": DATA}.items()}
    for changes in ({}, {f"{formats.STEP}d/x": DATA[1:]}):
        made.write_files(tmp_path, intact | changes | formats._summed(intact, changes))
        assert files.checksums_hold(tmp_path / formats.STEP)


def fail(error):
    raise error


PLANTED = {
    "accepted": lambda place: (place / "x").write_text("x"),
    "fuzz: name another\n": lambda place: fail(ConfigError("name another")),
    r"fuzz: two\nlines": lambda place: fail(ConfigError("two\nlines")),
    "memory": lambda place: bytearray(2**40),
    "KeyError": lambda place: fail(KeyError("planted")),
    "control character": lambda place: print("\x1b[31mred"),
    "UserWarning": lambda place: warnings.warn("planted", UserWarning, stacklevel=1),
    "libplanted": lambda place: os.write(2, b"libplanted: warning\n"),
    "TooLongError": lambda place: time.sleep(60),
    "written elsewhere": lambda place: os.mkdir(place.parent / "elsewhere"),
}


@pytest.mark.parametrize("words", PLANTED)
def test_judge_names_each_planted_defect(words, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "in"))
    (tmp_path / "in").mkdir()
    try:
        found = judge(PLANTED[words], tmp_path / "in", seconds=0.5)
    except AssertionError as error:
        assert list(PLANTED).index(words) > 3
        found = str(error)
    else:
        assert list(PLANTED).index(words) <= 3
    assert words in found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "corpus"
    formats.make(place)
    return place


@pytest.fixture
def read(corpus, tmp_path, monkeypatch):
    """Returns a function that judges mutants of a format; FUZZ_SEED, FUZZ_FIRST and FUZZ_MUTANTS choose others."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)  # no index of a mutant stays behind
    complain = console.complain  # a note on the standard error output is no error
    monkeypatch.setattr(
        console, "complain", lambda line: (console.say if line.startswith("note: ") else complain)(line)
    )
    targets = formats.targets(corpus)
    seed, first = int(os.environ.get("FUZZ_SEED", "0")), int(os.environ.get("FUZZ_FIRST", "0"))

    def judge_mutants(kind, count):
        folder, place = corpus / ("run" if kind in RUN_KINDS else kind), tmp_path / kind
        intact = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

        def read(target, changes):
            shutil.rmtree(place, ignore_errors=True)
            made.write_files(place, {name: text for name, text in (intact | changes).items() if text is not None})
            return judge(target, place, seconds=120 if kind == "workdir" else 10) == "accepted"

        assert all(read(target, {}) for target in targets[kind])
        accepted = 0
        for number in range(first, first + count):
            changes = formats.mutant(mutations.generator(seed, kind, number), kind, intact)
            for target in targets[kind]:
                try:
                    accepted += read(target, changes)
                except AssertionError as error:
                    again = f"FUZZ_SEED={seed} FUZZ_FIRST={number} FUZZ_MUTANTS=1"
                    raise AssertionError(f"{again} pytest -m nightly tests/fuzz -k {kind}\n{error}") from None
            if kind == "workdir":
                jax.clear_caches()  # the programs of a thousand mutants would fill the memory
        assert accepted or count == 1

    return judge_mutants


# Coroutines and threads of Orbax complain after a restoration has failed.
quiet = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@quiet
@pytest.mark.slow
def test_mutants_are_accepted_or_refused_in_one_line(read):
    """All formats in one test, for one corpus."""
    for kind in KINDS:
        read(kind, 50 if kind in ("data", "checkpoint") else 200)  # they read a whole checkpoint


@quiet
@pytest.mark.nightly
@pytest.mark.parametrize("kind", [*KINDS, "workdir"])
def test_many_mutants(kind, read):
    """Of runs, whole commands, which write nothing outside of what they are told to write."""
    read(kind, int(os.environ.get("FUZZ_MUTANTS", "2000")))
