"""What autocast in float8 costs, in accuracy and in kernels.

python -m experiments.float8 --part=gradients
python -m experiments.float8 --part=training
python -m experiments.float8 --part=compiled

autocast(fn, "fp8") computes large products with float8 operands. A device without float8 units emulates it with the
same numbers, so a CPU will do.

gradients: a small transformer like GPT-2 and one like ViT, each written in plain JAX, Flax Linen and Equinox with the
same weights, and a dense network in Flax Linen. For each the relative L2 error of the gradient (of all parameters as
one vector, before any training, on random data) and of the loss against float32: with bf16, with fp8 for products of
every size, with fp8 as it is by default where that takes other products, and on the dense network with Flax's own bf16
and float8 layers (flax.linen.fp8_ops), too. Mean and standard deviation over seeds. Writes float8_gradients.json.

training: a transformer that predicts the next byte of the Python standard library's sources, and a small vision
transformer on scikit-learn's digits; in float32, bf16 and fp8 for products of every size, with the same seeds, the
same batches, float32 weights and no loss scale. Mean and standard deviation of the last losses over seeds, and of the
differences to float32 within a seed. Writes float8_training.json and .png.

compiled: the gradient of two feed-forward layers and of two transformer blocks, compiled for GPUs that need not be here
(--gpu=h200,a100): how many products are in float8, kernels, bytes. Needs JAX's CUDA plugin (Python 3.12 or newer, pip
install 'jax[cuda13]') and no GPU. Writes float8_compiled.json.

Files are written to experiments/results. Each part takes some minutes on a CPU. The first two need
pip install 'mixedres[train,experiments,examples]'.
"""

import argparse
import importlib
import sys
import warnings

from mixedres._internal.errors import ConfigError
from mixedres.autocast import PrecisionWarning

# Modules of in_float8, which are imported when they are asked for: the first two need other libraries.
PARTS = ("gradients", "training", "compiled")


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of a command line.

    Raises:
      ConfigError: for one that is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m experiments.float8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="", help=f"what to measure: {' or '.join(PARTS)}")
    parser.add_argument("--seeds", type=int, help="how many; by default 5 for gradients and 3 for training")
    parser.add_argument("--steps", type=int, help="of each training run; by default as training.py says for each task")
    parser.add_argument("--name", default="", help="the file is called float8_NAME.json; by default as the part")
    parser.add_argument("--gpu", help="of the part compiled, comma-separated (default h200,a100)")
    options = parser.parse_args(argv)
    if options.part not in PARTS:
        raise ConfigError(f"--part={options.part} must be one of {', '.join(PARTS)}")
    if options.steps is not None and options.part != "training":
        raise ConfigError(f"--steps={options.steps} is for --part=training; {options.part} takes no steps")
    if options.gpu is not None and options.part != "compiled":
        raise ConfigError(f"--gpu={options.gpu} is for --part=compiled")
    if options.seeds is not None and options.part == "compiled":
        raise ConfigError(f"--seeds={options.seeds} is for gradients and training; a program is compiled once")
    for name in ("seeds", "steps"):
        if (given := getattr(options, name)) is not None and given < 1:
            raise ConfigError(f"--{name}={given} must be at least 1")
    if "/" in options.name:
        raise ConfigError(f"--name={options.name} must be part of a file name, without directories")
    return options


def _run(options: argparse.Namespace) -> None:
    """Runs the part; raises ConfigError where a library is missing."""
    try:
        part = importlib.import_module(f"experiments.in_float8.{options.part}")
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing; pip install 'mixedres[train,experiments,examples]'") from None
    part.run(options)


def main(argv: list[str]) -> int:
    """Measures a part; returns the exit status."""
    # That it is emulated here is known, and its numbers are all that is asked for.
    warnings.filterwarnings("ignore", "float8 is emulated", PrecisionWarning)
    try:
        options = parse(argv)
        _run(options)
    except ConfigError as error:
        print(f"float8: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
