"""Ownership of the directory of a run: a process claims it, notices its loss, and removes an earlier run from it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterator
from typing import IO

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import as_json, lock, nearest_existing, read_json, write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Record
from mixedres.checkpoints import workdir as names
from mixedres.checkpoints.recorded import PARTIAL, checkpoint_steps, holds_config, read_data_identity
from mixedres.checkpoints.workdir import CHECKPOINTS, CONFIG, DATA, ERRORS, LOCK, METRICS, SUMMARY

# Files of a run.
_FILES = (SUMMARY, ERRORS, METRICS, names.WANDB_ID, DATA, CONFIG)
# Entries that a start leaves which was killed at once.
_BEGUN = {LOCK, CONFIG + ".part", DATA, DATA + ".part", CHECKPOINTS}
# Directories of checkpoints: whole, being written, and set aside.
_CHECKPOINT = re.compile(rf"\d+|{PARTIAL.pattern}|damaged-\d+")


class Claim(contextlib.AbstractContextManager["Claim"]):
    """A directory that belongs to this process until the claim is closed, or until the process ends."""

    def __init__(self, workdir: pathlib.Path):
        """Locks the existing directory `workdir`; raises ConfigError if another process has the lock."""
        self._path, self._file = workdir / LOCK, _lock(workdir)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlocks the directory."""
        self._file.close()

    def is_lost(self) -> bool:
        """Returns whether the directory or its lock was removed or moved; False if the disk reports an error."""
        try:
            return not os.path.samestat(os.stat(self._path), os.fstat(self._file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False


def claim(workdir: pathlib.Path, config: Record, *, clean: bool, data: Record | None = None) -> Claim:
    """Locks `workdir` for a new run with `config`, or to continue the run in the directory. Call `begin` next.

    A run of another config or other data is removed if it has no checkpoint, no summary and no step to examine, because
    nothing is lost with such a run.

    Args:
      workdir: an absolute path.
      config: config of this start, flat and resolved.
      data: identity of the data, see `mixedres.checkpoints.workdir.check_data`; None: the data is not compared.
      clean: remove an earlier run first. Only files that a run writes are removed, and no link is followed. A directory
        with other files and no run is refused.

    Raises:
      ConfigError: if the directory cannot be written or cannot hold a checkpoint, is in use, holds other files, or
        holds a run of another config or other data. Then nothing has been written or removed.
    """
    removes = check_claim(workdir, config, clean=clean, data=data)
    with _writable(workdir):
        workdir.mkdir(parents=True, exist_ok=True)
        claimed = Claim(workdir)
        if removes:
            _remove_run(workdir)
    return claimed


def check_claim(workdir: pathlib.Path, config: Record, *, clean: bool, data: Record | None = None) -> bool:
    """Checks that `claim` may take `workdir`, and returns whether it would remove an earlier run.

    Args and errors: as for `claim`; whether the directory is in use is not checked. Writes nothing.
    """
    check_name(workdir)
    with _writable(workdir):
        _check_writable(workdir)
        holds_run = _holds_run(workdir, clean=clean)
        removes = clean or (holds_run and not _may_go_on(workdir, config, data or {}))
        if removes:
            _check_removable(workdir)
        elif holds_run:
            _check_complete(workdir)
    return removes


def begin(workdir: pathlib.Path, config: Record, data: Record | None = None) -> None:
    """Writes the run's config and the identity of its data into `workdir`, which has been claimed.

    Raises:
      ConfigError: if the directory cannot be written.
    """
    with _writable(workdir):
        known = read_data_identity(workdir)
        if data is not None and known is None and not holds_config(workdir):
            known = data
        if known is not None:
            _update(workdir / DATA, known)
        (workdir / SUMMARY).unlink(missing_ok=True)  # this start continues the run beyond its end
        _update(workdir / CONFIG, config)
        # From now on, a missing directory means that the checkpoints are gone.
        (workdir / CHECKPOINTS).mkdir(exist_ok=True)


def _update(path: pathlib.Path, content: Record) -> None:
    """Writes a document, unless it is there already."""
    content = as_json(stamped(content))
    if read_json(path) != content:
        write_json(path, content)


@contextlib.contextmanager
def _writable(workdir: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written ({error.strerror}); name another with --workdir=DIR"
        ) from error


def check_name(workdir: pathlib.Path) -> None:
    """Raises ConfigError for a path in which no checkpoint can be written."""
    try:
        os.fsencode(workdir).decode()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.lstat(workdir / CHECKPOINTS)
    except OSError as error:  # such as a name that is too long
        raise ConfigError(f"--workdir={workdir} cannot be used ({error.strerror}); name another") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--workdir={workdir} is not UTF-8, which checkpoints need; name another") from None


def _check_writable(workdir: pathlib.Path) -> None:
    existing = nearest_existing(workdir)
    if not existing.is_dir():
        raise NotADirectoryError(20, "not a directory", str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(13, "no write permission", str(existing))


def _holds_run(workdir: pathlib.Path, *, clean: bool) -> bool:
    """Returns whether the directory holds a run.

    Raises:
      ConfigError: if the directory holds other files; without `clean`, also if the config of its run cannot be read.
    """
    if holds_config(workdir):
        return True
    entries = {path.name for path in workdir.iterdir()} if workdir.exists() else set()
    if not entries - _BEGUN and not checkpoint_steps(workdir):
        return False
    if CONFIG in entries and LOCK in entries:
        if clean:
            return True
        raise ConfigError(
            f"--workdir={workdir} holds a run whose {CONFIG} cannot be read, and no whole checkpoint that has it too; "
            "put back a copy, or start over with --clean"
        )
    raise ConfigError(
        f"--workdir={workdir} holds files but no run of mixedres, so nothing was written or removed; "
        "name an empty or a new directory"
    )


def _may_go_on(workdir: pathlib.Path, config: Record, data: Record) -> bool:
    """Returns whether `config` may continue the run; False if it may not, and the run has no results.

    Raises:
      ConfigError: if it may not, and the run has results.
    """
    try:
        names.check_data(workdir, data)
        names.check_same(workdir, config)
        return True
    except ConfigError:
        results = (SUMMARY, CHECKPOINTS, *names.NONFINITE)
        if any(_has_content(workdir / name) for name in results):
            raise
        return False


def _has_content(path: pathlib.Path) -> bool:
    return os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))


def _check_complete(workdir: pathlib.Path) -> None:
    """Raises ConfigError if a run has written a line of metrics and its directory of checkpoints is gone."""
    checkpoints = workdir / CHECKPOINTS
    if checkpoints.is_dir():
        return
    if os.path.lexists(checkpoints) and not checkpoints.is_symlink():
        raise ConfigError(f"{checkpoints} is no directory; move it away or name another --workdir")
    if checkpoints.is_symlink() or (_has_content(workdir / METRICS) and (workdir / METRICS).stat().st_size):
        raise ConfigError(
            f"{checkpoints} of a run that was under way is gone; put or mount it back, or start over with --clean"
        )


def _lock(workdir: pathlib.Path) -> IO[str]:
    try:
        return lock(workdir / LOCK)
    except BlockingIOError:
        raise ConfigError(f"--workdir={workdir} is in use by another run; wait for it or name another") from None


def _check_removable(workdir: pathlib.Path) -> None:
    """Raises ConfigError if a link or a file has the name of a directory that would be removed."""
    directories = (CHECKPOINTS, *names.NONFINITE, names.WANDB, names.PROFILE)
    for path in [workdir / name for name in directories] + _checkpoints(workdir):
        if path.is_symlink() or (os.path.lexists(path) and not path.is_dir()):
            kind = "a link, which is not followed" if path.is_symlink() else "no directory of a run"
            raise ConfigError(f"{path} is {kind}, so nothing was removed; move it away, or name another --workdir")


def _checkpoints(workdir: pathlib.Path) -> list[pathlib.Path]:
    directory = workdir / CHECKPOINTS
    if directory.is_symlink() or not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if _CHECKPOINT.fullmatch(path.name)]


def _remove_run(workdir: pathlib.Path) -> None:
    """Removes the files of a run and the numbered directories of its checkpoints.

    The config is removed last: after a kill in between, the rest is still a run, which can be removed.
    """
    for name in (*names.NONFINITE, names.WANDB):
        shutil.rmtree(workdir / name, ignore_errors=True)
    profile = workdir / names.PROFILE
    for path in profile.glob(names.TRACES):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
    for path in (profile / names.TRACES).parents[:3]:  # the folders of the traces, unless they hold more
        _remove_if_empty(path)
    for path in _checkpoints(workdir):
        shutil.rmtree(path)
    _remove_if_empty(workdir / CHECKPOINTS)
    events = [path for path in workdir.glob(names.EVENTS) if path.is_file()]
    partial = [workdir / f"{name}.part" for name in _FILES]
    for path in (*events, *partial, *(workdir / name for name in _FILES)):
        if path.is_symlink() or path.is_file():
            path.unlink()


def _remove_if_empty(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()
