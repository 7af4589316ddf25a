"""The command line that takes a trained network away: one file that needs jax alone to run."""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from mixedres import arguments, exported_files, models, network, saved_model
from mixedres.config import ConfigError
from mixedres.network import Network
from mixedres.summary import versions

DESCRIPTION = """\
Writes a trained network as one file that runs with nothing but jax: weights and normalisation are inside, uint8 images
go in, probabilities and classes come out.

  python -m mixedres.export --from=runs/imagenet-fp16 --to=exported
  python -m mixedres.export --from=resnet50.safetensors --labels=labels.txt --precision=bf16 --to=exported

--to=DIR gets model.jax (StableHLO of jax.export, for any number of images, on CPUs and CUDA GPUs), load.py (ten lines
that run it), labels.json, model.json and README.md; with --saved_model also saved_model/ for TensorFlow.
"""
PRECISIONS = ("fp32", "bf16", "fp16")
PLATFORMS = ("cpu", "cuda")


def export(given: Sequence[str]) -> None:
    """Runs the command with these arguments.

    Raises:
      ConfigError: for a mistake in them; nothing has been written then.
    """
    options = _parse(given)
    chosen = network.from_options(options)
    for note in chosen.notes:
        print(f"note: {note}", file=sys.stderr)
    if chosen.precision.implementation != "casting":
        raise ConfigError(
            f"precision {chosen.precision.name} is not exported; add --precision={' or '.join(PRECISIONS)}"
        )
    print("tracing ...", flush=True)
    artifact = exported(chosen)
    facts = {
        "network": chosen.name,
        "version": chosen.model.version,
        "classes": len(chosen.class_names),
        "precision": chosen.precision.name,
        "keep_float32": chosen.precision.keep_float32,
        "input": chosen.spec.to_json(),
        "platforms": list(PLATFORMS),
        "source": options.source,
        "date": datetime.date.today().isoformat(),
        "versions": {name: found for name, found in versions().items() if name in ("mixedres", "jax", "jaxlib")},
    }
    try:
        _write(options.to, artifact, chosen, facts, for_tensorflow=options.saved_model)
    except OSError as error:
        raise ConfigError(f"--to={options.to} cannot be written ({error.strerror or error}); name another") from None
    size = (options.to / exported_files.MODEL).stat().st_size / 1e6
    print(f"{chosen.name}, {chosen.precision.name}, {len(chosen.class_names)} classes, {size:.1f} MB: {options.to}")
    print(f"try it: python {options.to}/load.py")


def _write(
    folder: pathlib.Path, artifact: jax.export.Exported, chosen: Network, facts: dict[str, Any], *, for_tensorflow: bool
) -> None:
    """Everything, or nothing: a folder beside it gets its name at the end."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as partial:
        made = pathlib.Path(partial) / "made"
        exported_files.write(made, artifact.serialize(), chosen, facts, saved_model=for_tensorflow)
        if for_tensorflow:
            saved_model.write(made / "saved_model", artifact, chosen)
        if folder.exists():
            folder.rmdir()  # empty: `_parse` looked
        os.rename(made, folder)


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = arguments.Parser("mixedres.export", DESCRIPTION)
    network.add_arguments(parser)
    parser.add_argument("--to", required=True, type=arguments.path, help="a folder to make")
    parser.add_argument("--saved_model", action="store_true", help="for TensorFlow too; needs mixedres[tf]")
    options = parser.parse_args(given)
    options.to = options.to.absolute()
    if options.to.is_dir() and any(options.to.iterdir()):
        raise ConfigError(f"--to={options.to} is not empty; name another folder")
    if options.to.exists() and not options.to.is_dir():
        raise ConfigError(f"--to={options.to} is a file; name a folder")
    if options.precision not in (None, *PRECISIONS):
        raise ConfigError(f"--precision={options.precision} is not exported; use {' or '.join(PRECISIONS)}")
    if options.saved_model and not saved_model.is_installed():
        raise ConfigError("--saved_model needs TensorFlow; pip install 'mixedres[tf]', or leave it out")
    return options


def classifier(chosen: Network) -> Callable[[jax.Array], dict[str, jax.Array]]:
    """The network with its weights inside, as a function of uint8 images (b, *spec.shape).

    It returns 'probabilities' (b, classes) float32 and 'classes' (b,) int32. Weights that it computes with in a half
    dtype are stored in that one; the values are the same.
    """
    model = chosen.model

    def stored(path: Any, leaf: np.ndarray) -> np.ndarray:
        *module, name = (key.key for key in path)
        if name != "kernel":
            return leaf
        return leaf.astype(models.policy_at(module[1:], model.policy, model.keep_float32).compute_dtype)

    variables = jax.tree_util.tree_map_with_path(stored, chosen.variables)

    def run(images: jax.Array) -> dict[str, jax.Array]:
        probabilities = chosen.probabilities(variables, images)
        return {"probabilities": probabilities, "classes": jnp.argmax(probabilities, axis=-1).astype(jnp.int32)}

    return run


def exported(chosen: Network) -> jax.export.Exported:
    """`classifier` as jax.export has it, for any number of images and all `PLATFORMS`."""
    (count,) = jax.export.symbolic_shape("b")
    images = jax.ShapeDtypeStruct((count, *chosen.spec.shape), jnp.uint8)
    return jax.export.export(jax.jit(classifier(chosen)), platforms=PLATFORMS)(images)


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return arguments.run("mixedres.export", export, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
