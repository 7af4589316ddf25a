"""A process that gives the mutants of a format to what reads them, and reports after each.

python -m experiments.fuzzing.worker MODULE FORMAT CORPUS SCRATCH SEED FIRST COUNT LIMIT

MODULE has the dictionary `FORMATS`. SCRATCH/input holds the mutant of the moment, and stays behind where the process is
lost; SCRATCH/failed-NUMBER gets those that failed. Every report is a line of JSON on the standard output; the mutation
under way is the one after the last report. LIMIT is in bytes of address space: of the process, or where it imports JAX,
which takes much and uses little of it, of what comes after the imports.
"""

import faulthandler
import gc
import importlib
import json
import os
import pathlib
import resource
import shutil
import signal
import sys
import time
import zlib
from collections.abc import Callable
from typing import Any

from experiments.fuzzing import blind
from experiments.fuzzing.judge import Verdict, judge
from mixedres._internal import process


def main(argv: list[str]) -> None:
    """Runs the mutations FIRST to FIRST + COUNT - 1."""
    module, name, corpus, scratch, seed, first, count, limit = argv
    chosen = importlib.import_module(module).FORMATS[name]
    report = _take_output()
    process.drop_noise()  # as in every command
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if not chosen.uses_jax:
        _limit_memory(int(limit))
    place, intact = pathlib.Path(scratch), pathlib.Path(corpus)
    targets = chosen.targets(intact)
    folder = _Folder(place / "input", intact / chosen.base if chosen.base else None)
    for target in targets if chosen.base else ():  # what is imported at the first call belongs to the imports
        verdict = judge(_called(target, folder.path))
        report({"warm_up": verdict.outcome, "text": verdict.text})
    if chosen.uses_jax:
        _limit_memory(int(limit) + _status("VmSize"))
    gc.freeze()  # a collection need not look at what the imports brought
    report({"ready": True})
    for number in range(int(first), int(first) + int(count)):
        changes = chosen.mutant(blind.generator(int(seed), name, number), intact, place)
        verdicts, seconds = [], 0.0
        for target in targets:
            folder.write(changes)  # again for each target, which may write there
            started = time.perf_counter()
            verdicts.append(_judged(target, folder.path))
            seconds = max(seconds, time.perf_counter() - started)
        worst = min(verdicts, key=lambda verdict: ("failed", "refused", "accepted").index(verdict.outcome))
        sums = {path: None if content is None else zlib.crc32(content) for path, content in changes.items()}
        line: dict[str, Any] = {"number": number, "seconds": seconds, "sums": sums, **worst._asdict()}
        if number % 100 == 0 or worst.outcome == "failed" or number == int(first) + int(count) - 1:
            line["peak"] = _status("VmHWM")
        if worst.outcome == "failed":
            _keep(changes, place / f"failed-{number}")
        report(line)
        folder.restore(changes)
    os._exit(0)  # threads of libraries need not be waited for


def _keep(changes: dict[str, bytes | None], folder: pathlib.Path) -> None:
    """Writes what is mutated where the next mutant does not change it."""
    for name, content in changes.items():
        if content is not None:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


def _called(target: Callable[[pathlib.Path], None], path: pathlib.Path) -> Callable[[], None]:
    return lambda: target(path)


def _judged(target: Callable[[pathlib.Path], None], path: pathlib.Path) -> Verdict:
    """The verdict on a target, also of what libraries write past Python."""
    before = os.fstat(2).st_size
    verdict = judge(_called(target, path))
    if verdict.outcome != "failed" and (after := os.fstat(2).st_size) > before:
        written = os.pread(2, min(after - before, 2000), before).decode(errors="backslashreplace")
        return Verdict("failed", f"a library wrote on stderr: {written}", f"written: {written[:60]!r}")
    return verdict


def _take_output() -> Callable[[dict[str, Any]], None]:
    """Keeps the standard output for reports; whatever else is printed goes to the standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def report(line: dict[str, Any]) -> None:
        print(json.dumps(line), file=output, flush=True)

    return report


def _limit_memory(limit: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _status(name: str) -> int:
    """A size of this process, in bytes."""
    line = next(line for line in pathlib.Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


class _Folder:
    """The folder of the mutants: a copy of `base`, or empty."""

    def __init__(self, path: pathlib.Path, base: pathlib.Path | None):
        self.path, self._base = path, base
        shutil.rmtree(path, ignore_errors=True)
        if base is None:
            path.mkdir()
        else:
            shutil.copytree(base, path)

    def write(self, changes: dict[str, bytes | None]) -> None:
        for name, content in changes.items():
            if content is None:
                (self.path / name).unlink(missing_ok=True)
            else:
                (self.path / name).write_bytes(content)

    def restore(self, changes: dict[str, bytes | None]) -> None:
        if self._base is None:
            self.write(dict.fromkeys(changes))
        else:
            self.write({name: (self._base / name).read_bytes() for name in changes})


if __name__ == "__main__":
    main(sys.argv[1:])
