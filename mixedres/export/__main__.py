"""The command that writes a trained network as one file that needs jax alone to run."""

import argparse
import datetime
import importlib.util
from collections.abc import Sequence

from mixedres._internal import command_line, console, process
from mixedres._internal.errors import ConfigError
from mixedres.predict.arguments import add_arguments

DESCRIPTION = """\
Writes a trained network as one file that runs with nothing but jax: weights and normalization are inside, images
from 0 to 255 go in, probabilities and classes come out.

  python -m mixedres.export --from=runs/imagenet-fp16 --to=exported
  python -m mixedres.export --from=resnet50.safetensors --labels=labels.txt --precision=bf16 --to=exported

--to=DIR gets model.jax (StableHLO of jax.export, for any number of images, on CPUs and CUDA GPUs), load.py (ten lines
that run it), labels.json, model.json and README.md; with --saved_model also saved_model/ for TensorFlow.
"""
PRECISIONS = ("fp32", "bf16", "fp16")


def export(given: Sequence[str]) -> None:
    """Runs the command with these arguments.

    Raises:
      ConfigError: for a mistake in them; nothing has been written then.
    """
    options = _parse(given)
    # Imported here so that --help and a mistake in the command need not wait for JAX.
    from mixedres import models
    from mixedres._internal.environment import versions
    from mixedres.export import files
    from mixedres.export.network import PLATFORMS, exported, write
    from mixedres.predict.classifier import from_args

    chosen = from_args(options)
    for note in chosen.notes:
        console.complain(f"note: {note}")
    if chosen.precision.implementation != "casting":
        raise ConfigError(
            f"precision {chosen.precision.name} is not exported; add --precision={' or '.join(PRECISIONS)}"
        )
    console.say("tracing ...")
    artifact = exported(chosen)
    facts = {
        "network": chosen.name,
        "version": chosen.model.version if isinstance(chosen.model, models.ResNet) else None,
        "classes": len(chosen.class_names),
        "precision": chosen.precision.name,
        "keep_float32": chosen.precision.keep_float32,
        "input": chosen.spec.to_json(),
        "platforms": list(PLATFORMS),
        "source": options.source,
        "date": datetime.date.today().isoformat(),
        "versions": {name: found for name, found in versions().items() if name in ("mixedres", "jax", "jaxlib")},
    }
    process.raise_interrupts()
    try:
        write(options.to, artifact, chosen, facts, for_tensorflow=options.saved_model)
    except OSError as error:
        raise ConfigError(f"--to={options.to} cannot be written ({error.strerror or error}); name another") from None
    size = (options.to / files.MODEL).stat().st_size / 1e6
    console.show(
        f"{chosen.name}, {chosen.precision.name}, {len(chosen.class_names)} classes, {size:.1f} MB: {options.to}"
    )
    console.show(f"try it: python {options.to}/load.py")


def _parse(given: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("python -m mixedres.export", DESCRIPTION)
    add_arguments(parser)
    parser.add_argument("--to", required=True, type=command_line.path, help="a folder to make")
    parser.add_argument("--saved_model", action="store_true", help="for TensorFlow too; needs mixedres[tf]")
    options = parser.parse_args(given)
    options.to = options.to.absolute()
    if options.to.is_dir() and any(options.to.iterdir()):
        raise ConfigError(f"--to={options.to} is not empty; name another folder")
    if options.to.exists() and not options.to.is_dir():
        raise ConfigError(f"--to={options.to} is a file; name a folder")
    if options.precision not in (None, *PRECISIONS):
        raise ConfigError(f"--precision={options.precision} is not exported; use {' or '.join(PRECISIONS)}")
    if options.saved_model and importlib.util.find_spec("tensorflow") is None:
        raise ConfigError("--saved_model needs TensorFlow; pip install 'mixedres[tf]', or leave it out")
    return options


def main(argv: Sequence[str]) -> int:
    """Runs the command line, `argv[0]` being the program; returns the exit status."""
    return command_line.run("mixedres.export", export, argv[1:])


if __name__ == "__main__":
    process.start(main)
