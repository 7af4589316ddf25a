"""Fuzzing: mutations are what they say, the judge sees every kind of failure, and no mutant makes a command fail."""

import functools
import json
import os

import numpy as np
import psutil
import pytest
import safetensors.numpy

from mixedres._internal import files
from tests.data import made
from tests.fuzz import blind, campaign, commands, containers, contents, corpus, hostile_json
from tests.fuzz.formats import CONTAINERS, FORMATS, Format

DATA = bytes(range(256)) * 3
WORKDIR = Format("workdir", "run/*", commands.mutant, "tests.fuzz.commands:targets")


def mutants(mutation, *arguments, count=200):
    """Returns mutants, which are the same at every call."""
    found, again = (
        [mutation(blind.generator(0, "test", number), *arguments) for number in range(count)] for _ in range(2)
    )
    assert found == again
    return found


@pytest.mark.parametrize("kind", blind.MUTATIONS)
def test_mutation_of_bytes_changes_the_data(kind):
    mutation = functools.partial(blind.once, kind=kind)
    assert sum(mutant != DATA for mutant in mutants(mutation, DATA, b"other" * 20)) > 100
    assert all(isinstance(mutation(np.random.default_rng(0), data, b""), bytes) for data in (b"", b"x"))


def test_mutants_depend_on_seed_format_and_number():
    keys = [(0, "png", 0), (1, "png", 0), (0, "jpeg", 0), (0, "png", 1)]
    assert len({blind.generator(*key).bytes(8) for key in keys}) == 4


def is_read(read, data):
    """Returns whether a function returns something for the data, without an exception."""
    try:
        return read(data) is not False
    except Exception:
        return False


def test_hostile_json_is_mostly_json():
    found = mutants(hostile_json.mutated, json.dumps({"a": {"b": [1, 2.5, "c"]}, "d": None}).encode())
    assert sum(is_read(json.loads, text) for text in found) > 120 and len(set(found)) > 120
    assert any(b'"a": ' in text and text.count(b'"a"') > 1 for text in found)  # a doubled key


@pytest.fixture(scope="module")
def intact_files():
    """Returns an intact file of each format that consists of parts; other libraries write those with sums."""
    records = [made.models_record(**example) for example in made.examples(3)]
    arrays = {"a": np.ones((4, 4), np.float32), "b": np.ones(6, np.float16)}
    return {
        "png": made.encoded(made.photo(20, 30), "PNG"),
        "jpeg": made.encoded(made.photo(20, 30), "JPEG"),
        "safetensors": safetensors.numpy.save(arrays, {"mixedres": "{}"}),
        "tfrecord": b"".join(map(made.framed, records)),
        "array_record": containers.join_array_record(records),
        "metrics": b'{"step": 1}\n{"step": 2}\n{"step": 3}',
        "cifar": corpus.cifar(),
    }


@pytest.mark.parametrize("name", CONTAINERS)
def test_mutants_keep_lengths_and_sums(name, intact_files):
    intact, split, join = intact_files[name], CONTAINERS[name].split, CONTAINERS[name].join
    assert len(split(intact)) > 2 and split(join(split(intact))) == split(intact)
    assert join(split(intact)) == intact or name in ("safetensors", "cifar")  # other spaces, another compression
    found = mutants(CONTAINERS[name].mutated, intact, intact)
    assert sum(is_read(lambda data: join(split(data)) == data, mutant) for mutant in set(found)) > 60
    if name == "safetensors":
        assert sum(is_read(safetensors.numpy.load, mutant) for mutant in found) > 20


def test_some_mutants_of_checkpoints_have_right_checksums(tmp_path):
    intact = {contents.STEP + name: content for name, content in {"_METADATA": b'{"a": 1}', "d/x": DATA}.items()}
    intact[contents.CHECKSUMS] = contents.checksums(intact)
    found = mutants(contents.checkpoint, intact, count=100)
    repaired = [changes for changes in found if len(changes) > 1 and contents.CHECKSUMS in changes]
    assert len(repaired) > 2
    for changes in ({}, repaired[0]):
        campaign.write(tmp_path, intact | changes)
        assert files.checksums_hold(tmp_path / contents.STEP)


@pytest.mark.parametrize(
    "defect, outcome, says",
    [
        ("refuse", "refused", "fuzz: it is no such file; name another\n"),
        ("break line", "refused", r"fuzz: two\nlines"),
        ("hog", "refused", "memory"),
        ("fail", "failed", "KeyError"),
        ("obey terminal", "failed", "control character"),
        ("warn", "failed", "UserWarning"),
        ("complain", "failed", "libplanted"),
        ("hang", "failed", "Timeout"),
        ("crash", "failed", "Segmentation fault"),
    ],
)
def test_planted_defects_are_found(defect, outcome, says, tmp_path):
    campaign.write(tmp_path / "corpus", {"file": b"\0", "defect": defect.encode()})
    chosen = Format("", "file", lambda rng, files: {"file": rng.bytes(1)}, "tests.fuzz.planted:targets")
    seconds = 0.5 if defect == "hang" else 10
    verdicts = campaign.fuzz("planted", chosen, tmp_path / "corpus", range(4), tmp_path / "kept", seconds=seconds)
    assert [verdict.outcome for verdict in verdicts.values()] == ["accepted", outcome, "accepted", outcome]
    assert says in verdicts[1].text and says in verdicts[3].text
    numbers = (1, 3) if outcome == "failed" else ()
    bytes_of = {number: blind.generator(0, "planted", number).bytes(1) for number in numbers}
    kept = {path.parent.name: path.read_bytes() for path in tmp_path.glob("kept/*/file")}
    assert kept == {f"planted-0-{number}": content for number, content in bytes_of.items()}
    assert not [child for child in psutil.Process().children() if "spawn_main" in " ".join(child.cmdline())]


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "corpus"
    corpus.make(place)
    return place


def check(intact, kept, name, count):
    """Fuzzes a format; the environment variables FUZZ_SEED and FUZZ_FIRST choose other mutants."""
    seed, first = int(os.environ.get("FUZZ_SEED", "0")), int(os.environ.get("FUZZ_FIRST", "0"))
    chosen, seconds = FORMATS.get(name, WORKDIR), 10.0 if name in FORMATS else 120.0
    verdicts = campaign.fuzz(name, chosen, intact, range(first, first + count), kept, seed=seed, seconds=seconds)
    outcomes = [verdict.outcome for verdict in verdicts.values()]
    assert "failed" not in outcomes, "\n".join(
        f"{verdict.text}\nkept in {kept}/{name}-{seed}-{number}; try again with FUZZ_SEED={seed} FUZZ_FIRST={number} "
        f"FUZZ_MUTANTS=1 pytest -m nightly 'tests/fuzz/test_fuzz.py::test_many_mutants[{name}]'"
        for number, verdict in verdicts.items()
        if verdict.outcome == "failed"
    )
    assert "accepted" in outcomes or count == 1


@pytest.mark.slow
def test_mutants_are_accepted_or_refused_in_one_line(intact, tmp_path):
    """Fuzzes all formats in one test, for one corpus."""
    for name in FORMATS:
        check(intact, tmp_path, name, 200)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutants(name, intact, tmp_path):
    check(intact, tmp_path, name, int(os.environ.get("FUZZ_MUTANTS", "2000")))


@pytest.mark.nightly
def test_commands_accept_or_refuse_runs_with_one_changed_field(tmp_path):
    """Whole commands, which write nothing outside of what they are told to write."""
    commands.make(tmp_path / "corpus")
    check(tmp_path / "corpus", tmp_path / "kept", "workdir", int(os.environ.get("FUZZ_MUTANTS", "2000")))
