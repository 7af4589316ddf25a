"""Fuzzing: mutations are what they say, the judge sees every kind of failure, and no mutant makes a command fail."""

import json
import os
import pathlib
import zlib

import numpy as np
import psutil
import pytest

from tests.data import made
from tests.fuzz import blind, campaign, containers, corpus, hostile_json, images, planted
from tests.fuzz.formats import FORMATS
from tests.fuzz.worker import judge

DATA = bytes(range(256)) * 3


def mutants(mutation, *arguments, count=200):
    return [mutation(blind.generator(0, "test", number), *arguments) for number in range(count)]


@pytest.mark.parametrize("mutation", blind.MUTATIONS, ids=lambda mutation: mutation.__name__)
def test_mutations_of_bytes(mutation):
    found = mutants(mutation, DATA, b"other" * 20)
    assert found == mutants(mutation, DATA, b"other" * 20)
    assert sum(mutant != DATA for mutant in found) > 100
    assert all(isinstance(mutation(np.random.default_rng(0), data, b""), bytes) for data in (b"", b"x"))


def test_mutants_depend_on_seed_format_and_number():
    keys = [(0, "png", 0), (1, "png", 0), (0, "jpeg", 0), (0, "png", 1)]
    assert len({blind.generator(*key).bytes(8) for key in keys}) == 4


def test_hostile_json_is_mostly_json():
    document = json.dumps({"a": {"b": [1, 2.5, "c"]}, "d": None}).encode()

    def is_json(text):
        try:
            json.loads(text)
        except ValueError:
            return False
        except RecursionError:
            return True
        return True

    found = mutants(hostile_json.mutated, document)
    assert found == mutants(hostile_json.mutated, document)
    assert sum(map(is_json, found)) > 120 and len(set(found)) > 120
    assert any(b'"a": ' in text and text.count(b'"a"') > 1 for text in found)  # a doubled key


def png_sums_hold(data):
    at = len(images.PNG_MAGIC)
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "big")
        if zlib.crc32(data[at + 4 : at + 8 + length]) != int.from_bytes(
            data[at + 8 + length : at + 12 + length], "big"
        ):
            return False
        at += 12 + length
    return True


def test_png_keeps_its_sums():
    data = made.encoded(made.photo(20, 30), "PNG")
    assert images.join_chunks(images.chunks(data)) == data
    found = mutants(images.png, data)
    assert found == mutants(images.png, data)
    assert sum(map(png_sums_hold, found)) > 120 and found.count(data) < 40


def test_jpeg_keeps_its_segments():
    data = made.encoded(made.photo(20, 30), "JPEG")
    assert images.join_segments(*images.segments(data)) == data
    found = mutants(images.jpeg, data)
    assert found == mutants(images.jpeg, data)
    assert sum(mutant[:2] == b"\xff\xd8" and mutant != data for mutant in found) > 120


def test_sums_of_tfrecord():
    assert containers.masked_crc(b"") == 0xA282EAD8
    crc = 0xE3069283  # of '123456789', the check value of CRC-32C
    assert containers.masked_crc(b"123456789") == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    records = [b"one", b"", b"three"]
    assert containers.records(containers.join_records(records)) == records


def test_safetensors_keep_the_length_of_their_header(tmp_path):
    import safetensors.numpy

    data = safetensors.numpy.save({"a": np.ones((4, 4), np.float32), "b": np.ones(6, np.float16)}, {"mixedres": "{}"})
    found = mutants(containers.safetensors, data)
    assert found == mutants(containers.safetensors, data)

    def readable(content):
        try:
            return bool(safetensors.numpy.load(content))
        except Exception:
            return False

    assert sum(map(readable, found)) > 20  # deeper than the header
    assert any(b"BF16" in mutant or b"I64" in mutant for mutant in found)


def test_cifar_archives_stay_archives(tmp_path):
    corpus.cifar(tmp_path)
    data = (tmp_path / "cifar-10-binary.tar.gz").read_bytes()
    found = mutants(containers.cifar, data, count=100)
    assert found == mutants(containers.cifar, data, count=100)
    assert sum(mutant[:2] == b"\x1f\x8b" and mutant != data for mutant in found) > 70


def test_checksums_of_checkpoints(tmp_path):
    from mixedres._internal.files import checksums_hold

    files = {"_CHECKPOINT_METADATA": b"{}", "default/_METADATA": b'{"a": 1}', "default/d/x": DATA, "default/y": b""}
    files[containers.CHECKSUMS] = containers.checksums(files)
    made.write_files(tmp_path, files)
    assert checksums_hold(tmp_path / "default")
    found = mutants(containers.checkpoint, files, count=100)
    assert found == mutants(containers.checkpoint, files, count=100)
    repaired = [changes for changes in found if len(changes) > 1 and containers.CHECKSUMS in changes]
    assert len(repaired) > 2
    place = tmp_path / "mutant"
    made.write_files(place, {name: content for name, content in (files | repaired[0]).items() if content is not None})
    assert checksums_hold(place / "default")


def test_command_may_succeed_or_refuse_in_one_line():
    assert judge(lambda: print("fine")).outcome == "accepted"
    verdict = judge(planted.refuse)
    assert verdict.outcome == "refused" and "name another" in verdict.text


def failures(name, **options):
    return campaign.fuzz(name, pathlib.Path(), range(5), module="tests.fuzz.planted", **options)


def test_what_is_refused_is_no_failure():
    tally = failures("refuse")
    assert (tally.accepted, tally.refused, tally.failed) == (4, 1, 0)


@pytest.mark.parametrize(
    "name, says",
    [
        ("fail", "KeyError"),
        ("obey_terminal", "control character"),
        ("warn", "UserWarning"),
        ("complain", "libplanted"),
        ("hang", "no end"),
        ("crash", "SIGSEGV"),
    ],
)
def test_planted_defects_are_found(name, says, tmp_path):
    tally = failures(name, seconds=0.5 if name == "hang" else 10, kept=tmp_path)
    assert (tally.accepted, tally.failed) == (4, 1)
    ((signature, numbers),) = tally.failures.items()
    assert says in signature
    # A lost process is followed by another, in which the third call is one of the last two numbers.
    assert numbers == [2]
    (kept,) = tmp_path.iterdir()
    assert (kept / "input" / "file").read_bytes() == planted.CONTENT
    assert says in (kept / "report.txt").read_text()
    assert not [child for child in psutil.Process().children(recursive=True) if "tests.fuzz.worker" in child.cmdline()]


def test_what_takes_more_memory_than_allowed():
    tally = failures("hog")
    assert tally.failed or tally.refused == 1  # of which the command says that it was too much
    assert tally.accepted == 4


def test_broken_line_is_whole_on_the_terminal():
    assert judge(planted.break_line).outcome == "refused"
    assert "\n" not in judge(planted.break_line).text.rstrip("\n")


@pytest.fixture(scope="module")
def intact(tmp_path_factory):
    place = tmp_path_factory.mktemp("fuzz") / "corpus"
    campaign.make_corpus(place)
    return place


def check(intact, name, count):
    """The environment variables FUZZ_SEED and FUZZ_KEPT: another seed, and a folder for inputs that fail."""
    kept = os.environ.get("FUZZ_KEPT")
    seed, kept = int(os.environ.get("FUZZ_SEED", "0")), kept and pathlib.Path(kept)
    tally = campaign.fuzz(name, intact, range(count), seed=seed, kept=kept)
    report = "\n".join(f"{signature}: {len(numbers)}, {numbers[:5]}" for signature, numbers in tally.failures.items())
    assert not tally.failed and tally.mutations == count and tally.slowest < 10, f"{name}: {report}"
    assert tally.accepted


@pytest.mark.slow
def test_mutants_are_accepted_or_refused_in_one_line(intact):
    """All formats in one test, for one corpus."""
    for name in FORMATS:
        check(intact, name, 200)


@pytest.mark.nightly
@pytest.mark.parametrize("name", FORMATS)
def test_many_mutants_are_accepted_or_refused_in_one_line(name, intact):
    check(intact, name, int(os.environ.get("FUZZ_MUTANTS", "2000")))
