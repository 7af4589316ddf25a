"""Metrics on the disk, and where the disk takes none."""

import io
import os
import tracemalloc

import pytest

from mixedres import checkpoints
from mixedres._internal import files
from mixedres._internal.registry import TRACKERS
from mixedres.train.metrics import writers
from mixedres.train.metrics.trackers import Trackers
from tests.checkpoints import saved_files
from tests.train import run_cases


def test_resume_drops_broken_lines_and_lines_after_the_checkpoint(tmp_path):
    path = tmp_path / "metrics.jsonl"
    made = [f'{{"step": {step}, "kind": "{kind}"}}\n' for step in (2, 4, 6) for kind in ("train", "eval")]
    path.write_text("".join(made) + '{"ste')
    writers.MetricWriter(path, first_step=4).close()
    assert path.read_text() == "".join(made[:4])
    writers.MetricWriter(path, first_step=4, evaluated=False).close()
    assert path.read_text() == "".join(made[:3])


PLAIN = b'{"step": 3, "kind": "train", "loss": 1.5e-07, "top1": null}\n'


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"\0\0\0\0\n",
        b"[" * 10**5 + b"\n",
        PLAIN[:-1] + PLAIN,  # without a line break
        PLAIN.replace(b"null", b"nul"),
        PLAIN.replace(b"1.5", b"01.5"),
        PLAIN.replace(b"3", b"\xb3"),
        PLAIN.replace(b"3", b'"3"'),
        PLAIN.replace(b"3", b"5"),  # a later step
        PLAIN.replace(b"train", b"other"),
        PLAIN.replace(b'"train"', b"7"),
        PLAIN.replace(b"loss", b"lo\nss"),
    ],
    ids=range(13),
)
def test_resume_removes_a_damaged_line_anywhere(tmp_path, line):
    path, numerics = tmp_path / "metrics.jsonl", b'{"step": 4, "kind": "numerics", "caf\xc3\xa9": 1}\n'
    path.write_bytes(PLAIN + line + PLAIN + line + numerics[:-1])  # the last line lacks its end
    writers.MetricWriter(path, first_step=4).close()
    assert path.read_bytes() == PLAIN + PLAIN + numerics


def test_resume_leaves_a_whole_file_alone_and_holds_little_of_it(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(PLAIN.replace(b"loss", b"loss" * 50_000) * 60)  # 12 MB
    before = path.stat()
    tracemalloc.start()
    writers._keep_lines(path, {"train": 3})
    assert path.stat().st_ino == before.st_ino and path.stat().st_mtime_ns == before.st_mtime_ns
    writers._keep_lines(path, {"train": 2})
    assert tracemalloc.get_traced_memory()[1] < 6e6 and path.read_bytes() == b""
    tracemalloc.stop()


def events(directory):
    """The events of each file, oldest file first."""
    return [
        list(run_cases.events(path))
        for path in sorted(directory.glob(checkpoints.workdir.EVENTS), key=lambda path: int(path.suffixes[-2][1:]))
    ]


def test_resume_purges_tensorboard_events(tmp_path):
    for first_step in (0, 4):
        with Trackers({"tensorboard": TRACKERS["tensorboard"](tmp_path, {}, first_step)}) as trackers:
            trackers.write(5, "train", {"loss": 1.0 + first_step})
    first, second = events(tmp_path)
    assert first[0].file_version == "brain.Event:2" == second[0].file_version
    assert [e.step for e in (first + second) if e.HasField("session_log")] == [1, 5]
    assert second[-1].summary.value[0].tag == "train/loss" and second[-1].summary.value[0].simple_value == 5.0


def test_non_finite_metrics_become_null(tmp_path):
    out = writers.MetricWriter(tmp_path / "metrics.jsonl", 0)
    out.write(1, "eval", {"loss": float("nan"), "top1": 0.5})
    out.close()
    assert run_cases.lines(tmp_path) == [{"step": 1, "kind": "eval", "loss": None, "top1": 0.5}]


def test_lines_survive_a_full_disk(tmp_path, monkeypatch):
    out = writers.MetricWriter(tmp_path / "metrics.jsonl", 0)
    write, room = os.write, [30]  # bytes that the disk still takes

    def limited(file, data):
        if room[0] <= 0:
            saved_files.full_disk()
        done = write(file, data[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(files.os, "write", limited)
    for step in (1, 2, 3):
        out.write(step, "train", {"loss": 0.5})
    assert out.problem() == "No space left on device" and not out.sync()
    assert (tmp_path / "metrics.jsonl").stat().st_size == 30
    room[0] = 10**6
    assert out.sync() and out.problem() is None
    out.write(4, "train", {"loss": 0.5})
    out.close()
    assert [line["step"] for line in run_cases.lines(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("fails", ["open", "write", "flush"])
def test_full_disk_ends_tensorboard_curves_only(tmp_path, monkeypatch, fails):
    """`close` waits for the thread that writes them, so it must not have died."""
    whole = open

    class Full(io.FileIO):
        def write(self, data):
            if fails == "write" and b"train/loss" in data:
                saved_files.full_disk()
            return super().write(data)

        def flush(self):
            if fails == "flush":
                saved_files.full_disk()

    def opened(path, mode="r", *rest, **options):
        if "tfevents" not in str(path) or mode != "wb":
            return whole(path, mode, *rest, **options)
        if fails == "open":
            saved_files.full_disk()
        return Full(path, "w")

    monkeypatch.setattr("builtins.open", opened)
    with Trackers({"tensorboard": TRACKERS["tensorboard"](tmp_path, {}, 0)}) as trackers:
        out = writers.MetricWriter(tmp_path / "metrics.jsonl", 0, trackers=trackers)
        for step in range(1, 100):
            out.write(step, "train", {"loss": 1.0})
        out.close()
    assert [line["step"] for line in run_cases.lines(tmp_path)] == list(range(1, 100))
    curves = [event for found in events(tmp_path) for event in found if event.summary.value]
    assert fails == "flush" or not curves  # some may have been written before the first flush
