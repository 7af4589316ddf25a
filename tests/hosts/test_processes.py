"""Many processes, as pairs on the loopback: they equal one process, and a fault in one is named by the others.

Where a whole run would add nothing, `LOOP` stands for it: a loop of all-reduces. A process needs about three seconds of
CPU time to import JAX, so where possible several claims are tested with the same two processes.
"""

import dataclasses
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

from mixedres import hosts, main, train
from mixedres._internal.errors import LateProcessError
from mixedres._internal.processes import SINGLE, difference
from mixedres.checkpoints import Checkpoints
from mixedres.config import parse_flags
from mixedres.hosts import coordination, liveness
from tests import ROOT, free_port
from tests.interruptions import groups
from tests.train import run_cases
from tests.train.run_cases import build

TIMEOUT = 6
SAME = "start all of them with the same"
RUN = [*groups.RUN, "--config.batch_size=32", "--config.checkpoint_every=10 steps"]
# A whole run; FAULT(step) is called before every step.
WHOLE = """
import os, signal, sys, time
from mixedres import main
from mixedres._internal.cli import process
from mixedres import hosts
from tests.train import run_cases
process.quiet_libraries()  # as in every command
progress = hosts.ProcessGroup.progress
def faulty(self, step):
    FAULT
    progress(self, step)
hosts.ProcessGroup.progress = faulty
status = main.main(sys.argv)
sys.stdout.flush()
os._exit(status)
"""
LOOP = """
import os, signal, sys, time
import jax, numpy as np
from mixedres import hosts
_, port, index, timeout = sys.argv
index, told = int(index), []
signal.signal(signal.SIGTERM, lambda *_: told.append(True))
who = (True,) if port == "slurm" else (False, "127.0.0.1:" + port, 2, index)
with hosts.join(*who, timeout=float(timeout)) as group:
    assert (group.index, group.count) == (index, 2)
    group.assert_equal("config", {"seed": 1, "sizes": (1, 2)})
    assert group.broadcast("index", [index]) == [0]
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    split = jax.sharding.NamedSharding(mesh, jax.P("data"))
    sum_all = lambda x: jax.lax.psum(x, "data")
    total = jax.jit(jax.shard_map(sum_all, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P()))
    x = jax.make_array_from_process_local_data(split, np.ones(2, np.float32))
    with group.loop():
        for step in range(1, 10**6):
            FAULT
            group.progress(step)
            assert total(x) == 4
            if group.stop_agreed(bool(told), step):
                break
            time.sleep(0.01)
    print("stopped after", step)
"""


def start(arguments, **variables):
    two_devices = {"PYTHONPATH": str(ROOT), "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment = os.environ | two_devices | variables
    return subprocess.Popen(
        [sys.executable, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(started):
    """Returns [(status, standard output, standard error)] of processes, which must end."""
    printed = [process.communicate(timeout=120) for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, printed, strict=True)]


def together(workdir, *faults, extra=((), ())):
    """Two processes of a whole run; `faults` are statements on `self` and `step`, one for each."""
    port = free_port()
    started = []
    for index, fault in enumerate(faults):
        flags = [f"--coordinator=127.0.0.1:{port}", "--num_processes=2", f"--process_id={index}"]
        flags += [f"--process_timeout={TIMEOUT}", f"--workdir={workdir}", *extra[index]]
        started.append(start(["-c", WHOLE.replace("FAULT", fault), *RUN, *flags]))
    return finish(started)


def start_loops(*faults, port=None, variables=({}, {})):
    """Two processes of `LOOP`."""
    port = port or str(free_port())
    codes = [LOOP.replace("FAULT", fault) for fault in faults]
    return [start(["-c", codes[i], port, str(i), str(TIMEOUT)], **variables[i]) for i in (0, 1)]


def loops(*faults):
    """What became of two processes of `LOOP`."""
    return finish(start_loops(*faults))


def lines(err):
    return re.findall("^mixedres: .*", err, re.MULTILINE)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The same run in this process, on four devices."""
    workdir = tmp_path_factory.mktemp("alone") / "run"
    assert main.main(["mixedres", *RUN, f"--workdir={workdir}", "--config.num_devices=4"]) == 0
    return workdir


def evaluated(run):
    return json.loads((run / "summary.json").read_text())["eval"]


def assert_same_run(one, other):
    read = [run_cases.lines(run) for run in (one, other)]
    assert [(line["step"], line["kind"]) for line in read[0]] == [(line["step"], line["kind"]) for line in read[1]]
    assert len(read[0]) == 21
    for a, b in zip(*read, strict=True):
        # Gloo adds the gradients in another order, and each step rounds to 1.2e-7: a few of these in 20 steps.
        np.testing.assert_allclose(a["loss"], b["loss"], rtol=1e-6)
        assert a["top1"] == b["top1"]
    a, b = (evaluated(run) for run in (one, other))
    assert a["examples"] == 360 and all(a[key] == b[key] for key in ("top1", "top5", "examples"))
    experiment = build(parse_flags([*RUN, "--config.num_devices=1"]).config)
    like = experiment.init_state()
    first, second = (Checkpoints(run / "checkpoints").restore_newest(like)[0] for run in (one, other))
    differ = 0.0
    for a, b, initial in zip(*map(jax.tree.leaves, (first.params, second.params, like.params)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-6)
        differ = max(differ, float(np.abs(np.asarray(a) - np.asarray(initial)).max()))
    assert differ > 0.01, "the run hardly trains, so that its result says nothing"


@pytest.mark.slow
def test_two_processes_killed_stopped_and_started_again_equal_one(alone, tmp_path):
    # A checkpoint is saved while the steps go on, and is whole once its directory has its name.
    saved = tmp_path / "run" / "checkpoints" / "10"
    die = (
        f"while step == 13 and not os.path.isdir('{saved}'): time.sleep(0.01)\n"
        "    if step == 13: os.kill(os.getpid(), signal.SIGKILL)"
    )
    (status, _, err), (killed, *_) = together(tmp_path / "run", "pass", die)
    assert (status, killed) == (4, -9), err
    # Gloo may have a word of its own before, when its connection goes.
    assert len(lines(err)) == 1 and "Traceback" not in err and err.endswith(lines(err)[0] + "\n")
    assert re.search(r"process 1 \(.*, last heard of at step \d+\) gave no sign of life for 6 s.*same command", err)

    slow = "time.sleep(0.3 * (step > 11))"  # so that the agreement on the last step comes before the end
    asked = f"if step == 12: os.kill(os.getpid(), signal.SIGTERM)\n    {slow}"
    done = together(tmp_path / "run", slow, asked)
    assert [status for status, *_ in done] == [143, 143], done
    (step,) = {re.search(r"stopped by SIGTERM after step (\d+)", err)[1] for _, _, err in done}
    # 12 where both agree before either has noted the step that was asked in
    assert f"the checkpoint of step {step} is saved" in done[0][2] and 12 <= int(step) < 20

    done = together(tmp_path / "run", "pass", "pass")
    assert [status for status, *_ in done] == [0, 0], done
    assert f"training from step {step}" in done[0][1]
    assert "top-1" in done[0][1] and "top-1" not in done[1][1]
    assert_same_run(alone, tmp_path / "run")

    # What two processes saved, one restores, and the other way round.
    parsed = parse_flags([*RUN, "--config.num_devices=4"]).config
    assert run_cases.evaluate(parsed, tmp_path / "run") == pytest.approx(evaluated(tmp_path / "run"), rel=1e-6)
    shutil.copytree(alone, tmp_path / "copy")
    done = together(tmp_path / "copy", "pass", "pass", extra=(("--mode=eval",), ("--mode=eval",)))
    assert [status for status, *_ in done] == [0, 0], done
    assert f"step 20: test top-1 {evaluated(alone)['top1']:.2%}" in done[0][1]


@pytest.mark.slow
def test_full_disk_of_process_0_blocks_no_process(tmp_path):
    full = (
        "import pytest\n"
        "    from tests.checkpoints import saved_files\n"
        "    saved_files.before_each(pytest.MonkeyPatch(), saved_files.full_disk)"
    )
    done = together(tmp_path / "run", full, "pass")
    assert [status for status, *_ in done] == [1, 1], done
    assert "warning: the checkpoint of step 10 could not be written (No space left on device)" in done[0][1]
    for _, _, err in done:
        assert "step 20 could not be written" in err and "Traceback" not in err
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


@pytest.mark.slow
def test_only_process_0_traces(alone, tmp_path):
    # For longer than the timeout, after which a process that makes no progress would count as lost.
    slow = (
        "import jax\n"
        "    stop = getattr(jax.profiler, 'stop', jax.profiler.stop_trace)\n"
        "    jax.profiler.stop = stop\n"
        f"    jax.profiler.stop_trace = lambda: (time.sleep({3 * TIMEOUT}), stop())"
    )
    done = together(tmp_path / "run", slow, "pass", extra=2 * (["--config.profile=3:4"],))
    assert [status for status, *_ in done] == [0, 0], done
    assert "trace: steps 4 to 7 are in " in done[0][1] and "trace" not in done[1][1]
    assert len(list((tmp_path / "run" / "profile").rglob("*.xplane.pb"))) == 1
    assert_same_run(alone, tmp_path / "run")


@pytest.mark.slow
def test_a_hanging_process_is_named():
    hang = "if step == 30: time.sleep(1000)"
    (status, _, err), (other, _, its_err) = loops("pass", hang)
    assert (status, other) == (4, 4)
    for said in (err, its_err):
        assert len(lines(said)) == 1 and re.search(r"process 1 \(.*, last heard of at step 29\) hangs.*for 6 s", said)


@pytest.mark.slow
def test_stopped_process_0_is_named():
    # Its connections stay open, so that a collective and a call to its store wait for ever.
    stop = "if step == 30: time.sleep(2); os.kill(os.getpid(), signal.SIGSTOP)"
    stopped, other = start_loops(stop, "pass")
    [(status, _, err)] = finish([other])
    stopped.kill()
    finish([stopped])
    assert status == 4
    assert len(lines(err)) == 1 and re.search(r"process 0 \(.*, last heard of at step \d+\) gave no sign of life", err)


@pytest.mark.slow
def test_failed_process_ends_all_with_the_reason():
    (status, _, err), (other, _, its_err) = loops("pass", "if step == 30: raise ValueError('no room')")
    assert (status, other) == (1, 1)
    assert len(lines(err)) == 1 and re.search(r"process 1 \(.*\) failed, so all stop: ValueError: no room", err)
    assert "Traceback" in its_err and "Traceback" not in err


@pytest.mark.slow
def test_signal_to_one_process_stops_all_after_one_step():
    # A signal, to a handler of Python's that was there before the processes joined; the variables of SLURM say who the
    # others are.
    asked = "if step == 50: os.kill(os.getpid(), signal.SIGTERM)"
    common = {"SLURM_JOB_ID": str(free_port()), "SLURM_STEP_NODELIST": "127.0.0.1,other", "SLURM_NTASKS": "2"}
    own = [common | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)} for index in (0, 1)]
    done = finish(start_loops(asked, "pass", port="slurm", variables=own))
    assert [status for status, *_ in done] == [0, 0], done
    last = [re.search(r"stopped after (\d+)", out)[1] for _, out, *_ in done]
    assert last[0] == last[1] and int(last[0]) >= 50


@pytest.mark.slow
def test_processes_with_different_configs_write_nothing(tmp_path):
    done = together(tmp_path / "run", "pass", "pass", extra=((), ["--config.seed=3"]))
    for status, out, err in done:
        assert status == 2 and len(lines(err)) == 1 and "Traceback" not in err, err
        assert "differ in their config (seed: " in err and "in process 0, 3 in process 1" in err
        assert not [line for line in out.splitlines() if "Gloo" not in line]
    assert list(tmp_path.iterdir()) == []


def test_run_compares_software_config_data_and_workdir_before_it_writes(tmp_path, monkeypatch):
    compared = {}

    def record(what, value, todo=""):
        compared[what] = json.loads(json.dumps(value))

    planned = train.plan(parse_flags([*RUN, "--config.num_devices=1"]).config)
    planned = dataclasses.replace(planned, directory=tmp_path / "run")
    # Only flags that change numbers count.
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=/x --xla_b=1 --xla_force_host_platform_device_count=3 --xla_a=1")
    planned.assert_equal(types.SimpleNamespace(count=2, assert_equal=record))
    assert list(compared) == ["software", "config", "data", "workdir", "weights"] and list(tmp_path.iterdir()) == []
    assert compared["software"]["jax"] == jax.__version__ and len(compared["software"]["code"]) == 16
    assert compared["software"]["XLA_FLAGS"] == "--xla_a=1 --xla_b=1"
    assert compared["config"]["steps"] == 20 and compared["data"]["eval_examples"] == 360
    assert compared["workdir"]["directory"] == str(tmp_path / "run")


def test_process_alone_needs_no_group():
    assert hosts.join() is SINGLE


def test_differing_keys_are_named():
    assert difference("data", 1, {"a": 1, "b": [2]}, {"b": [2], "a": 1}, SAME) == ""
    assert difference("data", 2, {"a": 1, "b": 2}, {"b": 3, "c": 4}, SAME) == (
        "the processes differ in their data (a: 1 in process 0, None in process 2; b: 2 in process 0, 3 in process 2; "
        "c: None in process 0, 4 in process 2); start all of them with the same"
    )
    many = difference("config", 1, {}, {str(key): key for key in range(9)}, SAME)
    assert many.count("None in process 0") == 5 and " and 4 more)" in many


def test_hanging_process_is_named():
    def heartbeats(*passed, in_loop=True, waited=7.0):
        common = {"in_loop": in_loop, "waited": waited, "step": 3}
        return {i: common | {"name": f"process {i} (host)", "passed": n} for i, n in enumerate(passed)}

    assert liveness.describe_hang(heartbeats(5, 4, 5), 6) == (
        "process 1 (host) hangs: the others have waited for it for 6 s"
    )
    assert liveness.describe_hang(heartbeats(4, 4), 6) == "no process got on for 6 s, all at step 3"
    assert liveness.describe_hang(heartbeats(4), 6) == "no process got on for 6 s, all at step 3"
    assert liveness.describe_hang(heartbeats(5, 4, in_loop=False), 6) == ""
    assert liveness.describe_hang(heartbeats(5, 4, waited=5.0), 6) == ""
    assert liveness.describe_hang(heartbeats(5, 4) | heartbeats(5, waited=1.0), 6) == ""


class Client:
    """A coordination service at which processes 1 and 3 of four never come."""

    def key_value_set(self, key, value):
        self.place = key.rpartition("/")[0]

    def key_value_dir_get(self, directory):
        return [(f"{self.place}/{index}", "null") for index in (0, 2)]

    def wait_at_barrier(self, name, milliseconds):
        raise RuntimeError("DEADLINE_EXCEEDED: Barrier timed out. Id: b::0.")  # as JAX 0.10 and 0.12 do

    def blocking_key_value_get(self, key, milliseconds):
        raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out with key: config and duration: 1800s")


def test_late_processes_are_named(monkeypatch, capsys):
    for name, value in (("client", Client()), ("num_processes", 4), ("process_id", 0)):
        monkeypatch.setattr(coordination.global_state, name, value)
    monkeypatch.setattr(coordination, "PATIENCE", 0.1)
    monkeypatch.setattr(coordination, "_FIRST_WORD", 0.05)
    with pytest.raises(
        LateProcessError, match=r"processes 1, 3 did not come within .* \(compiled\); start all"
    ) as late:
        coordination.gather("compiled", None)
    assert late.value.status == hosts.STATUS_LOST
    assert capsys.readouterr().out == "waiting for processes 1, 3 (compiled), 0 s\n"
    monkeypatch.setattr(coordination.global_state, "process_id", 2)
    with pytest.raises(LateProcessError, match=r"process 0 did not come within .* \(config\)"):
        coordination.broadcast("config", {})


@pytest.mark.slow
def test_processes_that_cannot_join_name_the_reason():
    port, silent = free_port(), free_port()
    code = "import sys; from mixedres.hosts import join; join(False, sys.argv[1], 3, int(sys.argv[2]), 6.0)"
    duplicates = [start(["-c", code, f"127.0.0.1:{port}", str(index)]) for index in (0, 1, 1)]
    lonely = start(["-c", code, f"127.0.0.1:{silent}", "1"])
    unscheduled = start(["-c", "from mixedres import hosts; hosts.join(True)"])
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = f"127.0.0.1:{other.getsockname()[1]}"
        *joined, refused, (_, _, listens), (status, _, err) = finish(
            [*duplicates, lonely, start(["-c", code, taken, "0"]), unscheduled]
        )
    assert f"another program listens at --coordinator={taken}; name another port, in every process" in listens
    assert status == 1 and "ConfigError: --distributed found no SLURM" in err and "--coordinator=HOST:PORT" in err
    for status, _, err in (*joined, refused):
        assert status == 2 and err.count("\n") == 1, err
    assert f"nothing answers at --coordinator=127.0.0.1:{silent} after 6 s" in refused[2]
    assert "not all 3 processes came" in joined[0][2]
    assert sum("another process has joined as --process_id=1" in err for _, _, err in joined[1:]) == 1
