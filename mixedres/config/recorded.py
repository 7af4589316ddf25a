"""What a run recorded of itself in its directory, and a config file that takes the directory after the colon.

Config and data stand in files of their own, and in the record of every checkpoint, from which they come back where
those files are damaged or gone.
"""

import os
import pathlib
import re
from typing import Any

from ml_collections import ConfigDict

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import checksums_hold, parse_json, read_json
from mixedres.config import unflatten

FILE, DATA, CHECKPOINTS = "config.json", "data.json", "checkpoints"
# Orbax' names: the directory of the item of a checkpoint, a checkpoint that is being written, and the metadata file.
ITEM, PARTIAL, _METADATA = "default", re.compile(r"\d+\.orbax-checkpoint-tmp.*"), "_METADATA"
# Keys that identify a config.json as ours; the file name alone does not.
_MARKS = {"precision.name", "optimizer.decay_mask"}


def read(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The config of the run in `workdir`, flat; None where it holds no run of mixedres."""
    found = read_json(workdir / FILE)
    if not _is_config(found):
        found = _of_checkpoint(workdir).get("config")
    return found if _is_config(found) else None


def read_data(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The identity of the data of the run in `workdir`; None where it is not known."""
    found = read_json(workdir / DATA)
    if not _is_data(found):
        found = _of_checkpoint(workdir).get("data")
    return found if _is_data(found) else None


def steps(workdir: pathlib.Path) -> list[int]:
    """The steps of the checkpoints in `workdir`, whole or not, in order."""
    return sorted(int(path.name) for path in (workdir / CHECKPOINTS).glob("[0-9]*") if _is_step(path.name))


def _is_step(name: str) -> bool:
    return name.isascii() and name.isdecimal() and len(name) < 19


def _is_config(found: Any) -> bool:
    return isinstance(found, dict) and found.keys() >= _MARKS


def _is_data(found: Any) -> bool:
    return isinstance(found, dict) and isinstance(found.get("class_names"), list)


def _of_checkpoint(workdir: pathlib.Path) -> dict[str, Any]:
    """The record of the newest whole checkpoint; {} without one."""
    for step in reversed(steps(workdir)):
        item = workdir / CHECKPOINTS / str(step) / ITEM
        if checksums_hold(item):
            try:
                record = parse_json(read_json(item / _METADATA)["custom_metadata"]["record"])
                return record if isinstance(record, dict) else {}
            except (TypeError, KeyError, ValueError):
                return {}
    return {}


def get_config(workdir: str) -> ConfigDict:
    """The config of the run in `workdir`.

    Raises:
      ConfigError: where there is none that can be read.
    """
    found = read(pathlib.Path(os.path.expanduser(workdir)))
    if found is None:
        raise ConfigError(f"--workdir={workdir} holds no run whose config can be read; name the workdir of a run")
    return unflatten(found)
