"""Options of `predict` and `export` that choose a network. Importing this imports no JAX."""

import argparse

from mixedres._internal.cli import command_line
from mixedres._internal.names import PREPROCESSINGS, PRESETS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `mixedres.predict.read_classifier` reads."""
    command_line.add_source(parser)
    parser.add_argument("--precision", choices=tuple(PRESETS), help="default: the run's precision; fp32 for weights")
    parser.add_argument("--labels", help="file of class names: one a line, or a JSON list")
    parser.add_argument("--image_size", type=int, help="height and width of the network's input")
    parser.add_argument("--preprocessing", choices=PREPROCESSINGS, help="how images become squares")
