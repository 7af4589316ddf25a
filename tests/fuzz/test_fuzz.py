"""Fuzzing: the judge sees every kind of failure, and no mutant makes a command fail."""

import os
import shutil
import time
import warnings

import pytest

from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError
from tests.data import made
from tests.fuzz import formats, mutations
from tests.fuzz.judge import judge
from tests.fuzz.mutations import PARTS

KINDS = ("jpeg", "array_record", *PARTS, "data", "config", "checkpoint")


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
        folder, place = corpus / ("run" if kind in ("data", "config", "checkpoint") else kind), tmp_path / kind
        intact = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}

        def read(target, changes):
            shutil.rmtree(place, ignore_errors=True)
            made.write_files(place, {name: text for name, text in (intact | changes).items() if text is not None})
            return judge(target, place, seconds=10) == "accepted"

        assert all(read(target, {}) for target in targets[kind])
        if kind in PARTS:  # mutants keep the lengths and sums of the format
            split, join = PARTS[kind]
            files = [data for name, data in intact.items() if kind in name]
            assert files and all(split(join(split(data))) == split(data) for data in files)
        accepted = 0
        for number in range(first, first + count):
            changes = formats.mutant(mutations.generator(seed, kind, number), kind, intact)
            for target in targets[kind]:
                try:
                    accepted += read(target, changes)
                except AssertionError as error:
                    again = f"FUZZ_SEED={seed} FUZZ_FIRST={number} FUZZ_MUTANTS=1"
                    raise AssertionError(f"{again} pytest -m nightly tests/fuzz -k {kind}\n{error}") from None
        assert accepted or count == 1

    return judge_mutants


@pytest.mark.slow
def test_mutants_are_accepted_or_refused_in_one_line(read):
    """All formats in one test, for one corpus."""
    for kind in KINDS:
        read(kind, 50 if kind in ("data", "checkpoint") else 200)  # they read a whole checkpoint


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_many_mutants(kind, read):
    read(kind, int(os.environ.get("FUZZ_MUTANTS", "2000")))
