"""Workers and what watches them: a mutant that crashes its process or keeps it waiting is found, kept and passed by."""

import collections
import contextlib
import dataclasses
import json
import os
import pathlib
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

MODULE = "experiments.fuzzing.formats"
# A worker imports JAX meanwhile.
STARTS_WITHIN = 120.0
# Lost processes after which a format is given up, and inputs that are kept of each defect.
MOST_LOST, MOST_KEPT = 20, 3


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a mutant may take: bytes of memory, and seconds on the wall."""

    memory: int = 2 * 2**30
    seconds: float = 10.0


@dataclasses.dataclass
class Tally:
    """What came of the mutations of a format.

    Attributes:
      name: of the format.
      accepted, refused: numbers of mutants; accepted by all that read them.
      failures: {what tells a defect from others: numbers of the mutations}.
      reports: {what tells a defect from others: the text of its first failure}.
      slowest: seconds of the slowest mutant.
      peak: bytes of resident memory.
      cpu_seconds: of the workers, their imports included.
      incomplete: whether so many workers were lost that the rest was left out.
    """

    name: str
    accepted: int = 0
    refused: int = 0
    failures: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    reports: dict[str, str] = dataclasses.field(default_factory=dict)
    slowest: float = 0.0
    peak: int = 0
    cpu_seconds: float = 0.0
    incomplete: bool = False

    @property
    def failed(self) -> int:
        """Number of mutants."""
        return sum(map(len, self.failures.values()))

    @property
    def mutations(self) -> int:
        """Number of mutants."""
        return self.accepted + self.refused + self.failed

    def __iadd__(self, other: "Tally") -> "Tally":
        """Adds a later slice of the same format."""
        self.accepted, self.refused = self.accepted + other.accepted, self.refused + other.refused
        for signature, numbers in other.failures.items():
            self.failures[signature] += numbers
        self.reports = other.reports | self.reports
        self.slowest, self.peak = max(self.slowest, other.slowest), max(self.peak, other.peak)
        self.cpu_seconds += other.cpu_seconds
        self.incomplete |= other.incomplete
        return self


def make_corpus(place: pathlib.Path) -> None:
    """Makes the corpus in a process of its own; raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "experiments.fuzzing.corpus", str(place)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())


def fuzz(
    name: str,
    corpus: pathlib.Path,
    numbers: range,
    *,
    seed: int = 0,
    limits: Limits | None = None,
    until: float = float("inf"),
    kept: pathlib.Path | None = None,
    module: str = MODULE,
) -> Tally:
    """Gives mutants of a format to what reads them.

    Args:
      name: of the format.
      corpus: of `make_corpus`.
      numbers: of the mutations, which with the seed determine them.
      seed: of the mutations.
      limits: of each.
      until: `time.monotonic()` of the end, however many are left.
      kept: where inputs that fail are kept, in folders FORMAT-SEED-NUMBER; None: nowhere.
      module: has the dictionary `FORMATS`.
    """
    tally, limits, lost = Tally(name), limits or Limits(), 0
    following = numbers.start
    with tempfile.TemporaryDirectory(prefix="mixedres-fuzz-") as scratch:
        while following < numbers.stop and time.monotonic() < until and not tally.incomplete:
            worker = _Worker(module, name, corpus, pathlib.Path(scratch), seed, following, numbers.stop, limits)
            with worker:
                for report in worker.reports(until):
                    following = report["number"] + 1
                    _count(tally, report, seed, worker.input.with_name(f"failed-{report['number']}"), kept)
            tally.cpu_seconds += worker.cpu_seconds
            lost += worker.problem is not None
            if worker.problem is not None:
                report = {"outcome": "failed", "number": following, "signature": worker.problem, "sums": {}}
                _count(tally, report | {"text": worker.problem + "\n" + worker.errors()}, seed, worker.input, kept)
                following += 1
            tally.incomplete = lost >= MOST_LOST
    return tally


def _count(tally: Tally, report: dict[str, Any], seed: int, place: pathlib.Path, kept: pathlib.Path | None) -> None:
    tally.slowest = max(tally.slowest, report.get("seconds", 0.0))
    tally.peak = max(tally.peak, report.get("peak", 0))
    if report["outcome"] == "accepted":
        tally.accepted += 1
    elif report["outcome"] == "refused":
        tally.refused += 1
    else:
        signature = report["signature"]
        tally.failures[signature].append(report["number"])
        tally.reports.setdefault(signature, report["text"])
        if kept and len(tally.failures[signature]) <= MOST_KEPT:
            folder = kept / f"{tally.name}-{seed}-{report['number']}"
            folder.mkdir(parents=True, exist_ok=True)
            if place.exists():  # it does not where all that is mutated is gone
                shutil.copytree(place, folder / "input", dirs_exist_ok=True)
            changed = "".join(f"changed: {name}\n" for name in report["sums"])
            (folder / "report.txt").write_text(
                f"format: {tally.name}\nseed: {seed}\nmutation: {report['number']}\n{changed}{report['text']}\n"
            )
        shutil.rmtree(place, ignore_errors=True)


def _environment() -> dict[str, str]:
    root = pathlib.Path(__file__).parents[2]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH")))),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "XDG_CACHE_HOME": os.devnull,  # no index of a mutant stays behind
        "MALLOC_ARENA_MAX": "2",  # each arena takes address space
    }


class _Worker:
    """A worker's process; at the end of its `with` block it is gone, with all that it started.

    Attributes:
      input: the folder with the mutant under way.
      problem: why the process was lost, or None.
      cpu_seconds: of the process, known at the end.
    """

    def __init__(
        self,
        module: str,
        name: str,
        corpus: pathlib.Path,
        scratch: pathlib.Path,
        seed: int,
        first: int,
        stop: int,
        limits: Limits,
    ):
        self.input, self.problem, self.cpu_seconds = scratch / "input", None, 0.0
        self._limits, self._errors = limits, scratch / "stderr"
        arguments = (module, name, corpus, scratch, seed, first, stop - first, limits.memory)
        self._left = stop - first
        with self._errors.open("w+b") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "experiments.fuzzing.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,
            )

    def __enter__(self) -> "_Worker":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._wait()
        self._process.stdout.close()

    def reports(self, until: float) -> Iterator[dict[str, Any]]:
        """The reports, until all are there, the time is over, or the process is lost: then `problem` says why."""
        buffer, wait, is_ready = b"", STARTS_WITHIN, False
        while self._left and time.monotonic() < until:
            if not select.select([self._process.stdout], [], [], wait)[0]:
                self._note_hang()
                return
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                self._note_end(is_ready)
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for report in map(json.loads, lines):
                if report.get("warm_up") == "failed":
                    raise RuntimeError(f"the intact files are not accepted: {report['text']}")
                is_ready = is_ready or "ready" in report
                if "number" in report:
                    self._left -= 1
                    yield report
            wait = self._limits.seconds if is_ready else STARTS_WITHIN

    def errors(self) -> str:
        """The end of what the process wrote on its standard error."""
        return self._errors.read_bytes()[-20_000:].decode(errors="backslashreplace")

    def _note_hang(self) -> None:
        self.problem = f"no end after {self._limits.seconds:g} s"
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGUSR1)  # it writes where its threads are
        time.sleep(0.2)

    def _note_end(self, is_ready: bool) -> None:
        status = self._wait()
        if not is_ready:
            raise RuntimeError(f"a worker did not start:\n{self.errors()}")
        name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
        self.problem = f"the process ended: {name}"

    def _wait(self) -> int:
        if self._process.returncode is None:
            _, status, used = os.wait4(self._process.pid, 0)
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self.cpu_seconds = used.ru_utime + used.ru_stime
        return self._process.returncode
