"""Metrics on the disk, and where the disk takes none."""

import errno
import json
import os
import struct

import pytest
from tensorboardX.proto import event_pb2

from mixedres.train.metrics import writers


def lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]


def events(directory):
    """Every event of every file, in the order of their names."""
    for path in sorted(directory.glob("events.out.tfevents.*")):
        data, offset = path.read_bytes(), 0
        while offset < len(data):  # a TFRecord: length, its checksum, the event, its checksum
            (length,) = struct.unpack_from("<Q", data, offset)
            yield event_pb2.Event.FromString(data[offset + 12 : offset + 12 + length])
            offset += 16 + length


def test_a_new_start_drops_lines_after_its_checkpoint_and_broken_ones(tmp_path):
    path = tmp_path / "metrics.jsonl"
    made = [f'{{"step": {step}, "kind": "{kind}"}}\n' for step in (2, 4, 6) for kind in ("train", "eval")]
    path.write_text("".join(made) + '{"ste')
    writers.MetricWriter(path, first_step=4).close()
    assert path.read_text() == "".join(made[:4])
    writers.MetricWriter(path, first_step=4, evaluated=False).close()
    assert path.read_text() == "".join(made[:3])


def test_a_new_start_tells_tensorboard_to_drop_them_too(tmp_path):
    for first_step in (0, 4):
        out = writers.MetricWriter(tmp_path / "metrics.jsonl", first_step)
        out.write(5, "train", {"loss": 1.0 + first_step})
        out.close()
    first, second = (list(events_of) for events_of in _by_file(tmp_path))
    assert first[0].file_version == "brain.Event:2" == second[0].file_version
    assert [e.step for e in (first + second) if e.HasField("session_log")] == [1, 5]
    assert second[2].summary.value[0].tag == "train/loss" and second[2].summary.value[0].simple_value == 5.0


def _by_file(directory):
    files = sorted(directory.glob("events.out.tfevents.*"), key=lambda path: path.stat().st_mtime_ns)
    for path in files:
        alone = directory / path.name.replace(".", "-")
        alone.mkdir()
        path.rename(alone / path.name)
        yield events(alone)


def test_what_is_not_finite_becomes_null(tmp_path):
    out = writers.MetricWriter(tmp_path / "metrics.jsonl", 0)
    out.write(1, "eval", {"loss": float("nan"), "top1": 0.5})
    out.close()
    assert lines(tmp_path) == [{"step": 1, "kind": "eval", "loss": None, "top1": 0.5}]


def test_lines_wait_for_a_full_disk_and_none_is_lost_or_torn(tmp_path, monkeypatch):
    out = writers.MetricWriter(tmp_path / "metrics.jsonl", 0)
    write, room = os.write, [30]  # bytes that the disk still takes

    def limited(file, data):
        if room[0] <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(writers.os, "write", limited)
    for step in (1, 2, 3):
        out.write(step, "train", {"loss": 0.5})
    assert out.problem() == "No space left on device" and not out.sync()
    assert (tmp_path / "metrics.jsonl").stat().st_size == 30
    room[0] = 10**6
    assert out.sync() and out.problem() is None
    out.write(4, "train", {"loss": 0.5})
    out.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("fails", ["open", "write", "flush"])
def test_curves_have_a_gap_where_the_disk_was_full(tmp_path, monkeypatch, fails):
    out = writers.MetricWriter(tmp_path / "metrics.jsonl", 0)
    out.write(1, "train", {"loss": 1.0})

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(writers, "_FLUSH_SECONDS", -1.0)  # a flush with every event
        patch.setattr(writers.RecordWriter, {"open": "__init__"}.get(fails, fails), full)
        if fails == "open":
            patch.setattr(writers.RecordWriter, "write", full)
        for step in (2, 3):
            out.write(step, "train", {"loss": 1.0})
    out.write(4, "train", {"loss": 1.0})
    out.close()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    steps = [event.step for event in events(tmp_path) if event.summary.value]
    assert steps[0] == 1 and steps[-1] == 4
