"""TFRecord files read in place, the cache of their index, and records that are damaged."""

import os
import pathlib
import pickle
import struct

import numpy as np
import pytest

from mixedres.original import records
from tests.data import made
from tests.data.made import example

CONTENT = [bytes([index]) * (index * 37 % 50) for index in range(20)]  # one is empty


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mixedres"


@pytest.fixture
def paths(tmp_path):
    found = [str(tmp_path / name) for name in ("a", "b", "c")]
    for path, part in zip(found, (CONTENT[:6], CONTENT[6:8], CONTENT[8:]), strict=True):
        made.write_tfrecord(tmp_path / path, part)
    return found


@pytest.fixture
def indexed(monkeypatch):
    """Files whose index was made, not found."""
    made_of, record_spans = [], records.record_spans
    monkeypatch.setattr(records, "record_spans", lambda path: made_of.append(path) or record_spans(path))
    return made_of


def read(files):
    return [files[index] for index in range(len(files))]


def whole(paths):
    return records.TFRecordFiles([records.Part(path) for path in paths])


def test_records_of_all_files_in_order(paths):
    assert read(whole(paths)) == CONTENT and read(pickle.loads(pickle.dumps(whole(paths)))) == CONTENT
    assert read(whole(paths[::-1])) == CONTENT[8:] + CONTENT[6:8] + CONTENT[:6]


@pytest.mark.parametrize(("skip", "take"), [(0, None), (0, 3), (2, None), (2, 3), (6, None), (0, 0), (5, 1)])
def test_some_records_of_a_file(paths, skip, take):
    part = records.Part(paths[0], skip, take, total=6)
    files = records.TFRecordFiles([records.Part(paths[1]), part, records.Part(paths[2], 1, 2)])
    stop = None if take is None else skip + take
    assert read(files) == CONTENT[6:8] + CONTENT[:6][skip:stop] + CONTENT[9:11]


def test_no_records_at_all(paths, tmp_path):
    assert len(records.TFRecordFiles([records.Part(paths[0], 0, 0)])) == 0
    (tmp_path / "empty").touch()
    empty = str(tmp_path / "empty")
    assert records.record_spans(empty).shape == (0, 2) and read(whole([empty, paths[1], empty])) == CONTENT[6:8]


def test_index_is_kept(paths, indexed, cache):
    assert read(whole(paths)) == CONTENT and sorted(indexed) == paths
    [kept] = cache.iterdir()
    indexed.clear()
    assert read(whole(paths)) == CONTENT and indexed == []
    # It is what is used: another one gives other records.
    with np.load(kept) as saved:
        ranges, counts = saved["ranges"], saved["counts"]
    ranges[0] = ranges[1]
    np.savez(kept, ranges=ranges, counts=counts)
    assert read(whole(paths)) == [CONTENT[1], *CONTENT[1:]] and indexed == []
    assert list(cache.iterdir()) == [kept]


def test_index_is_made_anew_when_a_file_changed(paths, indexed):
    whole(paths)
    path, new = pathlib.Path(paths[1]), [b"other", b"more", b"longer than before" * 9]
    for content in (new, new[::-1]):  # the second of the same size, and written at another time
        before = path.stat()
        made.write_tfrecord(path, content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
        indexed.clear()
        assert read(whole(paths)) == CONTENT[:6] + content + CONTENT[8:] and sorted(indexed) == paths
    assert path.stat().st_size == before.st_size


def test_unwritable_cache_is_harmless(paths, cache, indexed):
    cache.parent.write_text("a file where the directory should be")
    assert read(whole(paths)) == CONTENT == read(whole(paths)) and len(indexed) == 6


@pytest.mark.parametrize("content", [b"", b"PK\3\4 cut off", [[12, 2**40]], [[-5, 3]], [[0, 0, 0]], [["a", "b"]]])
def test_damaged_cache_does_no_harm(paths, cache, indexed, content):
    """Nor does one with ranges of other records."""
    whole(paths)
    [kept] = cache.iterdir()
    if isinstance(content, bytes):
        kept.write_bytes(content)
    else:
        np.savez(kept, ranges=np.array(content), counts=[1])
    assert read(whole(paths)) == CONTENT and len(indexed) == 6


def test_file_that_shrinks_during_reading_is_refused(paths):
    files = whole(paths)
    os.truncate(paths[2], 30)
    with pytest.raises(ValueError, match=f"{paths[2]} ends within record 19"):
        files[19]


def test_more_files_may_be_opened():
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(before[0], 256), before[1]))
        for wanted in (300, 10):  # never lowered
            records.allow_open_files(wanted)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (300, before[1])
        if before[1] != resource.RLIM_INFINITY:
            records.allow_open_files(before[1] + 1)
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (before[1], before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def single(record, **keys):
    return records.Records("toy, train", [record], records.Keys(**keys))


def test_example_is_image_label_and_name():
    held = single(example(image=[b"pixels"], label=[7], file_name=["ä.jpg".encode()], more=[1, 2]))
    assert held[0] == (b"pixels", 7) and held.file_name(0) == "ä.jpg" and len(held) == 1
    other = single(example(a=[b"pixels"], b=[7], c=[b"\xff.jpg"]), image="a", label="b", file_name="c", first_label=1)
    assert other[0] == (b"pixels", 6) and other.file_name(0) == "�.jpg"
    assert single(example(image=[b"x"], label=[1]), file_name=None).file_name(0) == ""
    assert single(example(image=[b"x"], label=[1], file_name=[])).file_name(0) == ""


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (b"\xff\xff\xff", "the record is damaged: it is no tf.train.Example"),
        (b"", "the record has no 'image' or no 'label'"),
        (example(image=[b"x"]), "the record has no 'image' or no 'label'"),
        (example(label=[1]), "the record has no 'image' or no 'label'"),
        (example(image=[b"x", b"y"], label=[1]), "the record has 2 images and 1 labels, not one of each"),
        (example(image=[b"x"], label=[]), "the record has 1 images and 0 labels, not one of each"),
        (example(image=[5], label=[1]), "the record has 0 images and 1 labels, not one of each"),
    ],
)
def test_records_of_something_else(record, words):
    assert made.message(lambda: single(record)[0]) == words and single(record).file_name(0) == ""


def test_truncation_at_any_byte_is_found(tmp_path):
    made.write_tfrecord(tmp_path / "file", [b"abc", b"defg"])
    data = (tmp_path / "file").read_bytes()
    for size in range(1, len(data)):
        (tmp_path / "file").write_bytes(data[:size])
        if size == 19:  # between the two records: only whoever knows how many there are can tell
            assert len(records.record_spans(tmp_path / "file")) == 1
            continue
        with pytest.raises(ValueError, match=rf"{tmp_path}/file is cut off after {int(size > 19)} records"):
            records.record_spans(tmp_path / "file")


@pytest.mark.parametrize(
    "data", [b"\xff\xd8 an image, say, of some length", struct.pack("<QI", 2**64 - 1, 0) + bytes(20)]
)
def test_something_else_is_no_tfrecord(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match="is cut off after 0 records, or is no TFRecord file"):
        records.record_spans(tmp_path / "file")


def test_record_larger_than_a_photograph_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_MOST_BYTES", 3)
    made.write_tfrecord(tmp_path / "file", [b"abc", b"abcd"])
    files = whole([str(tmp_path / "file")])
    assert files[0] == b"abc"
    with pytest.raises(ValueError, match="has 4 bytes, more than 3"):
        files[1]
