"""The directory of a run: what belongs to it, and whether a new start may continue in it."""

from __future__ import annotations

import json
import math
import os
import pathlib
import shutil
from typing import Any

from ml_collections import ConfigDict

from mixedres.config import ConfigError, flatten

CONFIG, METRICS, SUMMARY, CHECKPOINTS, EVENTS = (
    "config.json",
    "metrics.jsonl",
    "summary.json",
    "checkpoints",
    "events.out.tfevents.*",
)


def prepare(workdir: pathlib.Path, config: ConfigDict, *, clean: bool) -> None:
    """Makes `workdir` the directory of a run with `config`: a new one, or the continuation of the one in it.

    Args:
      workdir: an absolute path.
      config: of this start.
      clean: remove an earlier run first. Only what a run writes is removed; a directory with files of its own and no
        run in it is refused.

    Raises:
      ConfigError: where the directory cannot be written, holds something else, or holds a run of another config. Then
        nothing has been written or removed.
    """
    try:
        _check_writable(workdir)
        if clean:
            _remove_run(workdir)
        elif (workdir / CONFIG).exists():
            check_same(workdir, config)
            return
        elif workdir.exists() and any(workdir.iterdir()):
            raise ConfigError(
                f"--workdir={workdir} holds files but no run of mixedres; name an empty or a new directory"
            )
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / CONFIG, flatten(config))
    except OSError as error:
        raise ConfigError(
            f"--workdir={workdir} cannot be written ({error.strerror}); name another with --workdir=DIR"
        ) from error


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` so that the file is either the old or the whole new one, whatever happens.

    JSON has no NaN and no infinity: a number that is not finite becomes null.
    """
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps(_without_nan(value), indent=2, allow_nan=False) + "\n")
    os.replace(partial, path)


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_writable(workdir: pathlib.Path) -> None:
    existing = workdir
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise NotADirectoryError(20, "not a directory", str(existing))
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PermissionError(13, "no write permission", str(existing))


def check_same(workdir: pathlib.Path, config: ConfigDict) -> None:
    """Raises `ConfigError` unless `workdir` holds a run with this config; the error lists the differing keys."""
    try:
        old = json.loads((workdir / CONFIG).read_text())
    except OSError:
        raise ConfigError(f"--workdir={workdir} holds no run of mixedres; train one there first") from None
    except ValueError:
        raise ConfigError(
            f"{workdir / CONFIG} is not readable as JSON; start over with --clean or name another --workdir"
        ) from None
    new = json.loads(json.dumps(flatten(config)))
    differing = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
    if differing:
        listed = "; ".join(f"{key}: {old.get(key)!r} there, {new.get(key)!r} now" for key in differing[:5])
        more = f"; and {len(differing) - 5} more" if len(differing) > 5 else ""
        raise ConfigError(
            f"--workdir={workdir} holds a run with a different config ({listed}{more}); "
            "name another --workdir, or start over with --clean"
        )


def _remove_run(workdir: pathlib.Path) -> None:
    if not workdir.exists() or not any(workdir.iterdir()):
        return
    if not (workdir / CONFIG).exists():
        raise ConfigError(
            f"--clean: --workdir={workdir} holds no run of mixedres, so nothing was removed; "
            "name an empty or a new directory"
        )
    shutil.rmtree(workdir / CHECKPOINTS, ignore_errors=True)
    for pattern in (SUMMARY, METRICS, EVENTS, CONFIG):
        for path in workdir.glob(pattern):
            path.unlink()
