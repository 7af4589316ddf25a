"""A process that gives the mutants of a format to what reads them, and reports after each.

python -m tests.fuzz.worker MODULE FORMAT CORPUS SCRATCH SEED FIRST STOP MEMORY

MODULE has the dictionary `FORMATS`. SCRATCH/input holds the mutant of the moment, and stays behind if the process is
lost; SCRATCH/failed-NUMBER gets one that failed. Every report is a line of JSON on the standard output; the mutation
under way is the one after the last report. MEMORY is in bytes of address space: of the process, or if it imports JAX,
which takes much and uses little of it, of what comes after the imports.
"""

import contextlib
import faulthandler
import gc
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

from mixedres._internal import command_line, process
from tests.fuzz import blind

# Characters that move a terminal's cursor or end a line, but for the end of a line itself.
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029]")
# No person reads a line of more characters.
LONGEST_LINE = 3000


def main(module, name, corpus, scratch, seed, first, stop, memory):
    """Runs the mutations FIRST to STOP - 1."""
    chosen = importlib.import_module(module).FORMATS[name]
    report = _take_output()
    process.drop_noise()  # as in every command
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    if not chosen.uses_jax:
        _limit_memory(int(memory))
    place, intact = Path(scratch), Path(corpus)
    targets = chosen.targets(intact)
    folder = _Folder(place / "input", intact / chosen.base if chosen.base else None)
    for target in targets if chosen.base else ():  # what is imported at the first call belongs to the imports
        verdict = judge(lambda target=target: target(folder.path))
        report({"warm_up": verdict.outcome, "text": verdict.text})
    if chosen.uses_jax:
        _limit_memory(int(memory) + _address_space())
    gc.freeze()  # a collection need not look at what the imports brought
    report({"ready": True})
    for number in range(int(first), int(stop)):
        changes = chosen.mutant(blind.generator(int(seed), name, number), intact, place)
        verdicts, seconds = [], 0.0
        for target in targets:
            folder.write(changes)  # again for each target, which may write there
            started = time.perf_counter()
            verdicts.append(_judged(target, folder.path))
            seconds = max(seconds, time.perf_counter() - started)
        worst = min(verdicts, key=lambda verdict: ("failed", "refused", "accepted").index(verdict.outcome))
        if worst.outcome == "failed":
            _write(place / f"failed-{number}", changes)
        report({"number": number, "seconds": seconds, **worst._asdict()})
        folder.restore(changes)
    os._exit(0)  # threads of libraries need not be waited for


def _judged(target, path):
    """Returns the verdict on a target, also on what libraries write past Python."""
    before = os.fstat(2).st_size
    verdict = judge(lambda: target(path))
    if verdict.outcome != "failed" and (after := os.fstat(2).st_size) > before:
        written = os.pread(2, min(after - before, 2000), before).decode(errors="backslashreplace")
        return Verdict("failed", f"a library wrote on stderr: {written}", f"written: {written[:60]!r}")
    return verdict


def _take_output():
    """Keeps the standard output for reports; whatever else is printed goes to the standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lambda line: print(json.dumps(line), file=output, flush=True)


def _limit_memory(limit):
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _address_space():
    """Returns the bytes of this process's address space."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmSize"))


def _write(folder, changes):
    for name, content in changes.items():
        if content is None:
            (folder / name).unlink(missing_ok=True)
        else:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


class _Folder:
    """The folder of the mutants: a copy of `base`, or empty."""

    def __init__(self, path, base):
        self.path, self._base = path, base
        shutil.rmtree(path, ignore_errors=True)
        if base is None:
            path.mkdir()
        else:
            shutil.copytree(base, path)

    def write(self, changes):
        _write(self.path, changes)

    def restore(self, changes):
        _write(self.path, {name: self._base and (self._base / name).read_bytes() for name in changes})


class Verdict(NamedTuple):
    """The end of a command: 'accepted', 'refused' with its line, or 'failed' with what went wrong."""

    outcome: str
    text: str = ""
    signature: str = ""


def judge(command):
    """Calls what a command does as `mixedres._internal.command_line.run` would.

    It fails where an exception is not turned into a line, where the line is more than a line or has control characters,
    where something is printed that a terminal could not show, and where a warning would be printed.
    """
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="backslashreplace", write_through=True)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as caught,
        ):
            status = command_line.run("fuzz", lambda _: command(), ())
    except BaseException as error:  # whatever it is, a user would see a traceback
        return Verdict("failed", traceback.format_exc(), _signature(error))
    printed, line = (stream.buffer.getvalue().decode("utf-8") for stream in (out, err))
    if caught:
        first = caught[0]
        text = f"{first.filename}:{first.lineno}: {first.category.__name__}: {first.message}"
        return Verdict("failed", text, f"warning {first.category.__name__} {first.filename}:{first.lineno}")
    for stream, text in (("stdout", printed), ("stderr", line)):
        if found := _CONTROL.search(text):
            shown = text[max(0, found.start() - 200) : found.end() + 50]
            return Verdict("failed", f"{stream} has a control character: {shown!r}", f"control character on {stream}")
        if text and max(map(len, text.split("\n"))) > LONGEST_LINE:
            return Verdict("failed", f"{stream} has a line of {len(text)} characters: {text[:300]!r}", f"long {stream}")
    if status == 0:
        return Verdict("accepted") if not line else Verdict("failed", f"printed {line!r}", "printed on stderr")
    if line.count("\n") != 1 or not line.startswith("fuzz: "):
        return Verdict("failed", f"not one line: {line!r}", "not one line")
    if line.startswith("fuzz: stdout: "):
        return Verdict("failed", f"an error of a file is taken for one of the output: {line}", "OSError without a name")
    return Verdict("refused", line)


def _signature(error):
    """The kind of an exception and the innermost place in mixedres, to tell one defect from another."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/mixedres/" in frame.filename] or frames
    return f"{type(error).__name__} at {own[-1].filename.rpartition('/mixedres/')[2]}:{own[-1].lineno}"


if __name__ == "__main__":
    main(*sys.argv[1:])
