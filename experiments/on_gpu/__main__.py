"""Runs a part of `experiments.gpu` and writes its result.

python -m experiments.on_gpu device --out=FILE --tiny
"""

import pathlib
import sys

from experiments.lib import runs
from experiments.on_gpu import kernels, numerics, parts
from mixedres._internal import environment
from mixedres._internal.files import write_json

# Functions of (whether shapes are tiny, file of the result).
PARTS = {"device": parts.device, "numerics": numerics.measure, "kernels": kernels.measure}
PARTS |= {"pipeline": parts.pipeline, "digits": parts.digits}


def main(argv: list[str]) -> int:
    """Measures and writes; returns the exit status."""
    parser = runs.parser("on_gpu", __doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--out", type=pathlib.Path, required=True, help="file of the result")
    parser.add_argument("--tiny", action="store_true", help="small shapes, for a CPU")
    options = parser.parse_args(argv)
    found = PARTS[options.part](options.tiny, options.out)
    write_json(options.out, found | {"versions": environment.versions()})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
