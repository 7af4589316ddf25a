"""The options of `predict` and `export` that choose a network. Importing this imports no JAX."""

import argparse

from mixedres._internal.names import PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `mixedres.predict.classifier.from_args` reads."""
    parser.add_argument("--from", dest="source", required=True, help="a workdir, .safetensors, .pth or a folder")
    parser.add_argument("--precision", choices=PRESETS, help="default: that of the run; fp32 for weights")
    parser.add_argument("--labels", help="file of class names: one a line, or a JSON list")
    parser.add_argument("--image_size", type=int, help="height and width of the network's input")
    parser.add_argument(
        "--preprocessing", choices=("torch", "official", "official_fast"), help="how images become squares"
    )
