"""Workers and what watches them: a mutant that crashes its process or keeps it waiting is found, kept and passed by."""

import collections
import contextlib
import dataclasses
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests import ROOT

# A worker imports JAX meanwhile.
STARTS_WITHIN = 120.0
# Lost processes after which a format is given up, and inputs that are kept of each defect.
MOST_LOST, MOST_KEPT = 20, 3


@dataclasses.dataclass
class Tally:
    """What came of the mutations of a format.

    Attributes:
      accepted, refused: numbers of mutants; accepted by all that read them.
      failures: {what tells a defect from others: numbers of the mutations}.
      slowest: seconds of the slowest mutant.
    """

    accepted: int = 0
    refused: int = 0
    failures: dict[str, list[int]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    slowest: float = 0.0

    @property
    def failed(self):
        return sum(map(len, self.failures.values()))

    @property
    def mutations(self):
        return self.accepted + self.refused + self.failed


def make_corpus(place):
    """Makes the corpus in a process of its own."""
    command = [sys.executable, "-m", "tests.fuzz.corpus", str(place)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=_environment())


def fuzz(name, corpus, numbers, *, seed=0, seconds=10.0, memory=2 * 2**30, kept=None, module="tests.fuzz.formats"):
    """Gives mutants of a format to what reads them, and returns their `Tally`.

    Args:
      name: of the format.
      corpus: of `make_corpus`.
      numbers: a range of mutations, which the seed and the numbers determine.
      seed: of the mutations.
      seconds, memory: that a mutant may take, on the wall and in bytes.
      kept: a folder for inputs that fail, in folders FORMAT-SEED-NUMBER; None: nowhere.
      module: has the dictionary `FORMATS`.
    """
    tally, following, lost = Tally(), numbers.start, 0
    folder = kept and kept / f"{name}-{seed}"
    with tempfile.TemporaryDirectory(prefix="mixedres-fuzz-") as scratch:
        while following < numbers.stop and lost < MOST_LOST:
            arguments = (module, name, corpus, scratch, seed, following, numbers.stop, memory)
            with _Worker(arguments, Path(scratch), numbers.stop - following, seconds) as worker:
                for report in worker.reports():
                    following = report["number"] + 1
                    _count(tally, report, Path(scratch) / f"failed-{report['number']}", folder)
            if worker.problem is not None:
                report = {"outcome": "failed", "number": following, "signature": worker.problem}
                report["text"] = f"{worker.problem}\n{worker.errors()}"
                _count(tally, report, worker.input, folder)
                following, lost = following + 1, lost + 1
    return tally


def _count(tally, report, place, kept):
    """Enters a report; `place` holds the mutant of one that failed."""
    tally.slowest = max(tally.slowest, report.get("seconds", 0.0))
    if report["outcome"] != "failed":
        tally.accepted += report["outcome"] == "accepted"
        tally.refused += report["outcome"] == "refused"
        return
    numbers = tally.failures[report["signature"]]
    numbers.append(report["number"])
    if kept and len(numbers) <= MOST_KEPT:
        folder = kept.with_name(f"{kept.name}-{report['number']}")
        folder.mkdir(parents=True, exist_ok=True)
        if place.exists():  # it does not where all that is mutated is gone
            shutil.copytree(place, folder / "input", dirs_exist_ok=True)
        (folder / "report.txt").write_text(f"{report['text']}\n")


def _environment():
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
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
    """

    def __init__(self, arguments, scratch, left, seconds):
        self.input, self.problem = scratch / "input", None
        self._left, self._seconds, self._errors = left, seconds, scratch / "stderr"
        with self._errors.open("w+b") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=_environment(),
                start_new_session=True,
            )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()

    def reports(self):
        """Yields the reports, until all are there or the process is lost: then `problem` says why."""
        buffer, is_ready = b"", False
        while self._left:
            if not select.select([self._process.stdout], [], [], self._seconds if is_ready else STARTS_WITHIN)[0]:
                self.problem = f"no end after {self._seconds:g} s"
                self._process.send_signal(signal.SIGUSR1)  # it writes where its threads are
                time.sleep(0.2)
                return
            received = os.read(self._process.stdout.fileno(), 1 << 16)
            if not received:
                status = self._process.wait()
                assert is_ready, f"a worker did not start:\n{self.errors()}"
                name = signal.Signals(-status).name if status < 0 else f"exit status {status}"
                self.problem = f"the process ended: {name}"
                return
            *lines, buffer = (buffer + received).split(b"\n")
            for report in map(json.loads, lines):
                assert report.get("warm_up") != "failed", f"the intact files are not accepted: {report['text']}"
                is_ready = is_ready or "ready" in report
                if "number" in report:
                    self._left -= 1
                    yield report

    def errors(self):
        """Returns the end of what the process wrote on its standard error."""
        return self._errors.read_bytes()[-20_000:].decode(errors="backslashreplace")
