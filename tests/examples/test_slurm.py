"""The scripts for SLURM, run with a made-up srun and scontrol: the warning saves, and the requeued job goes on."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.interruptions.runs import newest_step, wait_until

SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
SMALL = ("--config.data.image_size=8", "--config.model.name=cifar_resnet8", "--config.num_devices=1")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_valid_and_named_in_the_docs(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert f"`examples/{script.name}`" in (ROOT / "docs" / "scale-out.md").read_text()
    options = [line for line in script.read_text().splitlines() if line.startswith("#SBATCH")]
    for needed in ("partition", "time", "output", "open-mode=append", "requeue", "signal", "cpus-per-task"):
        assert any(line.startswith(f"#SBATCH --{needed}") for line in options), needed


@pytest.fixture
def cluster(tmp_path):
    """A function that starts a script as the batch shell of a job with one task."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    (programs / "activate").write_text(f'export PATH="{programs}:$PATH"\n')
    for name, text in {
        "python": f'exec {sys.executable} "$@"',
        "srun": '[ "$1" = --kill-on-bad-exit=0 ] && [ "$SRUN_CPUS_PER_TASK" = 3 ] && shift && exec "$@"',
        "scontrol": f'echo "$@" >> {tmp_path}/requeued',
    }.items():
        (programs / name).write_text(f"#!/bin/sh\n{text}\n")
        (programs / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_CPUS_PER_TASK": "3", "SLURM_ARRAY_TASK_ID": "1"}
    environment = os.environ | job | {"VENV": str(tmp_path / "venv"), "RUNS": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def start(script, *arguments):
        command = ["bash", ROOT / "examples" / script, *arguments]
        options = {"stdout": -1, "stderr": -1, "text": True, "start_new_session": True}
        return subprocess.Popen(command, cwd=ROOT, env=environment, **options)

    return start


def wait_for_steps(job, workdir, steps):
    assert wait_until(lambda: job.poll() is not None or newest_step(workdir) >= steps)
    assert job.poll() is None, job.communicate()


@pytest.mark.slow
def test_run_is_requeued_after_the_warning_and_goes_on(cluster, tmp_path):
    arguments = ("run", "--config=digits:fp16", *SMALL, "--config.steps=400", "--config.log_every=5")
    job = cluster("slurm.sh", *arguments)
    wait_for_steps(job, tmp_path / "run", 50)
    os.kill(job.pid, signal.SIGUSR1)  # as B:USR1@300: the shell alone
    err = job.communicate(timeout=120)[1]
    assert job.returncode == 138 and "stopped by SIGUSR1 after step" in err and "Traceback" not in err
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"

    job = cluster("slurm.sh", *arguments)
    wait_for_steps(job, tmp_path / "run", 200)
    os.killpg(job.pid, signal.SIGCONT)  # a preemption: all processes, the shell too
    os.killpg(job.pid, signal.SIGTERM)
    err = job.communicate(timeout=120)[1]
    assert job.returncode == 143 and "stopped by SIGTERM after step" in err
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"  # SLURM itself does so

    job = cluster("slurm.sh", *arguments)
    err = job.communicate(timeout=240)[1]
    assert job.returncode == 0, err
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["train"]["first_step"] > 200
    assert json.loads((tmp_path / "run" / "config.json").read_text())["data.threads"] == 3


@pytest.mark.nightly
def test_task_of_an_array_saves_its_run_of_the_sweep(cluster, tmp_path):
    (tmp_path / "sweep.py").write_text(
        "from experiments.lib.plan import Sweep\n"
        "SWEEP = Sweep(question='?', base='configs/digits.py', axes={'seed': (0, 1)},\n"
        "    overrides={'model.name': 'cifar_resnet8', 'data.image_size': 8, 'steps': 400, 'log_every': 5})\n"
    )
    arguments = (str(tmp_path / "sweep.py"), f"--out={tmp_path}/out")
    job = cluster("slurm_sweep.sh", *arguments)
    wait_for_steps(job, tmp_path / "out" / "runs" / "seed=1", 50)
    os.kill(job.pid, signal.SIGUSR1)
    out, err = job.communicate(timeout=120)
    assert job.returncode == 130 and "1 interrupted; the same command goes on" in out, (out, err)
    assert "the checkpoint of step" in out and not (tmp_path / "out" / "runs" / "seed=0").exists()
    job = cluster("slurm_sweep.sh", *arguments)
    out, err = job.communicate(timeout=240)
    assert job.returncode == 0 and "1 finished" in out, (out, err)
    summary = json.loads((tmp_path / "out" / "runs" / "seed=1" / "summary.json").read_text())
    assert summary["train"]["first_step"] >= 50
