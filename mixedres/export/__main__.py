"""The command that writes a trained network for other programs: as a file that needs jax alone, or as weights."""

import argparse
import datetime
import importlib.util
from collections.abc import Sequence

from mixedres._internal.cli import command_line, console, process, signals
from mixedres._internal.errors import ConfigError, reason
from mixedres._internal.names import LAYOUTS
from mixedres.export.weights import ENDINGS, write_converted
from mixedres.predict import add_arguments

DESCRIPTION = """\
Writes a trained network for other programs.

  python -m mixedres.export --from=runs/imagenet-fp16 --to=exported
  python -m mixedres.export --from=resnet50.safetensors --labels=labels.txt --precision=bf16 --to=exported
  python -m mixedres.export --from=runs/imagenet-fp16 --to=resnet50.safetensors
  python -m mixedres.export --from=runs/imagenet-fp16 --to=resnet50 --layout=transformers

--to=DIR gets a network that runs with nothing but jax; weights and normalization are inside, images from 0 to 255 go
in, probabilities and classes come out: model.jax (StableHLO of jax.export, for any number of images, on CPUs and CUDA
GPUs), load.py (which runs it), labels.json, model.json and README.md; with --saved_model also saved_model/ for
TensorFlow.
--to=FILE.safetensors gets the weights alone, in the layout of torchvision, which is timm's too:
timm.create_model("resnet50", checkpoint_path=FILE), or load_state_dict(safetensors.torch.load_file(FILE)).
--to=DIR --layout=transformers gets a folder for ResNetForImageClassification.from_pretrained.
"""
PRECISIONS = ("fp32", "bf16", "fp16")


def export_network(arguments: Sequence[str]) -> None:
    """Runs the command with these arguments."""
    options = _parse(arguments)
    if options.layout or options.to.suffix in ENDINGS:
        write_converted(options)
        return
    _check(options)
    # Imported here so that --help and a mistake in the command need not wait for JAX.
    from mixedres import models
    from mixedres._internal.environment import versions
    from mixedres.export.files import MODEL
    from mixedres.export.network import PLATFORMS, trace_network, write_folder
    from mixedres.predict import read_classifier

    classifier = read_classifier(options)
    for note in classifier.notes:
        console.complain(f"note: {note}")
    if classifier.precision.implementation != "casting":
        raise ConfigError(
            f"precision {classifier.precision.name} is not exported; add --precision={' or '.join(PRECISIONS)}"
        )
    console.say("tracing ...")
    artifact = trace_network(classifier)
    facts = {
        "network": classifier.name,
        "version": classifier.model.version if isinstance(classifier.model, models.ResNet) else None,
        "classes": len(classifier.class_names),
        "precision": classifier.precision.name,
        "keep_float32": classifier.precision.keep_float32,
        "input": classifier.spec.to_json(),
        "platforms": list(PLATFORMS),
        "source": options.source,
        "date": datetime.date.today().isoformat(),
        "versions": {name: version for name, version in versions().items() if name in ("mixedres", "jax", "jaxlib")},
    }
    signals.raise_interrupts()
    try:
        write_folder(options.to, artifact, classifier, facts, for_tensorflow=options.saved_model)
    except OSError as error:
        raise ConfigError(f"--to={options.to} cannot be written ({reason(error)}); name another") from None
    size = (options.to / MODEL).stat().st_size / 1e6
    classes = len(classifier.class_names)
    console.show(f"{classifier.name}, {classifier.precision.name}, {classes} classes, {size:.1f} MB: {options.to}")
    console.show(f"try it: python {options.to}/load.py IMAGE")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command_line.Parser("python -m mixedres.export", DESCRIPTION)
    add_arguments(parser)
    parser.add_argument("--to", required=True, type=command_line.path, help="a folder to make, or FILE.safetensors")
    parser.add_argument("--layout", choices=LAYOUTS, help="write weights: names of tensors (default torchvision)")
    parser.add_argument("--saved_model", action="store_true", help="for TensorFlow too; needs the package tensorflow")
    return parser.parse_args(arguments)


def _check(options: argparse.Namespace) -> None:
    """Raises ConfigError for a mistake in the options of a network that runs with jax alone."""
    options.to = options.to.absolute()
    if options.to.is_dir() and any(options.to.iterdir()):
        raise ConfigError(f"--to={options.to} is not empty; name another folder")
    if options.to.exists() and not options.to.is_dir():
        raise ConfigError(f"--to={options.to} is a file; name a folder")
    if options.precision not in (None, *PRECISIONS):
        raise ConfigError(f"--precision={options.precision} is not exported; use {' or '.join(PRECISIONS)}")
    if options.saved_model and importlib.util.find_spec("tensorflow") is None:
        raise ConfigError(
            f"--saved_model needs TensorFlow; leave it out, or {command_line.how_to_install('tensorflow')}"
        )


def main(argv: Sequence[str]) -> int:
    """Runs the command line, of which `argv[0]` is the program; returns the exit status."""
    return command_line.run("mixedres.export", export_network, argv[1:])


if __name__ == "__main__":
    process.start(main)
