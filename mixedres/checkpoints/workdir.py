"""The directory of a run: its files, and whether a new start may continue in it."""

import contextlib
import json
import os
import pathlib
import shutil
from collections.abc import Collection, Iterator
from typing import IO, Any

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import is_locked, lock, nearest_existing, read_json, write_json
from mixedres.config import recorded
from mixedres.config.keys import FREE, GROW, KEYS

CONFIG, DATA, METRICS, SUMMARY, CHECKPOINTS, LOCK = (
    recorded.FILE,
    "data.json",
    "metrics.jsonl",
    "summary.json",
    "checkpoints",
    ".lock",
)
# Directory of a step that was not finite, and its name while it is written.
NONFINITE = ("nonfinite", ".nonfinite")
EVENTS = "events.out.tfevents.*"
# The identity of the run at Weights & Biases, and the directory of what wandb writes.
WANDB_ID, WANDB = "wandb.json", "wandb"
# The directory of traces for TensorBoard, which wants them in plugins/profile, and a trace in it by its first step.
PROFILE, TRACES = "profile", "plugins/profile/from_step_*"
_DEFAULTS = {key.path: list(key.default) if isinstance(key.default, tuple) else key.default for key in KEYS}
# What versions without the key did, where that is not its default.
_BEFORE = {"batch_norm.unbiased": False}
_RESUME = {key.path: key.resume for key in KEYS}


def claim(workdir: pathlib.Path, config: dict[str, Any], *, clean: bool, data: dict[str, Any] | None = None) -> IO[str]:
    """Locks `workdir` for a run with `config`: a new one, or the continuation of the one in it. `begin` comes next.

    Args:
      workdir: an absolute path.
      config: of this start, flat and resolved.
      data: identity of the data, see `check_data`; None: it is not compared.
      clean: remove an earlier run first. Only what a run writes is removed; a directory with files and no run in it is
        refused.

    Returns:
      The lock: the run owns the directory until it is closed, or until its process ends.

    Raises:
      ConfigError: where the directory cannot be written, is in use, holds something else, or holds a run of another
        config or other data. Then nothing has been written or removed.
    """
    with _writable(workdir):
        _check_writable(workdir)
        if _check_contents(workdir) and not clean:
            check_same(workdir, config)
            check_data(workdir, data or {})
        workdir.mkdir(parents=True, exist_ok=True)
        claimed = _lock(workdir)
        if clean:
            _remove_run(workdir)
    return claimed


def begin(workdir: pathlib.Path, config: dict[str, Any], data: dict[str, Any] | None = None) -> None:
    """Writes the run's config and data into `workdir`, which has been claimed.

    Raises:
      ConfigError: where it cannot be written.
    """
    with _writable(workdir):
        if data is not None and recorded.read(workdir) is None:
            write_json(workdir / DATA, data)
        (workdir / SUMMARY).unlink(missing_ok=True)  # this start continues the run beyond its end
        if recorded.read(workdir) != _as_json(config):
            write_json(workdir / CONFIG, config)


def in_use(workdir: pathlib.Path) -> bool:
    """Whether a run is under way in `workdir`, judging by its lock."""
    return is_locked(workdir / LOCK)


def finished(workdir: pathlib.Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """The summary of a finished run that `config` does not extend; else None. `workdir` was claimed with `config`."""
    old = recorded.read(workdir)
    if old is None or check_same(workdir, config):
        return None
    top1, wanted = config.get("stop_at_top1"), old.get("stop_at_top1")
    if wanted is not None and (top1 is None or top1 > wanted):
        return None
    return read_summary(workdir)


@contextlib.contextmanager
def _writable(workdir: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written ({error.strerror}); name another with --workdir=DIR"
        ) from error


def check_same(workdir: pathlib.Path, config: dict[str, Any], only: Collection[str] | None = None) -> bool:
    """Raises `ConfigError` unless `workdir` holds a run that `config` may continue, and lists the differences.

    Each key says whether it may change (`mixedres.config.keys.Key.resume`).

    `only`: the keys to compare; None: all.

    Returns:
      Whether the run becomes longer.
    """
    old = recorded.read(workdir)
    if old is None:
        raise ConfigError(f"--workdir={workdir} holds no run of mixedres; train one there first")
    new = _as_json(config)
    keys = sorted(key for key in old.keys() | new.keys() if _RESUME.get(key) != FREE and (only is None or key in only))
    old = {key: old.get(key, _BEFORE.get(key, _DEFAULTS.get(key))) for key in keys}  # an older version had fewer keys
    changed = [key for key in keys if old[key] != new.get(key)]
    longer = [key for key in changed if _RESUME.get(key) == GROW and _is_more(new.get(key), old[key])]
    differing = [key for key in changed if key not in longer]
    if differing:
        listed = "; ".join(f"{key}: {old[key]!r} there, {new.get(key)!r} now" for key in differing[:5])
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        way_out = ", or start over with --clean" if only is None else ""
        raise ConfigError(
            f"--workdir={workdir} holds a run with a different config ({listed}{more}); name another --workdir{way_out}"
        )
    return bool(longer)


def check_data(workdir: pathlib.Path, data: dict[str, Any], *, classes_only: bool = False) -> None:
    """Raises `ConfigError` where the run in `workdir` was on other data, and says what differs.

    Args:
      workdir: directory of the run.
      data: 'class_names', 'train_examples', 'eval_examples' and a 'fingerprint' of the examples and their order.
      classes_only: compare only the class names; an evaluation may use other images.
    """
    old = read_json(workdir / DATA)
    same = ("class_names", "train_examples", "eval_examples", "fingerprint")
    if not data or not isinstance(old, dict) or all(old.get(key) == data.get(key) for key in same):
        return
    there, now = old.get("class_names", []), data["class_names"]
    if there != now:
        new, gone = [name for name in now if name not in there], [name for name in there if name not in now]
        listed = [f"{kind}: {', '.join(names[:5])}" for kind, names in (("new", new), ("gone", gone)) if names]
        what = f"{len(there)} classes there, {len(now)} now ({'; '.join(listed) or 'in another order'})"
    elif not classes_only:
        counts = [
            f"{held.get('train_examples')} training and {held.get('eval_examples')} test images" for held in (old, data)
        ]
        what = f"{counts[0]} there, {counts[1]} now, or with other names or in another order"
    else:
        return
    raise ConfigError(
        f"--workdir={workdir} holds a run on other data ({what}); put the data back as they were, name another "
        "--workdir, or start over with --clean"
    )


def contents(workdir: pathlib.Path) -> dict[str, Any]:
    """The state of the directory that all processes must agree on: path, whether it was claimed, checkpoints."""
    found = (workdir / CHECKPOINTS).glob("[0-9]*")
    steps = sorted(int(path.name) for path in found if path.name.isdecimal())
    return {"directory": str(workdir), "claimed": (workdir / LOCK).exists(), "checkpoints": steps}


def read_summary(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The summary of a finished run; None where there is none yet."""
    try:
        return json.loads((workdir / SUMMARY).read_text())
    except FileNotFoundError:
        return None
    except ValueError:
        raise ConfigError(
            f"{workdir / SUMMARY} is not readable as JSON; remove it, or start over with --clean"
        ) from None


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    """`config` as read back from a file, where tuples are lists."""
    return json.loads(json.dumps(config))


def _is_more(new: Any, old: Any) -> bool:
    return isinstance(new, int | float) and isinstance(old, int | float) and new > old


def _check_writable(workdir: pathlib.Path) -> None:
    existing = nearest_existing(workdir)
    if not existing.is_dir():
        raise NotADirectoryError(20, "not a directory", str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(13, "no write permission", str(existing))


def _check_contents(workdir: pathlib.Path) -> bool:
    """Whether the directory holds a run; raises ConfigError where it holds other files."""
    if recorded.read(workdir) is not None:
        checkpoints = workdir / CHECKPOINTS
        if checkpoints.exists() and not checkpoints.is_dir():
            raise ConfigError(f"{checkpoints} is no directory; move it away or name another --workdir")
        return True
    # A start that was killed at once leaves its lock and a file it had not finished.
    if workdir.exists() and any(
        path.name not in (LOCK, CONFIG + ".part", DATA, DATA + ".part") for path in workdir.iterdir()
    ):
        raise ConfigError(
            f"--workdir={workdir} holds files but no run of mixedres, so nothing was written or removed; "
            "name an empty or a new directory"
        )
    return False


def _lock(workdir: pathlib.Path) -> IO[str]:
    try:
        return lock(workdir / LOCK)
    except BlockingIOError:
        raise ConfigError(f"--workdir={workdir} is in use by another run; wait for it or name another") from None


def _remove_run(workdir: pathlib.Path) -> None:
    """Removes what a run writes: its files, and the numbered directories in its checkpoints.

    The config goes last: after a kill in between, the rest is still a run, which can be removed.
    """
    for name in (*NONFINITE, WANDB):
        shutil.rmtree(workdir / name, ignore_errors=True)
    for path in (workdir / PROFILE).glob(TRACES):
        shutil.rmtree(path)
    for path in (workdir / PROFILE / TRACES).parents[:3]:  # and what they were in, unless it holds more
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
    checkpoints = workdir / CHECKPOINTS
    if checkpoints.is_dir():
        for path in (*checkpoints.glob("[0-9]*"), *checkpoints.glob("damaged-[0-9]*")):
            shutil.rmtree(path)
        if not any(checkpoints.iterdir()):
            checkpoints.rmdir()
    for pattern in (SUMMARY, METRICS, EVENTS, "*.part", WANDB_ID, DATA, CONFIG):
        for path in workdir.glob(pattern):
            path.unlink()
