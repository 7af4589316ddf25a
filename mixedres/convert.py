"""The command line that writes weights for other libraries."""

from __future__ import annotations

import pathlib
import shutil
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
    parser.add_argument("--to", required=True, type=_path, help="FILE.safetensors, or a folder to make")
    parser.add_argument("--layout", choices=weights.LAYOUTS, help="default torchvision; transformers for a folder")
    options = parser.parse_args(given)
    is_file = options.to.suffix == ".safetensors"
    layout = options.layout or ("torchvision" if is_file else "transformers")
    if not is_file and layout != "transformers":
        raise ConfigError(f"--to={options.to} is a folder, which is for transformers; write --to=FILE.safetensors")
    if options.to.exists():
        raise ConfigError(f"--to={options.to} is there already; name another")
    try:
        file = trained.read(_path(options.source))
        tensors = converted(file, layout)
        if is_file:
            weights.write(options.to, tensors, file.version)
        else:
            _write_folder(options.to, tensors, _transformers_config(file))
    except (weights.WeightsError, ValueError) as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"--to={options.to} cannot be written ({error.strerror}); name another") from None
    print(f"{len(tensors)} tensors, layout {layout}: {options.to}")
    found = weights.architecture(tensors, layout)
    if layout == "torchvision" and file.version == "1" and found and found.bottleneck:
        print(
            "warning: these are of version 1, and torchvision's and timm's networks of this name are 1.5, which would"
        )
        print("         load them and compute something else; the stride belongs on a block's first convolution")


def _path(given: str) -> pathlib.Path:
    return pathlib.Path(given).expanduser()


def _write_folder(folder: pathlib.Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """Weights and config, or nothing."""
    folder.mkdir(parents=True)
    try:
        weights.write(folder / "model.safetensors", tensors)
        write_json(folder / "config.json", config)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


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
    # There may be more outputs than classes with names.
    known = (file.class_names or ())[: found.num_classes]
    names = (*known, *(f"LABEL_{index}" for index in range(len(known), found.num_classes)))
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
