"""How the processes of a run find each other."""

from __future__ import annotations

import os
import re

import jax

from mixedres._internal.errors import ConfigError
from mixedres.train.distributed.aborts import on_abort, stderr_held
from mixedres.train.distributed.group import ProcessGroup, SingleProcess, answers
from mixedres.train.distributed.store import identity

EXAMPLE = "--coordinator=HOST:PORT --num_processes=N --process_id=I"
# What JAX adds to the initialization timeout that it is given, measured with 0.10 and 0.12.
_JAX_ADDS = 5


def join(
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> SingleProcess:
    """The processes of this run, once all have come; called before JAX touches a device.

    Args:
      distributed: let JAX find the others (SLURM, Open MPI, Kubernetes, TPU pods).
      coordinator: 'HOST:PORT', where process 0 listens; with it the next two.
      num_processes, process_id: how many there are, and which of them this is, from 0.
      timeout: seconds to wait for the others, here and for a sign of life later; > 0.

    Raises:
      ConfigError: for a combination that makes no sense, or where nothing tells who the others are.

    Where the others do not come, the process ends with a line and status 2, without an exception: see `aborts`.
    """
    _check(distributed, coordinator, num_processes, process_id, timeout)
    if not distributed and coordinator is None:
        return SingleProcess()
    # JAX would take SIGTERM away from Python; `stop_agreed` does what its service is for.
    jax.config.update("jax_enable_preemption_service", False)
    with stderr_held() as held:

        def last_word() -> None:
            held.write_through(f"mixedres: {_why(held.text(), coordinator, num_processes, process_id, timeout)}\n")
            os._exit(2)

        on_abort(last_word)
        try:
            jax.distributed.initialize(
                coordinator,
                num_processes,
                process_id,
                cluster_detection_method="deactivate" if coordinator else None,
                initialization_timeout=max(1, int(timeout) - _JAX_ADDS),
                # JAX aborts with a stack trace; the watch speaks first.
                heartbeat_timeout_seconds=int(2 * timeout) + 60,
                shutdown_timeout_seconds=int(timeout) + 1,
            )
        except (ValueError, RuntimeError) as error:
            if re.search("(should|must) be defined", str(error)):
                raise ConfigError(
                    f"--distributed found no SLURM, Open MPI or Kubernetes job around it; write {EXAMPLE}"
                ) from None
            raise ConfigError(f"the processes cannot join: {' '.join(str(error).split())}") from None
    return ProcessGroup(*identity(), timeout)


def _check(
    distributed: bool, coordinator: str | None, num_processes: int | None, process_id: int | None, timeout: float
) -> None:
    given = {"--coordinator": coordinator, "--num_processes": num_processes, "--process_id": process_id}
    missing = [flag for flag, value in given.items() if value is None]
    if distributed and len(missing) < 3:
        raise ConfigError(f"--distributed finds the processes by itself; give it alone, or {EXAMPLE} without it")
    if 0 < len(missing) < 3:
        raise ConfigError(f"{' and '.join(missing)} missing; many processes need all of {EXAMPLE}")
    if not timeout > 0:
        raise ConfigError(f"--process_timeout={timeout:g} must be > 0 seconds")
    if coordinator is None or num_processes is None or process_id is None:
        return
    if not re.fullmatch(r"(\S+):(\d{1,5})", coordinator) or not 0 < int(coordinator.rpartition(":")[2]) < 65536:
        raise ConfigError(f"--coordinator={coordinator} is not HOST:PORT; write such as --coordinator=10.0.0.1:7733")
    if num_processes < 1:
        raise ConfigError(f"--num_processes={num_processes} must be >= 1")
    if not 0 <= process_id < num_processes:
        raise ConfigError(
            f"--process_id={process_id} is out of range; with --num_processes={num_processes} ids go from 0 to "
            f"{num_processes - 1}"
        )


def _why(said: str, coordinator: str | None, count: int | None, index: int | None, timeout: float) -> str:
    """Why JAX could not connect the processes, from what it said before its abort."""
    where = coordinator or "the address that --distributed found"
    if "incarnation" in said and "ALREADY_EXISTS" in said:
        return f"another process has joined as --process_id={index} of {where} too; give each its own id from 0"
    if "DEADLINE_EXCEEDED" not in said:
        reason = re.search(r"absl::Status: (.*)", said)
        return f"process {index} cannot join {where}: {reason[1] if reason else said[-200:]}"
    if index and coordinator and not answers(coordinator):
        return (
            f"nothing answers at --coordinator={coordinator} after {timeout:g} s; start process 0 on that host, see "
            "that the port is open, or wait longer with --process_timeout=SECONDS"
        )
    return (
        f"not all {count or ''} processes came to {where} within {timeout:g} s; start all of them, each with its own "
        "--process_id, or wait longer with --process_timeout=SECONDS"
    ).replace("  ", " ")
