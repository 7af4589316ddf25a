"""Metrics to Weights & Biases (needs the extra ``wandb``)."""

import importlib.util
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Self

from mixedres._internal import console
from mixedres._internal.errors import TrackingError
from mixedres._internal.files import read_json, without_nan, write_json
from mixedres.checkpoints import workdir


def is_installed() -> bool:
    """Whether the package wandb can be imported."""
    return importlib.util.find_spec("wandb") is not None


class WandbWriter:
    """A run at Weights & Biases, as a context; an exception that leaves the context marks it as failed.

    After an error of the service the training goes on: a warning is printed, and no more metrics are sent.
    """

    def __init__(self, project: str, directory: pathlib.Path, config: Mapping[str, Any]):
        """Starts or continues the run of `directory`, offline where the environment has WANDB_MODE=offline.

        Args:
          project: project of the run; the run has the name of the directory.
          directory: workdir; gets ``wandb.json`` and ``wandb/``.
          config: flat config, shown beside the metrics.

        Raises:
          TrackingError: if nobody is logged in, or the service cannot be reached.
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
            raise TrackingError(_first_line(error)) from error
        # Steps may be repeated after a crash, and wandb's own step count must grow: ours is an axis of the curves.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Sends {'train/loss': ...} after `step` steps."""
        if self._run is not None:
            self._attempt(lambda: self._run.log({"step": step} | dict(values)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """Sends the remaining metrics, which may take a while."""
        if self._run is not None:
            self._attempt(lambda: self._run.finish(exit_code=0 if kind is None else 1))
        self._run = None

    def _attempt(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except Exception as error:
            self._run = None
            console.say(f"warning: Weights & Biases takes no metrics any more ({_first_line(error)})")


def _run_id(path: pathlib.Path) -> str:
    """The id of the run in the project, saved in `path`."""
    known = read_json(path)
    if isinstance(known, dict) and "id" in known:
        return str(known["id"])
    new = uuid.uuid4().hex[:12]
    write_json(path, {"id": new})
    return new


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
