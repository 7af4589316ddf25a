"""The whole program as XLA compiles it for the user, beside its operations, each of which was compiled alone."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.extend

from mixedres.numerics._compare.recorder import Outcome
from mixedres.numerics._recording.arguments import Traced

# Options of XLA by platform without which a compiled program may be right: fused kernels of YNNPACK.
_SUSPECTS: dict[str, tuple[tuple[str, Any], ...]] = {"cpu": (("xla_cpu_experimental_ynn_fusion_type", ""),)}
# Errors of less are not told: where XLA fuses operations, it leaves out roundings between them.
_LEAST, _TIMES = 0.01, 4.0


def parted(program: Traced, results: Sequence[tuple[Any, Any]]) -> Iterator[str]:
    """Yields sentences about `results` of the compiled program that are further off than those of its operations."""
    if program.jaxpr.effects:
        return
    errors = dict(_errors(_run(program, {}), program.results, results))
    if not errors:
        return
    cure = ""
    for option, value in _SUSPECTS.get(program.platform, ()):
        if not any(_errors(_run(program, {option: value}), program.results, results)):
            cure = f"; with the compiler option {option}={value!r} it is right"
    for name, error in errors.items():
        off = "not finite" if math.isinf(error) else f"off by {error:.2g}"
        yield f"XLA's compiled program differs from its operations: the result{f' {name}' * bool(name)} is {off}{cure}."


def _run(program: Traced, options: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the results of the program compiled whole, as jit compiles it."""
    run = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr), compiler_options=dict(options))
    found: Sequence[Any] = run(*program.arrays)
    return found


def _errors(
    found: Sequence[Any], names: Sequence[str], results: Sequence[tuple[Any, Any]]
) -> Iterator[tuple[str, float]]:
    """Yields the names of results that are further off than those of the operations, and their errors."""
    for name, array, (half, exact) in zip(names, found, results, strict=True):
        own, error = Outcome.of(half, exact).error, Outcome.of(array, exact).error
        if error > max(_LEAST, _TIMES * own) and Outcome.of(array, half).error > max(_LEAST, own):
            yield name, error
