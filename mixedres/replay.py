"""The command line that repeats a step whose numbers were not finite."""

from __future__ import annotations

import os
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from mixedres import precision
from mixedres.config import ConfigError, TrainingError, errors, unflatten
from mixedres.data import DataError

USAGE = f"""\
Repeats the step at which a run ended with exit status 3, with every array of its forward and backward pass examined.

  python -m mixedres.replay runs/imagenet-fp16
  python -m mixedres.replay runs/imagenet-fp16 --precision=bf16

WORKDIR              of the run; the step is in WORKDIR/nonfinite, and only compiled programs are written
--precision=PRESET   in another preset: {", ".join(precision.PRESETS)}
--help               this text

The data set and as many devices as the run had must be there. Exit status: 0 replayed, whatever was found; 1 the
replay failed; 2 a mistake in the command; 130 interrupted.
"""


def parse(arguments: Sequence[str]) -> tuple[pathlib.Path, str | None]:
    """(workdir, preset or None) of the command line without the program.

    Raises:
      ConfigError: for a mistake in it.
    """
    directories: list[str] = []
    preset = None
    remaining = iter(arguments)
    for argument in remaining:
        name, equals, value = argument.partition("=")
        if name == "--precision":
            preset = value if equals else next(remaining, "")
            with errors("--precision"):
                precision.get(preset)
        elif argument.startswith("-"):
            raise ConfigError(f"flag {argument} is unknown; there is --precision=PRESET, and --help says more")
        else:
            directories.append(argument)
    if len(directories) != 1 or not directories[0]:
        given = ", ".join(map(repr, directories)) or "none"
        raise ConfigError(f"one WORKDIR is wanted, given: {given}; try python -m mixedres.replay runs/digits-fp16")
    return pathlib.Path(directories[0]).expanduser().absolute(), preset


def replay(workdir: pathlib.Path, preset: str | None) -> None:
    """Replays the step kept in `workdir` and prints what was found.

    Raises:
      ConfigError: where there is none, and where it cannot be built on this machine.
    """
    # Imported here so that a mistake in the command need not wait for the models.
    from mixedres import compilation_cache, diagnosis, nonfinite
    from mixedres.build import build

    saved = nonfinite.load(workdir / nonfinite.DIRECTORY)
    setup = build(unflatten(in_preset(saved.config, preset)))
    with compilation_cache.kept(setup.config.compilation_cache, workdir):
        state = nonfinite.restore(setup, saved)
        print(
            f"step {saved.step} of {workdir}, {setup.config.model.name} in {setup.precision.name} at loss scale "
            f"{float(state.loss_scale.loss_scale):g}; examining ...",
            flush=True,
        )
        finding = nonfinite.examine(setup, state, saved.batch)
    if finding.origin is None and preset is not None:
        print(f"in {preset} the loss and every gradient of this step are finite; set config.precision.name={preset}")
        return
    for line in diagnosis.before(finding):
        print(f"  {line}")
    print(diagnosis.where(finding, len(setup.devices)))
    print(diagnosis.why(finding, setup.precision.name, state.loss_scale))
    if finding.nonfinite_results:
        print(f"not finite in the end: {len(finding.nonfinite_results)} of loss and gradients")


def in_preset(config: dict[str, Any], preset: str | None) -> dict[str, Any]:
    """The flat config with another preset, whose policies and loss scale are its own; norms fused where it allows."""
    if preset is None:
        return config
    kept = {key: value for key, value in config.items() if not key.startswith("precision.")}
    fused = config.get("model.fused", "auto")
    if precision.get(preset).obstacle_to_fusing:
        fused = "false"
    return kept | {"precision.name": preset, "model.fused": fused}


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status, which `USAGE` explains."""
    if {"--help", "-h"} & set(argv[1:]):
        print(USAGE, end="")
        return 0
    try:
        replay(*parse(argv[1:]))
    except ConfigError as error:
        return _fail(2, error)
    except (TrainingError, DataError) as error:
        return _fail(1, error)
    except KeyboardInterrupt:
        return _fail(130, "interrupted")
    return 0


def _fail(status: int, message: object) -> int:
    print(f"mixedres.replay: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    status = main(sys.argv)
    if status == 130:  # as in mixedres.main: the interpreter's own shutdown can crash in the middle of a compilation
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)
