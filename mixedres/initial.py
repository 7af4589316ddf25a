"""The weights that a run starts from in place of random ones: of a file, or of another run."""

from __future__ import annotations

import dataclasses
import pathlib
from functools import partial
from typing import Any

import jax

from mixedres import models, trained, weights
from mixedres.config import ConfigError
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


def load(given: str, like: dict[str, Any], model: models.ResNet) -> Initial:
    """Reads what ``config.init_from`` names: a workdir, a file of weights or a folder that transformers saved.

    Args:
      given: the path.
      like: {'params', 'batch_stats'} of the network, as shapes.
      model: the network.

    Raises:
      ConfigError: where it cannot be read, or is of another network; the text lists what does not fit.
    """
    path = pathlib.Path(given).expanduser()
    try:
        file = trained.read(path)
        variables, has_head = weights.from_tensors(file.tensors, like, file.layout)
    except weights.MismatchError as error:
        raise ConfigError(
            f"config.init_from={given} is {trained.told(file)}, not the network of this config: {error}"
        ) from None
    except (weights.WeightsError, ValueError) as error:
        raise ConfigError(f"config.init_from: {error}") from None
    if file.version is not None and file.version != model.version:
        raise ConfigError(
            f"config.init_from={given} is of a ResNet of version {file.version}, which has weights of the same shapes; "
            f"set config.model.version={file.version}"
        )
    note = f"weights: {file.path} ({trained.told(file)})"
    if not has_head:
        there = weights.architecture(file.tensors, file.layout)
        note += f"; the head is new: {model.num_classes} classes instead of {there.num_classes if there else 'others'}"
    return Initial(variables, note)
