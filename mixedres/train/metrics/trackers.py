"""Trackers that receive the metrics of a run beside its files: Weights & Biases, and those of `registry.TRACKERS`."""

import contextlib
import pathlib
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol, Self

from mixedres._internal import registry
from mixedres._internal.cli import console
from mixedres._internal.errors import TrainingError, one_line
from mixedres._internal.files import read_json, without_nan, write_json
from mixedres._internal.formats import stamped
from mixedres._internal.types import Json
from mixedres.checkpoints import workdir

Values = Mapping[str, float | None]


class Tracker(Protocol):
    """Receiver of metrics, which a function of `registry.TRACKERS` makes."""

    def write(self, step: int, kind: str, values: Values) -> None:
        """Takes {'loss': ...} of `kind` ('train', 'eval', 'resources' or 'numerics') after `step` steps."""

    def close(self, failed: bool) -> None:
        """Sends what remains; `failed`: an error ended the run."""


class Trackers(contextlib.AbstractContextManager["Trackers"]):
    """Trackers by name; an exception that leaves the context closes them as failed.

    After an error of a tracker the training goes on: a warning is printed, and the tracker gets no more metrics.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    @classmethod
    def of(cls, directory: pathlib.Path, config: Mapping[str, Json], *, writes: bool) -> Self:
        """Starts the trackers of the run in `directory`, with its flat config: wandb, and all registered ones.

        A process that does not write has none. Raises TrainingError if a tracker does not start.
        """
        makers: dict[str, Callable[..., Tracker]] = {"wandb": _Wandb} if config["wandb"] else {}
        started = {}
        for name, make in (makers | registry.TRACKERS).items() if writes else ():
            try:
                started[name] = make(directory, dict(config))
            except TrainingError:
                raise
            except Exception as error:
                raise TrainingError(f"the tracker {name} does not start: {type(error).__name__}: {error}") from error
        return cls(started)

    def write(self, step: int, kind: str, values: Values) -> None:
        """Writes to all trackers."""
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.write, step, kind, values)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for name, tracker in list(self._trackers.items()):
            self._attempt(name, tracker.close, kind is not None)

    def _attempt(self, name: str, action: Callable[..., None], *given: Any) -> None:
        try:
            action(*given)
        except Exception as error:
            del self._trackers[name]
            console.say(f"warning: {name} takes no metrics any more ({one_line(error)})")


def curves(kind: str, values: Values) -> dict[str, float]:
    """Returns {'train/loss': ...} of the values that make curves."""
    left_out = ("epoch", "examples")
    return {f"{kind}/{name}": value for name, value in values.items() if value is not None and name not in left_out}


class _Wandb:
    """A run at Weights & Biases (needs the extra ``wandb``), in the project of ``config.wandb``."""

    def __init__(self, directory: pathlib.Path, config: Mapping[str, Json]):
        """Starts or continues the run of `directory`, offline if the environment has WANDB_MODE=offline.

        The run has the name of the directory, which gets ``wandb.json`` and ``wandb/``. Raises TrainingError if nobody
        is logged in, or the service cannot be reached.
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

    def write(self, step: int, kind: str, values: Values) -> None:
        self._run.log({"step": step} | curves(kind, values))

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))  # which may take a while


def _run_id(path: pathlib.Path) -> str:
    """Returns the id of the run in the project, saved in `path`."""
    known = read_json(path)
    if isinstance(known, dict) and "id" in known:
        return str(known["id"])
    new = uuid.uuid4().hex[:12]
    write_json(path, stamped({"id": new}))
    return new
