"""Checkpoints alone: which stay, which are whole, and who waits for the disk."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import msgspec
import numpy as np
import pytest

from mixedres import checkpoints
from mixedres._internal.errors import OtherModelError
from mixedres._internal.files import CHECKSUMS
from mixedres._internal.tree import fingerprint
from mixedres.checkpoints import Checkpoints, folder
from mixedres.train.metrics.log import Meter, Stopwatch
from tests import ROOT
from tests.checkpoints import saved_files


def state(value):
    return {"params": {"kernel": jnp.full((4, 3), value, jnp.float32)}, "step": jnp.asarray(value, jnp.int32)}


LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state(0))


def steps(directory):
    return sorted(int(path.name) for path in directory.iterdir())


@pytest.fixture
def saved(tmp_path):
    made = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield made
    made.close()


def test_newest_and_the_best_stay(saved):
    for step in range(1, 7):
        saved.save(step, state(step), {"n": step, "loss": float("inf")}, best=min(step, 2))
        assert saved.finish() == []
    assert steps(saved.directory) == [2, 5, 6]
    restored, record, damaged = saved.restore_newest(LIKE)
    assert int(restored["step"]) == 6 and record == {"n": 6, "loss": float("inf")} and damaged == []


def test_what_others_left_in_the_directory_costs_no_checkpoint(saved):
    """A folder of a larger number is no newer checkpoint, and a name that is taken stops one removal alone."""
    (saved.directory / "999").mkdir(parents=True)
    for step in range(1, 5):
        saved.save(step, state(step), {"n": step})
        failures = saved.finish()
        (saved.directory / "1.tmp").write_text("")
    names = {path.name for path in saved.directory.iterdir()}
    assert names == {"1", "1.tmp", "3", "4", "999"} and "old checkpoints could not be removed" in failures[0]


@pytest.fixture
def slow(monkeypatch):
    """A disk that finishes nothing before the event is set."""
    free = threading.Event()
    saved_files.before_each(monkeypatch, lambda step: free.wait(30))
    yield free
    free.set()


def test_slow_disk_delays_nothing_and_saves_the_newest_state_next(saved, slow):
    for step in (1, 2, 3):
        saved.save(step, state(step), {})
        assert saved.poll() == [] and saved.latest_step() == 1
    slow.set()
    assert saved.finish() == [] and steps(saved.directory) == [1, 3]
    assert int(saved.restore_newest(LIKE)[0]["step"]) == 3


def test_waiting_copy_keeps_the_state_and_record_of_its_step(saved, slow):
    step = jax.jit(lambda x: jax.tree.map(lambda leaf: leaf + 1, x), donate_argnums=0)
    saved.save(1, state(1), {})
    means = Meter(Stopwatch(), 0.0)
    means.add({"loss": 2.0, "top1": 1.0, "grads_finite": 1.0})
    current, record = state(2), {"line": msgspec.to_builtins(means.sums)}
    saved.save(2, current, record)
    current = jax.block_until_ready(step(current))  # overwrites the memory of the one that waits
    means.add({"loss": 100.0, "top1": 0.0, "grads_finite": 1.0})
    record["line"]["all"] = "more"
    slow.set()
    saved.finish()
    restored, kept, _ = saved.restore_newest(LIKE)
    np.testing.assert_array_equal(restored["params"]["kernel"], np.full((4, 3), 2.0))
    assert kept == {"line": {"applied": [1, 2.0, 1.0], "all": [1, 2.0, 1.0]}}


def test_best_is_never_pushed_out_of_the_queue(saved, slow):
    for step in (1, 2, 3, 4):  # 4 takes the place of 3; neither waits for the disk
        saved.save(step, state(step), {}, best=2 if step > 1 else None)
    assert [step for step, *_ in saved._waiting] == [2, 4]
    saved.save(5, state(5), {}, best=5)
    assert [step for step, *_ in saved._waiting] == [5]
    saved.save(6, state(6), {}, best=5)
    slow.set()
    saved.finish()
    assert steps(saved.directory) == [5, 6]


def flip(data):
    middle = len(data) // 2
    return data[:middle] + bytes(byte ^ 0xFF for byte in data[middle : middle + 16]) + data[middle + 16 :]


@pytest.mark.parametrize("damage", [flip, lambda data: data[: len(data) // 2], lambda data: b"", None])
def test_any_damage_to_any_file_is_found(saved, damage):
    for step in (1, 2):
        saved.save(step, state(step), {})
        saved.finish()
    names = json.loads((saved.directory / "2" / CHECKSUMS).read_text())
    for path in (saved.directory / "2").iterdir():
        name, before = path.name, path.read_bytes()
        assert name in (*names, CHECKSUMS)
        path.write_bytes(damage(before)) if damage else path.unlink()
        restored, _, damaged = saved.restore_newest(LIKE)
        assert int(restored["step"]) == 1 and damaged == [2], name
        path.write_bytes(before)
    assert saved.restore_newest(LIKE)[2] == []
    (saved.directory / "2" / CHECKSUMS).write_text(json.dumps({folder.RECORD: names[folder.RECORD]}))
    assert saved.restore_newest(LIKE)[2] == [2]


def link(path):
    (path / folder.RECORD).rename(path.parent / "record")
    (path / folder.RECORD).symlink_to(path.parent / "record")


def name_outside(path):
    sums = json.loads((path / CHECKSUMS).read_text())
    (path / CHECKSUMS).write_text(json.dumps(sums | {"../1/record.json": "0"}))


@pytest.mark.parametrize(
    "change",
    [
        link,
        name_outside,
        lambda path: os.mkfifo(path / "pipe"),
        lambda path: (path / "more.json").write_text("{}"),
        lambda path: (path / "more").mkdir() or (path / "more" / "file").write_text(""),
        lambda path: os.truncate(path / folder.STATE, 10**12),  # takes no place, and would be read for an hour
        lambda path: os.truncate(path / folder.RECORD, 10**12),
    ],
    ids=["link", "outside", "pipe", "file", "folder", "large state", "large record"],
)
def test_what_no_run_wrote_is_not_opened(saved, change, monkeypatch):
    for step in (1, 2):
        saved.save(step, state(step), {})
        saved.finish()
    change(saved.directory / "2")
    hashed, digest = [], folder._sha256
    monkeypatch.setattr(folder, "_sha256", lambda file: hashed.append(file) or digest(file))
    restored, _, damaged = saved.restore_newest(LIKE)
    assert int(restored["step"]) == 1 and damaged == [2] and len(hashed) == 2
    with pytest.raises(OSError, match=r"whole \(steps \[2\]"):
        saved.restore_newest(LIKE, only=2)


def test_stated_shapes_are_compared_before_anything_is_read(saved, monkeypatch):
    saved.save(1, state(1), {})
    saved.finish()
    found = folder.Opened.arrays

    def larger(self, check):
        """As if the header stated more numbers than the network has."""
        return found(
            self, lambda stored: check({n: x._replace(shape=(10**9, *x.shape[1:])) for n, x in stored.items()})
        )

    with monkeypatch.context() as patch:
        patch.setattr(folder.Opened, "arrays", larger)
        with pytest.raises(OtherModelError, match=r"kernel is float32\[1000000000, 3\] there and float32\[4, 3\] here"):
            saved.restore_newest(LIKE)
    restored, *_ = saved.restore_newest({"step": LIKE["step"]}, others=True)
    assert restored.keys() == {"step"}


def test_reader_beside_a_trainer_that_keeps_one_checkpoint(tmp_path, monkeypatch):
    """The trainer saves, and removes what it had, before and after each look of the reader."""
    trainer, reader, steps = Checkpoints(tmp_path, keep=1), Checkpoints(tmp_path), itertools.count(1)

    def train():
        step = next(steps)
        trainer.save(step, state(step), {"n": step})
        assert trainer.finish() == []

    train()
    opened, beats = folder.Opened.__init__, itertools.count()
    monkeypatch.setattr(folder.Opened, "__init__", lambda *given: (next(beats) % 3 or train(), opened(*given))[1])
    for name in ("is_whole", "arrays"):
        method = getattr(folder.Opened, name)
        monkeypatch.setattr(folder.Opened, name, lambda *given, method=method: (train(), method(*given))[1])
    for _ in range(20):
        restored, record, damaged = reader.restore_newest(LIKE)
        assert int(restored["step"]) == record["n"] and damaged == []


@pytest.mark.parametrize(
    ("like", "words"),
    [
        ({"step": LIKE["step"]}, r"params/kernel is float32\[4, 3\] there and missing here"),
        (LIKE | {"more": LIKE["step"]}, r"more is missing there and int32\[\] here"),
        (LIKE | {"params": {"kernel": jnp.zeros((4, 2))}}, r"kernel is float32\[4, 3\] there and float32\[4, 2\] here"),
        (LIKE | {"step": jax.ShapeDtypeStruct((), jnp.float32)}, r"step is int32\[\] there and float32\[\] here"),
    ],
)
def test_checkpoint_of_another_model_lists_differing_arrays(saved, like, words):
    saved.save(1, state(1), {})
    saved.finish()
    with pytest.raises(OtherModelError, match=rf"^[^\n]*{words}[^\n]*$"):
        saved.restore_newest(like)


def test_partial_save_of_a_killed_process_is_removed(saved):
    saved.save(1, state(1), {})
    saved.finish()
    for name in saved_files.PARTIAL:
        (saved.directory / name.format(2)).mkdir()
    assert saved.latest_step() == 1
    saved.remove_partial()
    assert steps(saved.directory) == [1]


def test_fault_at_any_call_loses_no_checkpoint(tmp_path):
    """The process is killed, or the disk fails, before every call of the system, and in the middle of a file."""
    command = [sys.executable, "-m", "tests.checkpoints.killed", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ends = {(-signal.SIGXFSZ, False), (0, True), *itertools.product((1, 9), (False, True))}
    assert {tuple(json.loads(line)) for line in done.stdout.splitlines()} == ends


def test_files_are_on_the_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """Files are told by their numbers, which a new name does not change."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(
        os, "replace", lambda *names, replace=os.replace: (synced.append(names[1].name), replace(*names))
    )
    folder.write(tmp_path, 2, {"step": np.asarray(2)}, "{}")
    named = synced.index("2")
    made = {path.stat().st_ino for path in (tmp_path / "2", *(tmp_path / "2").iterdir())}
    assert len(made) == 4 and made <= set(synced[:named])
    assert (tmp_path / "2" / CHECKSUMS).stat().st_ino in synced[: synced.index(CHECKSUMS)]
    assert synced[named + 1 :] == [tmp_path.stat().st_ino]


def test_files_have_the_rights_of_the_umask(tmp_path):
    """A colleague evaluates the run: safetensors alone would keep the arrays to the user who trained."""
    before = os.umask(0o027)
    try:
        folder.write(tmp_path, 1, {"a": np.zeros(2)}, "{}")
        checkpoints.write_weights(tmp_path / "w.safetensors", {"a": np.zeros(2, np.float32)})
    finally:
        os.umask(before)
    files = [*(tmp_path / "1").iterdir(), tmp_path / "w.safetensors"]
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640} and len(files) == 4


def test_fingerprint_sees_every_bit():
    base = {"a": np.zeros((2, 3), np.float32), "b": np.ones(2, np.float32)}
    known = fingerprint(base)
    assert fingerprint(jax.tree.map(jnp.asarray, base)) == known
    others = [
        {"a": -base["a"], "b": base["b"]},  # -0.0
        {"a": base["a"].reshape(3, 2), "b": base["b"]},
        {"a": base["a"], "c": base["b"]},
        {"a": base["a"], "b": np.nextafter(base["b"], 2, dtype=np.float32)},
    ]
    assert len({known, *map(fingerprint, others)}) == 5
