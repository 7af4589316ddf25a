"""The config and the identity of the data that a run recorded in its directory.

Both are in files of their own and in the record of every checkpoint. The record is read if a file is damaged or gone.
What a run recorded is data: `get_config` takes no key from it that acts on this machine. This file is also a config
file, ``--config=.../recorded.py:WORKDIR``; `mixedres.config.config_of_run` has its path.
"""

import os
import pathlib
import re
import shlex

from ml_collections import ConfigDict

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import checksums_hold, parse_json, read_json
from mixedres._internal.formats import without_stamp
from mixedres._internal.types import Json, Record
from mixedres.checkpoints.documents import DataIdentity, check, read_flat
from mixedres.config import KEYS, flatten, unflatten

# Names in the directory of a run.
CONFIG, DATA, CHECKPOINTS = "config.json", "data.json", "checkpoints"
# Orbax' directory of the one item in a checkpoint, its name for a checkpoint that is being written, and its metadata.
ITEM, PARTIAL, _METADATA = "default", re.compile(r"\d+\.orbax-checkpoint-tmp.*"), "_METADATA"
# Keys that identify a config.json as a run's; other programs write files of this name too.
_MARKS = {"precision.name", "optimizer.decay_mask"}


def holds_config(workdir: pathlib.Path) -> bool:
    """Returns whether the directory holds the config of a run of mixedres, valid or not."""
    return _recorded_config(workdir) is not None


def read_config(workdir: pathlib.Path) -> Record | None:
    """Returns the config of the run in `workdir`, flat, with all of today's keys; None if the directory holds no run.

    Raises:
      ConfigError: if a newer version of mixedres wrote the config, or a value is invalid.
    """
    found = _recorded_config(workdir)
    return None if found is None else read_flat(found, workdir / CONFIG)


def read_data_identity(workdir: pathlib.Path) -> Record | None:
    """Returns the identity of the data of the run in `workdir`; None if it is unknown.

    Raises:
      ConfigError: if a newer version of mixedres wrote the file, or a part of it is invalid.
    """
    data = read_json(workdir / DATA)
    if not _is_data(data):
        data = _record_of_checkpoint(workdir).get("data")
    if not _is_data(data):
        return None
    return without_stamp(check(data, DataIdentity, workdir / DATA))


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in `workdir`, whole or damaged, in order."""
    return sorted(int(path.name) for path in (workdir / CHECKPOINTS).glob("[0-9]*") if _is_step(path.name))


def named_step(workdir: pathlib.Path, name: str) -> int:
    """Returns the step of a checkpoint of the run in `workdir`: `name` is 'best' or a number.

    Raises:
      ConfigError: if there is no such checkpoint.
    """
    steps = checkpoint_steps(workdir)
    step = int(name) if name != "best" else (_record_of_checkpoint(workdir).get("best") or {}).get("step")
    if step in steps:
        return int(step)
    there = f"it has {', '.join(map(str, steps))}" if steps else "it has none"
    what = "no evaluation yet that was the best" if step is None else f"no checkpoint of step {step}"
    raise ConfigError(f"{workdir} has {what}; {there}. Write {workdir} for the newest")


def left_to_command_line(workdir: pathlib.Path, config: ConfigDict) -> list[str]:
    """Returns a note about the settings of the data that `get_config` did not take, and that `config` does not set."""
    recorded, now = read_config(workdir) or {}, flatten(config)
    left = [key.path for key in KEYS if not key.is_portable and key.path.startswith("data.")]
    flags = [
        f"--config.{path}={shlex.quote(str(recorded[path]))}"
        for path in left
        if now[path] is None and recorded.get(path)
    ]
    if not flags:
        return []
    return [
        f"note: settings of this machine are not taken from {workdir / CONFIG}; if you trust them: {' '.join(flags)}"
    ]


def get_config(workdir: str) -> ConfigDict:
    """Returns the config of the run in `workdir`, in which keys that act on this machine have their defaults.

    Raises:
      ConfigError: if no config can be read.
    """
    config = read_config(pathlib.Path(os.path.expanduser(workdir)))
    if config is None:
        raise ConfigError(f"--workdir={workdir} holds no run whose config can be read; name the workdir of a run")
    return unflatten(portable(config))


def portable(config: Record) -> Record:
    """Returns a recorded flat config without the keys that act on the machine that reads it."""
    kept = {key.path for key in KEYS if key.is_portable}
    return {path: value for path, value in config.items() if path in kept}


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 19


def _is_config(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() >= _MARKS


def _is_data(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("class_names"), list)


def _recorded_config(workdir: pathlib.Path) -> Record | None:
    """Returns the config as it was recorded; None if the directory holds no run of mixedres."""
    config = read_json(workdir / CONFIG)
    if not _is_config(config):
        config = _record_of_checkpoint(workdir).get("config")
    return config if _is_config(config) else None


def _record_of_checkpoint(workdir: pathlib.Path) -> Record:
    """Returns the record of the newest whole checkpoint; {} without such a checkpoint."""
    for step in reversed(checkpoint_steps(workdir)):
        item = workdir / CHECKPOINTS / str(step) / ITEM
        if checksums_hold(item):
            try:
                record = parse_json(read_json(item / _METADATA)["custom_metadata"]["record"])
                return record if isinstance(record, dict) else {}
            except (TypeError, KeyError, ValueError):
                return {}
    return {}
