"""The connection of the processes of a run."""

import contextlib
import ctypes
import errno
import os
import re
import signal
import socket
import tempfile
from collections.abc import Callable

import jax

from mixedres._internal.errors import ConfigError, one_line
from mixedres._internal.jax_compat import global_state
from mixedres._internal.names import PROCESS_FLAGS
from mixedres._internal.processes import SINGLE, SingleProcess
from mixedres.hosts.group import ProcessGroup, answers

_HANDLER = ctypes.CFUNCTYPE(None, ctypes.c_int)
# Handlers that C may call until the process ends; C itself keeps no reference.
_installed: list[Callable[[int], None]] = []


def join(
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout: float = 300.0,
) -> SingleProcess:
    """Connects the processes of this run and returns the group; called before JAX touches a device.

    If the other processes do not come, this process prints what to do and exits with status 2, without an exception. A
    SIGABRT handler stays installed until the process ends.

    Args:
      distributed: lets JAX find the other processes (SLURM, Open MPI, Kubernetes, TPU pods).
      coordinator: 'HOST:PORT' of process 0; None: a run with one process, unless `distributed`.
      timeout: seconds to wait for the other processes, here and for a heartbeat later; > 0.

    Raises:
      ConfigError: if `distributed` finds no job, the port is taken, or the processes cannot join.
    """
    given = (coordinator, num_processes, process_id)
    if not distributed and coordinator is None:
        return SINGLE
    # By default JAX listens at all addresses of process 0, and accepts every connection.
    bound = coordinator if coordinator and is_here(coordinator) else None
    if bound and process_id == 0:
        check_port(bound)
    # JAX's preemption service would take SIGTERM away from Python; see `ProcessGroup.stop_agreed`.
    jax.config.update("jax_enable_preemption_service", False)
    _initialize(given, bound, timeout)
    # `jax.process_index` would start the devices, which waits for all processes before the monitor watches them.
    address = str(global_state.coordinator_address)
    group = ProcessGroup(global_state.process_id, global_state.num_processes, address, timeout)
    on_abort(group.blame)
    return group


def _initialize(given: tuple[str | None, int | None, int | None], bound: str | None, timeout: float) -> None:
    """Connects the processes, `given` being coordinator, count and index; an abort of C++ becomes one line."""
    output = os.dup(2)
    with tempfile.TemporaryFile() as captured:  # receives what Python and C++ write to the standard error output

        def last_word() -> None:
            said = os.pread(captured.fileno(), 1 << 20, 0).decode(errors="replace")
            os.write(output, f"mixedres: {why(said, *given, timeout)}\n".encode())
            os._exit(2)

        on_abort(last_word)
        os.dup2(captured.fileno(), 2)
        try:
            jax.distributed.initialize(
                *given,
                coordinator_bind_address=bound,
                cluster_detection_method="deactivate" if given[0] else None,
                initialization_timeout=max(1, int(timeout) - 5),  # JAX adds 5 s, measured with 0.10 and 0.12
                heartbeat_timeout_seconds=int(2 * timeout) + 60,  # the monitor reports a loss before JAX aborts
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


def is_here(address: str) -> bool:
    """Returns whether a socket can listen on the host of 'HOST:PORT'; the address may be that of a router instead."""
    host = address.rpartition(":")[0].strip("[]")
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with socket.socket(family, kind, protocol) as trial:
                trial.bind(place)
                return True
    return False


def check_port(address: str) -> None:
    """Raises ConfigError if another program listens at 'HOST:PORT', where JAX 0.12 would fail, or crash."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]"), int(port)), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            taken = f"another program listens at --coordinator={address}"
            raise ConfigError(f"{taken}; name another port, in every process") from None


def why(said: str, address: str | None, count: int | None, index: int | None, timeout: float) -> str:
    """Returns why JAX could not connect the processes and what to do, from the text `said` that JAX wrote."""
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
    # JAX aborts if the processes cannot connect, or process 0 is lost: Python gets no exception, its handlers run too
    # late.
    _installed.append(_HANDLER(lambda _: last_word()))
    ctypes.CDLL(None).signal(signal.SIGABRT, _installed[-1])
