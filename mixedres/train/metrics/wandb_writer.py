"""Metrics to Weights & Biases (needs the extra ``wandb``)."""

import contextlib
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Self

from mixedres._internal.cli import console
from mixedres._internal.errors import TrainingError, one_line
from mixedres._internal.files import read_json, without_nan, write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Json
from mixedres.checkpoints import workdir
from mixedres.train.distributed import SingleProcess
from mixedres.train.experiment import Experiment


def tracker(
    experiment: Experiment, directory: pathlib.Path, group: SingleProcess
) -> contextlib.AbstractContextManager["WandbWriter | None"]:
    """Returns the writer of the run at Weights & Biases; None without ``config.wandb`` and in all processes but 0."""
    if group.is_primary and experiment.config.wandb:
        return WandbWriter(experiment.config.wandb, directory, experiment.resolved)
    return contextlib.nullcontext()


class WandbWriter:
    """A run at Weights & Biases, as a context; an exception that leaves the context marks the run as failed.

    After an error of the service the training goes on: a warning is printed, and no more metrics are sent.
    """

    def __init__(self, project: str, directory: pathlib.Path, config: Mapping[str, Json]):
        """Starts or continues the run of `directory`, offline if the environment has WANDB_MODE=offline.

        The run has the name of the directory, which gets ``wandb.json`` and ``wandb/``. The flat `config` is shown
        beside the metrics. Raises TrainingError if nobody is logged in, or the service cannot be reached.
        """
        import wandb

        try:
            self._run: Any = wandb.init(
                project=project,
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

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sends {'train/loss': ...} after `step` steps."""
        if self._run is not None:
            self._attempt(lambda: self._run.log({"step": step} | dict(values)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Sends the remaining metrics, which may take a while."""
        if self._run is not None:
            self._attempt(lambda: self._run.finish(exit_code=0 if kind is None else 1))
        self._run = None

    def _attempt(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            console.say(f"warning: Weights & Biases takes no metrics any more ({one_line(error)})")


def _run_id(path: pathlib.Path) -> str:
    """Returns the id of the run in the project, saved in `path`."""
    known = read_json(path)
    if isinstance(known, dict) and "id" in known:
        return str(known["id"])
    new = uuid.uuid4().hex[:12]
    write_json(path, stamped({"id": new}))
    return new
