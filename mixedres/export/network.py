"""A trained network as a program of `jax.export`, with its weights inside."""

import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from mixedres import models
from mixedres._internal.tree import leaf_path
from mixedres.export import files, saved_model
from mixedres.predict.classifier import Classifier

PLATFORMS = ("cpu", "cuda")


def as_function(chosen: Classifier) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """The network with its weights inside, as a function of images (b, *spec.shape) of spec.image_dtype.

    It returns 'probabilities' (b, classes) float32 and 'classes' (b,) int32. The kernels of a ResNet that are cast to a
    half dtype are stored in it; the values are the same.
    """
    model = chosen.model

    def stored(path: Any, leaf: np.ndarray) -> np.ndarray:
        *module, name = leaf_path(path).split("/")
        if name != "kernel" or not isinstance(model, models.ResNet):
            return leaf
        return leaf.astype(models.policy_at(module[1:], model.policy, model.keep_float32).compute_dtype)

    variables = jax.tree_util.tree_map_with_path(stored, chosen.variables)

    def run(images: jax.Array) -> dict[str, jax.Array]:
        probabilities = chosen.probabilities(variables, images)
        return {"probabilities": probabilities, "classes": jnp.argmax(probabilities, axis=-1).astype(jnp.int32)}

    return run


def exported(chosen: Classifier) -> jax.export.Exported:
    """`as_function` exported for any number of images and all `PLATFORMS`."""
    (count,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((count, *chosen.spec.shape), chosen.spec.image_dtype)
    return jax.export.export(jax.jit(as_function(chosen)), platforms=PLATFORMS)(images)


def write(
    folder: pathlib.Path,
    artifact: jax.export.Exported,
    chosen: Classifier,
    facts: dict[str, Any],
    *,
    for_tensorflow: bool,
) -> None:
    """Writes everything or nothing: a temporary folder is renamed at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as partial:
        made = pathlib.Path(partial) / "made"
        files.write(made, artifact.serialize(), chosen, facts, saved_model=for_tensorflow)
        if for_tensorflow:
            saved_model.write(made / "saved_model", artifact, chosen)
        if folder.exists():
            folder.rmdir()  # empty: `_parse` looked
        os.rename(made, folder)
