"""Measures all programs, prints their table and writes it; see tests/strangers/__init__.py."""

import argparse
import importlib.metadata
import re
import sys

import jax
import jax.numpy as jnp

from experiments.lib import runs
from experiments.lib.strangers import SCALE, summary, table
from mixedres._internal import environment
from tests import strangers
from tests.strangers import programs
from tests.strangers.measure import REPEATS, SEEDS, measured, trace_seconds


def rows(pattern, half):
    """Yields a row for every program whose name matches `pattern`; the row of one that fails has the error alone."""
    for module, (library, *_) in programs.MODULES.items():
        try:
            found = programs.programs(module)
        except ImportError as error:
            print(f"{module}: {runs.one_line(error)}", file=sys.stderr)
            continue
        for name, make in found.items():
            if not re.search(pattern, name, re.IGNORECASE):
                continue
            row = {"program": name, "library": f"{library} {importlib.metadata.version(library)}"}
            try:
                program = make()
                yield row | measured(program, half) | {"trace_s": trace_seconds(program, half)}
            except Exception as error:  # one that fails must not lose the others
                yield row | {"error": runs.one_line(error)}


def main():
    parser = argparse.ArgumentParser(
        prog="python -m tests.strangers",
        description=strangers.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--programs", default="", help="a regular expression that their names match (default: all)")
    parser.add_argument("--dtype", default="float16", choices=("float16", "bfloat16"), help="the half dtype")
    options = parser.parse_args()
    found = []
    for row in rows(options.programs, jnp.dtype(options.dtype)):
        found.append(row)
        print(table([row])[-1], flush=True)
    if not found:
        parser.error(f"no program matches {options.programs!r}")
    print("\n".join(["", *table(found), "", summary(found)]))
    facts = {"command": " ".join(["python -m tests.strangers", *sys.argv[1:]])}
    facts |= {"device": environment.device(jax.devices()[:1]), "versions": environment.versions()}
    facts |= {"dtype": options.dtype, "loss_scale": SCALE, "seeds": SEEDS, "repeats": REPEATS, "rows": found}
    print(runs.write(f"third_party_{options.dtype}", facts))


if __name__ == "__main__":
    main()
