"""A run that was killed in every way ends with the bits of one that was not, and leaves nothing behind."""

import json
import random
import re
import signal

import numpy as np
import pytest

from mixedres.checkpoints import RecordedRun
from tests.data import made
from tests.interruptions import runs

# With processes that decode an evaluation takes seconds, because it starts some of its own.
TWICE = ("--config.steps=100", f"--config.eval_every={runs.EVALUATED} steps", "--config.log_every=1")


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    """Of a run on images."""
    folder = tmp_path_factory.mktemp("images") / "images"
    made.write_noise(folder, 12, 12, "PNG", count=40)
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


@pytest.fixture(scope="module")
def evaluated_twice(options, tmp_path_factory):
    """The outcome of a run with two evaluations."""
    workdir = tmp_path_factory.mktemp("twice") / "run"
    runs.finish((*options, *TWICE), workdir)
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
@pytest.mark.parametrize("place", runs.PLACES)
@pytest.mark.parametrize("numbers", runs.OF_SLURM, ids=lambda numbers: "+".join(n.name for n in numbers))
def test_signals_of_slurm_save_and_stop(numbers, place, options, evaluated_twice, tmp_path):
    """SLURM signals all processes of a step, those that decode too."""
    random.seed(f"{numbers} {place}")
    before, settings = runs.shared_memory(), (*options, *TWICE)
    run = runs.Run((*settings, "--config.data.workers=2"), tmp_path / "run")
    runs.PLACES[place](run, tmp_path / "run")
    status = run.end_as_slurm_does(numbers)
    said, asked = "".join(run.lines), [number for number in numbers if number != signal.SIGCONT]
    checkpoints = RecordedRun(tmp_path / "run").contents()["checkpoints"]
    if place == "end":
        assert status in (0, *(128 + number for number in asked), *(-number for number in asked)), run.lines
    elif place in ("start", "compilation"):
        names = [number.name for number in asked if status == 128 + number]
        assert any(f"stopped by {name}; there was nothing to save" in said for name in names) and not checkpoints
    else:
        assert status == 128 + asked[-1], run.lines
        step = re.search(rf"stopped by {asked[-1].name} after step (\d+); the checkpoint of step (\d+) is saved", said)
        assert step and step[1] == step[2] and checkpoints, said
    assert not any("Traceback" in line for line in run.lines)
    runs.finish(settings, tmp_path / "run")
    assert runs.outcome(tmp_path / "run") == evaluated_twice
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
