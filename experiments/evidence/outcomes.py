"""What a trained network makes of every single test image."""

import functools
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres.checkpoints import RecordedRun
from mixedres.config import unflatten
from mixedres.train import losses, plan, start
from mixedres.train.experiment import Experiment

# In the directory of a run: 'top1' (images,) bool and 'loss' (images,) float32.
FILE = "outcomes.npz"


def outcomes(run: pathlib.Path) -> dict[str, np.ndarray]:
    """Whether each test image is classified rightly, and its cross-entropy, by the newest checkpoint of a finished run.

    In the precision of the run, on one device; computed once and kept in the run's directory.

    Returns:
      'top1' (images,) bool and 'loss' (images,) float32, in the order of the test images.
    """
    path = run / FILE
    if not path.exists():
        flat = dict(RecordedRun(run).config() or {})
        seedless = json.dumps(flat | {"seed": 0, "num_devices": 1, "batch_norm.sync": False})
        experiment, program = _program(seedless)
        variables = start.latest_start(experiment, run).state.eval_variables
        np.savez(path, **_evaluate(experiment, program, variables))
    with np.load(path) as found:
        return dict(found)


@functools.cache
def _program(flat: str) -> tuple[Experiment, Any]:
    """The experiment of a config, and its network compiled as (variables, images, labels) -> (top1, loss)."""
    experiment = plan(unflatten(json.loads(flat))).experiment
    apply_fn, normalize = experiment.precision.rewrite(experiment.model.apply), experiment.normalize_fn

    def program(variables: Any, images: jax.Array, labels: jax.Array) -> dict[str, jax.Array]:
        logits = apply_fn(variables, normalize(images), train=False).astype(jnp.float32)
        return {"top1": losses.in_top_k(logits, labels, 1), "loss": losses.cross_entropy(logits, labels)}

    return experiment, jax.jit(program)


def _evaluate(experiment: Experiment, program: Any, variables: Any) -> dict[str, np.ndarray]:
    parts: list[dict[str, np.ndarray]] = []
    for batch in experiment.source.eval_batches(256):
        found = jax.device_get(program(variables, batch["image"], batch["label"]))
        parts.append({name: values[batch["mask"]] for name, values in found.items()})
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
