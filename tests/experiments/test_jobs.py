"""How the cores of a machine are shared out among runs at a time."""

import os
import signal
import sys
import threading
import time

import pytest

from experiments.lib import jobs
from mixedres._internal.cli import signals


@pytest.mark.parametrize("cores", [1, 2, 3, 8])
@pytest.mark.parametrize("slots", [2, 3, 8])
def test_shares_are_equal(monkeypatch, cores, slots):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(10, 10 + cores)))
    shares = [jobs.share_of_cores(slot, slots) for slot in range(slots)]
    used = [core for share in shares for core in share]
    assert set(used) <= set(range(10, 10 + cores)) and len({len(share) for share in shares}) == 1
    if slots <= cores:
        assert len(set(used)) == len(used) == cores // slots * slots
    else:
        assert len(shares[0]) == 1 and max(map(used.count, used)) - min(map(used.count, used)) <= 1


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # where a test before this one started JAX
def test_job_whose_time_is_up_saves_and_is_handed_in_again(monkeypatch, tmp_path):
    """SLURM's signal comes while the job waits for its run, and the run takes its time to save."""
    run = tmp_path / "python"
    run.write_text("#!/bin/sh\ntrap 'sleep 0.5; echo saved; exit 143' TERM\necho began\nsleep 60 & wait\n")
    run.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(run))
    job, handed_in = jobs.Job(("--config=c.py",), tmp_path / "runs" / "run"), []
    before = {number: signal.getsignal(number) for number in signals.SIGNALS}
    signal.signal(signal.SIGUSR2, lambda *_: handed_in.append(job.checkpoint()))

    def time_is_up():
        log = tmp_path / "runs" / "run.log"
        while not log.is_file() or "began" not in log.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR2)

    thread = threading.Thread(target=time_is_up)
    try:
        thread.start()
        assert job()["exit_status"] == 143
    finally:
        thread.join()
        for number, handler in before.items():
            signal.signal(number, handler)
    assert (tmp_path / "runs" / "run.log").read_text() == "began\nsaved\n"
    again = handed_in[0].function
    assert (again.arguments, again.workdir) == (job.arguments, job.workdir)


def test_earlier_job_is_waited_for_where_slurm_still_has_it(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs.submitit.SlurmJob, "done", lambda self, force_check=False: False)
    for found, expected in (({"7", "8"}, True), ({"8"}, False), (None, False)):
        monkeypatch.setattr(jobs, "in_queue", lambda found=found: found)
        assert (jobs.still_queued(jobs.Queue(), "7", str(tmp_path)) is not None) == expected
