"""Mutants of a format, and the process that reads them; a mutant that ends the process or hangs in it is found, too."""

import concurrent.futures
import faulthandler
import fnmatch
import functools
import gc
import multiprocessing
import os
import pathlib
import pkgutil
import resource
import sys
import tempfile
from unittest import mock

from mixedres._internal.cli import process
from tests.fuzz import blind
from tests.fuzz.judge import Verdict, judge

# Bytes of address space that a mutant may take. JAX takes much of it and uses little: that of its imports is added.
MEMORY = 2 * 2**30
# Failures after which a format is given up.
MOST_FAILURES = 20
# No index of a mutant stays behind; each arena of malloc takes address space.
_ENVIRONMENT = {"XDG_CACHE_HOME": os.devnull, "MALLOC_ARENA_MAX": "2"}


def fuzz(name, chosen, corpus, numbers, kept, *, seed=0, seconds=10.0):
    """Gives mutants of a format to what reads them, and returns {number: `Verdict`}.

    Args:
      name: of the format; part of the seed.
      chosen: the `Format`.
      corpus: a folder with the intact files.
      numbers: a range; a mutant is a function of the seed, the name, its number and the intact files.
      kept: a folder that gets the mutants that fail, as NAME-SEED-NUMBER.
      seed: an integer from 0 on.
      seconds: the most wall time that a command may take for a mutant.
    """
    verdicts, failures, pool, intact = {}, 0, None, chosen.intact(corpus)
    mutated = {path: intact[path] for path in sorted(intact) if fnmatch.fnmatch(path, chosen.pattern)}
    with tempfile.TemporaryDirectory(prefix="mixedres-fuzz-") as scratch:
        for number in numbers:
            changes = chosen.mutant(blind.generator(seed, name, number), mutated)
            pool = pool or _pool(chosen.targets, corpus, intact, pathlib.Path(scratch), seconds)
            try:
                verdicts[number] = pool.submit(_read, changes).result()
            except Exception as error:  # the process ended, or cannot go on
                pool = pool.shutdown()  # the next mutant gets another process
                errors = pathlib.Path(scratch, "stderr").read_text(errors="backslashreplace")
                verdicts[number] = Verdict("failed", f"{error}\n{errors[:5000]}")
            if verdicts[number].outcome == "failed":
                write(kept / f"{name}-{seed}-{number}", changes)
                failures += 1
            if failures == MOST_FAILURES:
                break
        if pool:
            pool.shutdown()
    return verdicts


def write(folder, changes):
    """Writes {path below the folder: contents, or None for a file that is removed}."""
    for name, content in changes.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.write_bytes(content)


def _pool(targets, corpus, intact, scratch, seconds):
    """Returns an executor with one process, which has read the intact files."""
    write(scratch / "input", intact)
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        found = pool.submit(_start, targets, corpus, intact, scratch, seconds).result()
    assert all(verdict.outcome == "accepted" for verdict in found), f"intact files are not accepted: {found}"
    return pool


def _start(targets, corpus, intact, scratch, seconds):
    """Prepares the process for `_read`, limits its memory, and returns the verdicts on the intact files."""
    global _commands, _folder, _intact, _seconds
    output = os.open(scratch / "stderr", os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    process.drop_noise()  # as in every command
    faulthandler.enable()
    _folder, _intact, _seconds = scratch / "input", intact, seconds
    _commands = [functools.partial(target, _folder) for target in pkgutil.resolve_name(targets)(corpus)]
    found = [judge(command) for command in _commands]
    size = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = MEMORY + (size if "jax" in sys.modules else 0)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.freeze()  # a collection need not look at what the imports brought
    return found


def _read(changes):
    """Returns the worst verdict of the targets on a mutant; a target that hangs ends the process."""
    verdicts = []
    for command in _commands:
        write(_folder, changes)  # again for each target, which may write there
        faulthandler.dump_traceback_later(_seconds, exit=True)
        verdicts.append(judge(command))
        faulthandler.cancel_dump_traceback_later()
    write(_folder, {name: _intact.get(name) for name in changes})
    return min(verdicts, key=lambda verdict: ("failed", "refused", "accepted").index(verdict.outcome))
