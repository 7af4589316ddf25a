"""Ownership of the directory of a run: a process claims it, notices its loss, and removes an earlier run from it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import shutil
from collections.abc import Iterable, Iterator

from mixedres._internal.cli import console
from mixedres._internal.errors import ConfigError, listed
from mixedres._internal.files import as_json, lock, nearest_existing, read_json, write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Record
from mixedres.checkpoints import folder
from mixedres.checkpoints import workdir as names
from mixedres.checkpoints.workdir import CHECKPOINTS, CONFIG, DATA, ERRORS, LOCK, METRICS, SUMMARY, RecordedRun

# Files of a run.
_FILES = (SUMMARY, ERRORS, METRICS, names.WANDB_ID, DATA, CONFIG)
# Entries that a start leaves which was killed at once.
_BEGUN = {LOCK, CONFIG + ".part", DATA, DATA + ".part", CHECKPOINTS}
# Directories of checkpoints: whole, being written, and set aside.
_CHECKPOINT = re.compile(rf"\d+|{folder.PARTIAL.pattern}|damaged-\d+")


class Claim(contextlib.AbstractContextManager["Claim"]):
    """A directory that belongs to this process until the claim is closed, or until the process ends."""

    def __init__(self, workdir: pathlib.Path):
        """Locks the existing directory `workdir`; raises ConfigError if another process has the lock."""
        self._path = workdir / LOCK
        try:
            self._file = lock(self._path)
        except BlockingIOError:
            raise ConfigError(f"--workdir={workdir} is in use by another run; wait for it or name another") from None

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


class RunDirectory(RecordedRun):
    """The directory of a run that this process writes.

    directory = RunDirectory(pathlib.Path("runs/digits").absolute())
    with directory.claim(config, clean=False):
        directory.begin(config)
    """

    def claim(self, config: Record, *, clean: bool, data: Record | None = None) -> Claim:
        """Locks the directory for a new run with `config`, or to continue the run in the directory. Call `begin` next.

        An earlier run of another config or other `data` (see `check_data`) is removed if it has no results, and with
        `clean` always. Only files that a run writes are removed, and no link is followed.

        Raises ConfigError if the directory cannot be written, is in use, holds other files, or holds a run with results
        of another config or other data. Then nothing has been written or removed.
        """
        removes = self.check_claim(config, clean=clean, data=data)
        with self._writable():
            self.path.mkdir(parents=True, exist_ok=True)
            claimed = Claim(self.path)
            if removes:
                self._remove_run()
        return claimed

    def check_claim(self, config: Record, *, clean: bool, data: Record | None = None) -> bool:
        """Checks as `claim` does, without its lock; returns whether `claim` would remove an earlier run."""
        self.check_name()
        with self._writable():
            _check_writable(self.path)
            holds_run = self._holds_run(clean=clean)
            removes = clean or (holds_run and not self._may_go_on(config, data or {}))
            if removes:
                self._check_removable()
            elif holds_run:
                self._check_complete()
        return removes

    def begin(self, config: Record, data: Record | None = None) -> None:
        """Writes the config and the identity of the data into the claimed directory; raises ConfigError if it fails."""
        with self._writable():
            known = self.data()
            if data is not None and known is None and not self.holds_config():
                known = data
            if known is not None:
                _update(self.path / DATA, known)
            (self.path / SUMMARY).unlink(missing_ok=True)  # this start continues the run beyond its end
            _update(self.path / CONFIG, config)
            # From now on, a missing directory means that the checkpoints are gone.
            (self.path / CHECKPOINTS).mkdir(exist_ok=True)

    def check_name(self) -> None:
        """Raises ConfigError for a path that cannot exist, such as one with too long a name."""
        try:
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.lstat(self.path / CHECKPOINTS)
        except OSError as error:
            raise ConfigError(f"--workdir={self.path} cannot be used ({error.strerror}); name another") from None

    @contextlib.contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"--workdir={self.path} cannot be written ({error.strerror}); name another with --workdir=DIR"
            ) from error

    def _holds_run(self, *, clean: bool) -> bool:
        """Returns whether the directory holds a run; raises ConfigError for other files, or an unreadable config."""
        if self.holds_config():
            return True
        entries = {path.name for path in self.path.iterdir()} if self.path.exists() else set()
        if not entries - _BEGUN and not self.steps():
            return False
        if CONFIG in entries and LOCK in entries:
            if clean:
                return True
            raise ConfigError(
                f"--workdir={self.path} holds a run whose {CONFIG} cannot be read, and no whole checkpoint that has it "
                "too; put back a copy, or start over with --clean"
            )
        raise ConfigError(
            f"--workdir={self.path} holds files but no run of mixedres, so nothing was written or removed; "
            "name an empty or a new directory"
        )

    def _may_go_on(self, config: Record, data: Record) -> bool:
        """Returns whether `config` may continue the run; raises ConfigError if it may not, and the run has results."""
        try:
            self.check_data(data)
            self.check_same(config)
            return True
        except ConfigError:
            results = (SUMMARY, CHECKPOINTS, *names.NONFINITE)
            if any(_has_content(self.path / name) for name in results):
                raise
            return False

    def _check_complete(self) -> None:
        """Raises ConfigError if a run has written a line of metrics and its directory of checkpoints is gone."""
        checkpoints = self.path / CHECKPOINTS
        if checkpoints.is_dir():
            return
        if os.path.lexists(checkpoints) and not checkpoints.is_symlink():
            raise ConfigError(f"{checkpoints} is no directory; move it away or name another --workdir")
        if checkpoints.is_symlink() or (_has_content(self.path / METRICS) and (self.path / METRICS).stat().st_size):
            raise ConfigError(
                f"{checkpoints} of a run that was under way is gone; put or mount it back, or start over with --clean"
            )

    def _check_removable(self) -> None:
        """Raises ConfigError if a link or a file has the name of a directory that would be removed."""
        directories = (CHECKPOINTS, *names.NONFINITE, names.WANDB, names.PROFILE)
        for path in [self.path / name for name in directories] + self._checkpoints():
            if path.is_symlink() or (os.path.lexists(path) and not path.is_dir()):
                kind = "a link, which is not followed" if path.is_symlink() else "no directory of a run"
                raise ConfigError(f"{path} is {kind}, so nothing was removed; move it away, or name another --workdir")
        for path in self._checkpoints():
            files = {pathlib.Path(place, name) for place, _, inside in os.walk(path) for name in inside}
            if others := sorted(files - set(folder.written(path))):
                away = "move it away, or name another --workdir"
                raise ConfigError(f"{others[0]} is of no run, so nothing was removed; {away}")

    def _checkpoints(self) -> list[pathlib.Path]:
        directory = self.path / CHECKPOINTS
        if directory.is_symlink() or not directory.is_dir():
            return []
        return [path for path in directory.iterdir() if _CHECKPOINT.fullmatch(path.name)]

    def _remove_run(self) -> None:
        """Removes what the run wrote, and prints what is left: the config last, for a kill in between."""
        self._remove_steps_and_traces()
        for path in self._checkpoints():
            _remove(path, folder.written(path))
        _remove_if_empty(self.path / CHECKPOINTS)
        for path in (*self.path.glob(names.EVENTS), *(self.path / f"{name}.part" for name in _FILES)):
            _unlink(path)
        for name in _FILES:
            _unlink(self.path / name)
        if left := sorted({path.name for path in self.path.iterdir()} - {LOCK}):
            console.say(f"note: --clean leaves what no run wrote: {listed(left, 5)}")

    def _remove_steps_and_traces(self) -> None:
        """Removes steps that were not finite, files of Weights & Biases, and traces."""
        for name in names.NONFINITE:
            _remove(self.path / name, [self.path / name / file for file in names.STEP_FILES])
        known = read_json(self.path / names.WANDB_ID)
        if isinstance(known, dict) and re.fullmatch(r"\w+", str(known.get("id"))):
            for path in (self.path / names.WANDB).glob(f"*run-*-{known['id']}"):
                shutil.rmtree(path)
            for path in (self.path / names.WANDB).iterdir() if (self.path / names.WANDB).is_dir() else ():
                if path.is_symlink() and not path.exists():  # to the newest run
                    path.unlink()
        _remove_if_empty(self.path / names.WANDB)
        profile = self.path / names.PROFILE
        for path in profile.glob(names.TRACES):
            if path.is_dir() and not path.is_symlink():
                _remove(path, [file for pattern in names.TRACE_FILES for file in path.glob(pattern)])
        for path in (profile / names.TRACES).parents[:3]:  # the folders of the traces, unless they hold more
            _remove_if_empty(path)


def _remove(directory: pathlib.Path, files: Iterable[pathlib.Path]) -> None:
    """Removes files in a directory, and then the directories below and the directory itself if they are empty."""
    for path in files:
        _unlink(path)
    for place, _, _ in os.walk(directory, topdown=False):
        _remove_if_empty(pathlib.Path(place))


def _unlink(path: pathlib.Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()


def _update(path: pathlib.Path, content: Record) -> None:
    """Writes a document, unless it is there already."""
    content = as_json(stamped(content))
    if read_json(path) != content:
        write_json(path, content)


def _check_writable(workdir: pathlib.Path) -> None:
    existing = nearest_existing(workdir)
    if not existing.is_dir():
        raise NotADirectoryError(20, "not a directory", str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(13, "no write permission", str(existing))


def _has_content(path: pathlib.Path) -> bool:
    return os.path.lexists(path) and not (path.is_dir() and not path.is_symlink() and not any(path.iterdir()))


def _remove_if_empty(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink() and not any(path.iterdir()):
        path.rmdir()
