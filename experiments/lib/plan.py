"""What a sweep consists of: a base config, and what is different in each of its runs."""

import dataclasses
import importlib.util
import itertools
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from mixedres._internal.errors import ConfigError
from mixedres.config import parse_flags

# In the directory of a sweep: a line for every run, and what its file says.
RESULTS, SWEEP = "results.jsonl", "sweep.json"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A sweep, as the files in ``experiments/sweeps`` define it under the name `SWEEP`.

    The runs are every combination of the axes, the last axis varying fastest, and then those of the explicit list.

    A key is 'preset', or the path of a config key such as 'seed' or 'precision.loss_scale'.
    """

    question: str  # what it shall answer, in one line
    base: str  # config file without a preset
    axes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    runs: Sequence[Mapping[str, Any]] = ()
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of all runs
    baseline: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what the report compares the others with


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a sweep: a name that is a file name, what is different in it, and the arguments of the command."""

    name: str
    overrides: dict[str, Any]
    arguments: tuple[str, ...]

    def config(self) -> ConfigDict:
        """The config that the arguments mean; raises ConfigError for a mistake in them."""
        return parse_flags(self.arguments).config


def load(path: str) -> Sweep:
    """The sweep that a file defines; raises ConfigError if the file cannot be read or defines none."""
    spec = importlib.util.spec_from_file_location("sweep_file", path)
    if spec is None or spec.loader is None or not pathlib.Path(path).is_file():
        raise ConfigError(f"--sweep={path} is no Python file; try --sweep=experiments/sweeps/precision.py")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the file did wrong
        raise ConfigError(f"--sweep={path}: {type(error).__name__}: {error}") from None
    sweep = getattr(module, "SWEEP", None)
    if not isinstance(sweep, Sweep):
        raise ConfigError(f"--sweep={path} defines no SWEEP = experiments.lib.plan.Sweep(...)")
    return sweep


def expand(sweep: Sweep, more: Sequence[str] = ()) -> list[Run]:
    """The runs of a sweep, every one checked as far as it can be without starting it.

    `more`: arguments that every run gets at the end, such as '--config.epochs=1'. Raises ConfigError for an empty axis,
    an unknown key, a wrong value, and for two runs that are the same.
    """
    for key, values in sweep.axes.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ConfigError(f"axis {key!r} of the sweep is {values!r}; it must be a list of at least one value")
    combinations = [dict(zip(sweep.axes, values, strict=True)) for values in itertools.product(*sweep.axes.values())]
    differing = [*(combinations if sweep.axes else []), *map(dict, sweep.runs)]
    if not differing:
        raise ConfigError("the sweep has neither axes nor runs; give it one of them")
    runs: dict[str, Run] = {}
    for overrides in differing:
        run = Run(name_of(overrides), overrides, _arguments(sweep.base, {**sweep.overrides, **overrides}, more))
        if run.name in runs:
            raise ConfigError(f"the sweep has the run {run.name} twice; take one of them out")
        try:
            run.config()
        except ConfigError as error:
            raise ConfigError(f"run {run.name} of the sweep: {error}") from None
        runs[run.name] = run
    if sweep.baseline and not any(run.overrides == run.overrides | sweep.baseline for run in runs.values()):
        raise ConfigError(f"baseline {sweep.baseline} of the sweep is in no run, such as {name_of(differing[0])}")
    return list(runs.values())


def _arguments(base: str, overrides: Mapping[str, Any], more: Sequence[str]) -> tuple[str, ...]:
    preset = overrides.get("preset", "fp32")
    flags = [f"--config.{key}={value}" for key, value in overrides.items() if key != "preset"]
    return (f"--config={base}:{preset}", *flags, *more)


def name_of(overrides: Mapping[str, Any]) -> str:
    """What a run with these overrides is called: 'fp16,seed=3'; a file name, with other keys by their last part."""
    parts = [str(value) if key == "preset" else f"{key.rpartition('.')[2]}={value}" for key, value in overrides.items()]
    return re.sub(r"[^\w.,=+-]+", "_", ",".join(parts)) or "base"
