"""A run that was killed in every way ends with the bits of one that was not, and leaves nothing behind."""

import json
import mmap
import random

import numpy as np
import pytest

from tests.interruptions import runs


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of a run on images."""
    folder = tmp_path_factory.mktemp("images") / "images"
    runs.images(folder)
    return ("--config=folder:fp16,model=cifar_resnet8", f"--config.data.dir={folder}", "--config.batch_size=8")


@pytest.fixture(scope="module")
def long(options):
    return (*options, "--config.steps=2000")


@pytest.fixture(scope="module")
def undisturbed(long, tmp_path_factory):
    """The outcome of a long run."""
    workdir = tmp_path_factory.mktemp("undisturbed") / "run"
    runs.finish(long, workdir)
    return runs.outcome(workdir)


@pytest.mark.slow
def test_killed_in_every_way(options, tmp_path):
    random.seed(0)
    before, short = runs.shared_memory(), (*options, "--config.steps=300")
    runs.finish(short, tmp_path / "whole")
    assert set(runs.disturb(tmp_path / "run", short, runs.KINDS.values())) == {-9, 143}
    assert runs.outcome(tmp_path / "run") == runs.outcome(tmp_path / "whole")
    assert runs.left_in_shared_memory(before) == []


@pytest.mark.nightly
@pytest.mark.parametrize("name", runs.KINDS)
def test_killed_again_and_again(name, long, undisturbed, tmp_path):
    random.seed(name)
    before, kind = runs.shared_memory(), runs.KINDS[name]
    runs.disturb(tmp_path / "run", long, [kind] * kind.times)
    assert runs.outcome(tmp_path / "run") == undisturbed
    assert runs.left_in_shared_memory(before) == []


@pytest.mark.nightly
def test_ten_seconds_of_a_full_disk(options, tmp_path):
    long = (*options, "--config.steps=10000")  # it must not end before the disk has room again
    runs.finish(long, tmp_path / "whole")
    runs.on_a_full_disk(tmp_path / "run", long, 10.0)
    assert runs.outcome(tmp_path / "run") == runs.outcome(tmp_path / "whole")


@pytest.mark.nightly
def test_long_run_stays_as_small_as_it_began(tmp_path):
    """An evaluation every 250 steps and a checkpoint every 50; caches are filled after 200."""
    options = ("--config=configs/digits.py:fp16", "--config.steps=3000", "--config.log_every=5")
    options += ("--config.eval_every=250 steps", "--config.checkpoint_every=50 steps")
    samples = np.array(runs.watch(options, tmp_path / "run", steady=200))
    part = len(samples) // 10
    begin, end = np.median(samples[:part], 0), np.median(samples[-part:], 0)
    assert end[0] < 1.05 * begin[0] and end[1] <= begin[1] + 4 and end[2] <= begin[2] + 4, (begin, end)
    assert not json.loads((tmp_path / "run" / "summary.json").read_text())["train"]["compiled_in_loop"]


@pytest.mark.slow
def test_shared_memory_that_stays_is_found(tmp_path, monkeypatch):
    """And that of a program beside it, which uses it, is not."""
    monkeypatch.setattr(runs, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(runs, "PATIENCE", 0.2)
    (tmp_path / "from_before").touch()
    before = runs.shared_memory()
    for name in ("left", "used"):
        (tmp_path / name).write_bytes(b"content")
    with (tmp_path / "used").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        assert runs.left_in_shared_memory(before) == [str(tmp_path / "left")]
