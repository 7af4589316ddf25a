"""The command line that writes weights for other libraries."""

from __future__ import annotations

import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from mixedres import arguments, trained, weights
from mixedres.config import ConfigError
from mixedres.files import write_json

DESCRIPTION = """\
Writes the weights of a run, or of a file, in the layout of another library.

  python -m mixedres.convert --from=runs/imagenet-fp16 --to=resnet50.safetensors
  python -m mixedres.convert --from=runs/imagenet-fp16 --to=resnet50 --layout=transformers

--to=FILE.safetensors is a file; torchvision's layout is timm's too:
  timm.create_model("resnet50", checkpoint_path=FILE), or load_state_dict(safetensors.torch.load_file(FILE))
--to=DIR is a folder for ResNetForImageClassification.from_pretrained, with its config.json.
"""
# What transformers calls the parts of a ResNet (ResNetConfig, transformers 5.23).
_WIDTHS = {True: [256, 512, 1024, 2048], False: [64, 128, 256, 512]}


def convert(given: Sequence[str]) -> None:
    """Runs the command with these arguments.

    Raises:
      ConfigError: for a mistake in them; nothing has been written then.
    """
    parser = arguments.Parser("mixedres.convert", DESCRIPTION)
    parser.add_argument("--from", dest="source", required=True, help="a workdir, .safetensors, .pth or a folder")
    parser.add_argument("--to", required=True, type=pathlib.Path, help="FILE.safetensors, or a folder to make")
    parser.add_argument("--layout", choices=weights.LAYOUTS, help="default torchvision; transformers for a folder")
    options = parser.parse_args(given)
    is_file = options.to.suffix == ".safetensors"
    layout = options.layout or ("torchvision" if is_file else "transformers")
    if not is_file and layout != "transformers":
        raise ConfigError(f"--to={options.to} is a folder, which is for transformers; write --to=FILE.safetensors")
    if options.to.exists():
        raise ConfigError(f"--to={options.to} is there already; name another")
    path = pathlib.Path(options.source).expanduser()
    try:
        file = trained.read(path)
        tensors = converted(file, layout)
        if is_file:
            weights.write(options.to, tensors)
        else:
            config = _transformers_config(file)
            options.to.mkdir(parents=True)
            weights.write(options.to / "model.safetensors", tensors)
            write_json(options.to / "config.json", config)
    except (weights.WeightsError, ValueError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"--to={options.to} cannot be written ({error.strerror}); name another") from None
    print(f"{len(tensors)} tensors, layout {layout}: {options.to}")


def converted(file: weights.WeightsFile, layout: str) -> dict[str, Any]:
    """The tensors of a file in another layout; the same ones in its own.

    Raises:
      ValueError: where the layout does not have such a network.
    """
    if file.layout == layout:
        return file.tensors
    return weights.to_tensors(trained.variables(file), layout, file.batches)


def _transformers_config(file: weights.WeightsFile) -> dict[str, Any]:
    """The config.json of transformers for these weights."""
    found, name = weights.architecture(file.tensors, file.layout), trained.name(file)
    if found is None or name is None or name.startswith("cifar_"):
        raise ValueError(f"transformers has no network such as {file.path}; write --to=FILE.safetensors")
    names = file.class_names or tuple(f"LABEL_{index}" for index in range(found.num_classes))
    return {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "num_channels": 3,
        "embedding_size": 64,
        "hidden_sizes": _WIDTHS[found.bottleneck],
        "depths": list(found.stage_sizes),
        "layer_type": "bottleneck" if found.bottleneck else "basic",
        "hidden_act": "relu",
        "downsample_in_first_stage": False,
        "downsample_in_bottleneck": file.version == "1",
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status."""
    return arguments.run("mixedres.convert", convert, argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv))
