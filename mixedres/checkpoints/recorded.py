"""The config and the identity of the data that a run recorded in its directory.

Both are in files of their own and in the record of every checkpoint. The record is read if a file is damaged or gone.
This file is also a config file, ``--config=.../recorded.py:WORKDIR``; `mixedres.config.config_of_run` has its path.
"""

import os
import pathlib
import re

from ml_collections import ConfigDict

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import checksums_hold, parse_json, read_json
from mixedres._internal.types import Json, Record
from mixedres.config import unflatten

# Names in the directory of a run.
CONFIG, DATA, CHECKPOINTS = "config.json", "data.json", "checkpoints"
# Orbax' directory of the one item in a checkpoint, its name for a checkpoint that is being written, and its metadata.
ITEM, PARTIAL, _METADATA = "default", re.compile(r"\d+\.orbax-checkpoint-tmp.*"), "_METADATA"
# Keys that identify a config.json as a run's; other programs write files of this name too.
_MARKS = {"precision.name", "optimizer.decay_mask"}


def read_config(workdir: pathlib.Path) -> Record | None:
    """Returns the config of the run in `workdir`, flat; None if the directory holds no run of mixedres."""
    config = read_json(workdir / CONFIG)
    if not _is_config(config):
        config = _record_of_checkpoint(workdir).get("config")
    return config if _is_config(config) else None


def read_data_identity(workdir: pathlib.Path) -> Record | None:
    """Returns the identity of the data of the run in `workdir`; None if it is unknown."""
    data = read_json(workdir / DATA)
    if not _is_data(data):
        data = _record_of_checkpoint(workdir).get("data")
    return data if _is_data(data) else None


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    """Returns the steps of the checkpoints in `workdir`, whole or damaged, in order."""
    return sorted(int(path.name) for path in (workdir / CHECKPOINTS).glob("[0-9]*") if _is_step(path.name))


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 19


def _is_config(value: Json) -> bool:
    return isinstance(value, dict) and value.keys() >= _MARKS


def _is_data(value: Json) -> bool:
    return isinstance(value, dict) and isinstance(value.get("class_names"), list)


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


def get_config(workdir: str) -> ConfigDict:
    """Returns the config of the run in `workdir`.

    Raises:
      ConfigError: if no config can be read.
    """
    config = read_config(pathlib.Path(os.path.expanduser(workdir)))
    if config is None:
        raise ConfigError(f"--workdir={workdir} holds no run whose config can be read; name the workdir of a run")
    return unflatten(config)
