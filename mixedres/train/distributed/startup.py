"""How the processes of a run find each other.

Where that fails, and where process 0 is gone, JAX prints a stack trace and aborts. Python gets no exception, and its
signal handlers run too late; a SIGABRT handler in C, which ctypes makes of a function, has the last word.
"""

import contextlib
import ctypes
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from mixedres._internal.errors import ConfigError, one_line
from mixedres._internal.jax_compat import global_state
from mixedres._internal.names import PROCESS_FLAGS
from mixedres.train.distributed.group import SINGLE, ProcessGroup, SingleProcess, answers

# What JAX adds to the initialization timeout that it is given, measured with 0.10 and 0.12.
_JAX_ADDS = 5
_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
_installed: list[Any] = []  # C keeps no reference


def join(
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> SingleProcess:
    """Connects the processes of this run and returns them once all have come; called before JAX touches a device.

    If the others do not come, the process prints what to do and exits with status 2, without an exception.

    Args:
      distributed: lets JAX find the others (SLURM, Open MPI, Kubernetes, TPU pods).
      coordinator, num_processes, process_id: as `mixedres.config.flags` has checked them.
      timeout: seconds to wait for the others, here and for a sign of life later; > 0.

    Raises:
      ConfigError: if nothing tells who the others are, or they cannot join.
    """
    given = (coordinator, num_processes, process_id)
    if not distributed and coordinator is None:
        return SINGLE
    # JAX's preemption service would take SIGTERM away from Python; see `ProcessGroup.stop_agreed`.
    jax.config.update("jax_enable_preemption_service", False)
    output = os.dup(2)
    with tempfile.TemporaryFile() as captured:  # what Python and C++ write to the standard error output meanwhile

        def last_word() -> None:
            said = os.pread(captured.fileno(), 1 << 20, 0).decode(errors="replace")
            os.write(output, f"mixedres: {why(said, *given, timeout)}\n".encode())
            os._exit(2)

        # By default JAX listens at all addresses of process 0, and believes whoever comes.
        bound = coordinator if coordinator and is_here(coordinator) else None
        on_abort(last_word)
        os.dup2(captured.fileno(), 2)
        try:
            jax.distributed.initialize(
                *given,
                coordinator_bind_address=bound,
                cluster_detection_method="deactivate" if coordinator else None,
                initialization_timeout=max(1, int(timeout) - _JAX_ADDS),
                heartbeat_timeout_seconds=int(2 * timeout) + 60,  # the monitor speaks before JAX aborts
                shutdown_timeout_seconds=int(timeout) + 1,
            )
        except (ValueError, RuntimeError) as error:
            reason = f"the processes cannot join: {one_line(error)}"
            if re.search("(should|must) be defined", str(error)):
                reason = f"--distributed found no SLURM, Open MPI or Kubernetes job around it; write {PROCESS_FLAGS}"
            raise ConfigError(reason) from None
        finally:
            os.dup2(output, 2)
            os.write(output, os.pread(captured.fileno(), 1 << 20, 0))
            os.close(output)
    # `jax.process_index` would start the devices, which waits for all processes with nobody watching.
    address = str(global_state.coordinator_address)
    group = ProcessGroup(global_state.process_id, global_state.num_processes, address, timeout)
    on_abort(group.blame)
    return group


def is_here(address: str) -> bool:
    """Whether the host of 'HOST:PORT' is an address of this machine, on which a socket can listen.

    It may be one of a router or a container before this machine.
    """
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(place)
                return True
    return False


def why(said: str, address: str | None, count: int | None, index: int | None, timeout: float) -> str:
    """Returns why JAX could not connect the processes and what to do, from what it `said` before its abort."""
    where = address or "the address that --distributed found"
    if "incarnation" in said and "ALREADY_EXISTS" in said:
        return f"another process has joined as --process_id={index} of {where} too; give each its own id from 0"
    if "DEADLINE_EXCEEDED" not in said:
        reason = re.search(r"absl::Status: (.*)", said)
        return f"process {index} cannot join {where}: {reason[1] if reason else said[-200:]}"
    late, todo = f"not all {count or 'of the'} processes came to {where}", "start all, each with its own --process_id"
    if index and address and not answers(address):
        late, todo = f"nothing answers at --coordinator={address}", "start process 0 there, see that the port is open"
    return f"{late} after {timeout:g} s; {todo}, or wait longer with --process_timeout=SECONDS"


def on_abort(last_word: Callable[[], None]) -> None:
    """Calls `last_word` when this process calls abort(); if `last_word` returns, the process aborts."""
    _installed.append(_HANDLER(lambda _: last_word()))
    ctypes.CDLL(None).signal(signal.SIGABRT, _installed[-1])
