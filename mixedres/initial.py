"""The weights that a run starts from in place of random ones: of a file, or of another run."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from functools import partial
from typing import Any

import jax

from mixedres import models, trained, weights, workdir
from mixedres.config import ConfigError
from mixedres.leaves import fingerprint
from mixedres.processes import Processes
from mixedres.setup import Setup
from mixedres.step import TrainState


@dataclasses.dataclass(frozen=True)
class Initial:
    """Weights for a network.

    Attributes:
      variables: {'params', 'batch_stats'}, numpy arrays in the network's dtypes; without 'head' where that one is for
        other classes.
      note: where they are from and what is not, for a person.
    """

    variables: dict[str, Any]
    note: str

    def into(self, state: TrainState, sharding: jax.sharding.Sharding) -> TrainState:
        """`state` with these weights, in its moving average too, placed as `sharding` says."""

        def replaced(old: dict[str, Any]) -> dict[str, Any]:
            # Anew for every use: the step donates its state, and no two leaves of it may be one array.
            new = jax.tree.map(partial(jax.make_array_from_process_local_data, sharding), self.variables)
            return {name: {**old[name], **new[name]} for name in ("params", "batch_stats")}

        ema = None if state.ema is None else replaced(state.ema)
        return dataclasses.replace(state, **replaced(state.variables), ema=ema)


def for_run(setup: Setup, directory: pathlib.Path, group: Processes, *, clean: bool) -> Initial | None:
    """What the run in `directory` starts from; None for random weights, and where it goes on from a checkpoint.

    Raises:
      ConfigError: as `load`, and in all processes where they do not find the same weights.
    """
    goes_on = workdir.contents(directory)["checkpoints"] and not clean
    given = setup.config.init_from
    initial = load(given, setup.variable_shapes, setup.model) if given and not goes_on else None
    group.agree("weights", {"fingerprint": initial and fingerprint(initial.variables)})
    return initial


def load(given: str, like: dict[str, Any], model: models.ResNet) -> Initial:
    """Reads what ``config.init_from`` names: a workdir, a file of weights or a folder that transformers saved.

    Args:
      given: the path.
      like: {'params', 'batch_stats'} of the network, as shapes.
      model: the network.

    Raises:
      ConfigError: where it cannot be read, or is of another network; the text lists what does not fit.
    """
    path = pathlib.Path(os.path.expanduser(given))
    try:
        file = trained.read(path)
        variables, has_head = weights.from_tensors(file.tensors, like, file.layout)
    except weights.MismatchError as error:
        raise ConfigError(
            f"config.init_from={given} is {trained.told(file)}, not the network of this config: {error}"
        ) from None
    except (weights.WeightsError, ValueError) as error:
        raise ConfigError(f"config.init_from: {error}") from None
    found = weights.architecture(file.tensors, file.layout)
    # Blocks of two convolutions are the same in versions 1 and 1.5.
    if found and found.bottleneck and file.version not in (None, model.version):
        raise ConfigError(
            f"config.init_from={given} is of a ResNet of version {file.version}, which has weights of the same shapes; "
            f"set config.model.version={file.version}"
        )
    note = f"weights: {file.path} ({trained.told(file)})" + (f"; {file.note}" if file.note else "")
    if not has_head:
        note += f"; the head is new: {model.num_classes} classes instead of {found.num_classes if found else 'others'}"
    return Initial(variables, note)
