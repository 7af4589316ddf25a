"""A trained network as a program of `jax.export`, with its weights inside."""

import os
import pathlib
import tempfile
from collections.abc import Callable

import jax
import jax.export
import jax.numpy as jnp

from mixedres._internal.types import Record
from mixedres.export.files import write_files
from mixedres.export.saved_model import write_saved_model
from mixedres.predict import Classifier

PLATFORMS = ("cpu", "cuda")


def as_function(classifier: Classifier) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """Returns the network with its weights inside, as a function of images (b, *spec.shape) of spec.image_dtype.

    The function returns 'probabilities' (b, classes) float32 and 'classes' (b,) int32. Batch norms are folded into
    convolutions, and kernels are stored in the dtype in which the network computes.
    """
    classifier = classifier.for_inference(fold=True)

    def run(images: jax.Array) -> dict[str, jax.Array]:
        probabilities = classifier.probabilities(classifier.variables, images)
        return {"probabilities": probabilities, "classes": jnp.argmax(probabilities, axis=-1).astype(jnp.int32)}

    return run


def trace_network(classifier: Classifier) -> jax.export.Exported:
    """Returns `as_function` exported for any number of images and all `PLATFORMS`."""
    (count,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((count, *classifier.spec.shape), classifier.spec.image_dtype)
    artifact: jax.export.Exported = jax.export.export(jax.jit(as_function(classifier)), platforms=PLATFORMS)(images)
    return artifact


def write_folder(
    folder: pathlib.Path,
    artifact: jax.export.Exported,
    classifier: Classifier,
    facts: Record,
    *,
    for_tensorflow: bool,
) -> None:
    """Writes all files or none: a temporary folder is renamed at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as partial:
        made = pathlib.Path(partial) / "made"
        write_files(made, bytes(artifact.serialize()), classifier, facts, saved_model=for_tensorflow)
        if for_tensorflow:
            write_saved_model(made / "saved_model", artifact, classifier)
        if folder.exists():
            folder.rmdir()
        os.rename(made, folder)
