"""Metrics at Weights & Biases."""

from __future__ import annotations

import pathlib
import uuid
from collections.abc import Mapping
from typing import Any

from mixedres._internal.errors import TrainingError, one_line
from mixedres._internal.files import read_json, without_nan, write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Json
from mixedres.checkpoints import workdir
from mixedres.trackers import curves


def start(directory: pathlib.Path, config: Mapping[str, Json], first_step: int) -> WeightsAndBiases | None:
    """Returns the tracker of a run; None if the run has no project."""
    return WeightsAndBiases(directory, config) if config["wandb"] else None


class WeightsAndBiases:
    """A run at Weights & Biases (needs the extra ``wandb``), in the project of the key ``wandb``."""

    def __init__(self, directory: pathlib.Path, config: Mapping[str, Json]):
        """Starts or continues the run of `directory`, offline if the environment has WANDB_MODE=offline.

        Raises TrainingError if nobody is logged in, or the service cannot be reached.
        """
        import wandb

        try:
            self._run: Any = wandb.init(
                project=str(config["wandb"]),
                name=directory.name,
                id=_run_id(directory / workdir.WANDB_ID),
                resume="allow",
                reinit="create_new",
                dir=directory,
                config=without_nan(dict(config)),
                settings=wandb.Settings(console="off", x_disable_stats=True),
            )
        except Exception as error:  # wandb's own errors, and those of the libraries below it
            raise TrainingError(
                f"Weights & Biases does not take the run ({one_line(error)}); type 'wandb login', set "
                "WANDB_MODE=offline, or leave config.wandb out"
            ) from error
        # A crash can repeat steps, and wandb's own step count must grow. So our step is the axis of the curves.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, kind: str, values: Mapping[str, float | None]) -> None:
        """Sends the values of a step."""
        self._run.log({"step": step} | curves(kind, values))

    def close(self, failed: bool) -> None:
        """Ends the run there."""
        self._run.finish(exit_code=int(failed))  # which may take a while


def _run_id(path: pathlib.Path) -> str:
    """Returns the id of the run in the project, saved in `path`."""
    known = read_json(path)
    if isinstance(known, dict) and "id" in known:
        return str(known["id"])
    new = uuid.uuid4().hex[:12]
    write_json(path, stamped({"id": new}))
    return new
