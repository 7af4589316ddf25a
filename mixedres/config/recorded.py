"""The config that a run recorded in its directory, and a config file that takes the directory after the colon."""

import pathlib
from typing import Any

from ml_collections import ConfigDict

from mixedres._internal.errors import ConfigError
from mixedres._internal.files import read_json
from mixedres.config import unflatten

FILE = "config.json"
# Keys that identify a config.json as ours; the file name alone does not.
_MARKS = {"precision.name", "optimizer.decay_mask"}


def read(workdir: pathlib.Path) -> dict[str, Any] | None:
    """The config of the run in `workdir`, flat; None where it holds no run of mixedres."""
    found = read_json(workdir / FILE)
    return found if isinstance(found, dict) and found.keys() >= _MARKS else None


def get_config(workdir: str) -> ConfigDict:
    """The config of the run in `workdir`.

    Raises:
      ConfigError: where there is none that can be read.
    """
    found = read(pathlib.Path(workdir).expanduser())
    if found is None:
        raise ConfigError(f"--workdir={workdir} holds no run whose config can be read; name the workdir of a run")
    return unflatten(found)
