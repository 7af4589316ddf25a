"""The whole program as XLA compiles it for the user, beside its operations, each of which was compiled alone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.tree import is_half, is_inexact
from mixedres._internal.types import Jaxpr
from mixedres.numerics._compare.recorder import Outcome
from mixedres.numerics._recording.arguments import Traced

# Relative errors that are told at least, without half values in the program and with them: where XLA fuses operations,
# it leaves out roundings between them.
_LEAST, _LEAST_IN_HALF, _TIMES = 0.02, 0.1, 4.0
# With all roundings of the program. Without some of them, the gradient of a bfloat16 ResNet's first bias was off by
# 16 % instead of 3 % (transformers' ResNet in training mode, JAX 0.12.0.1, CPU).
_AS_WRITTEN = {"xla_allow_excess_precision": False}


def parted(program: Traced, own: Sequence[Any], errors: Sequence[float] | None = None) -> tuple[str, ...]:
    """Returns sentences about results that differ between the compiled program and its operations.

    `own`: the results of the operations. `errors`: how far roundings move them, relative; None: as far as changes of
    all arguments by a rounding move them. A program with effects is not run again.
    """
    if program.jaxpr.effects:
        return ()
    least = _LEAST_IN_HALF if errors is None and half_dtypes(program.jaxpr) else _LEAST
    found = _run(program, program.arrays, {})
    off = _differences(found, own)
    if not any(error > least for error in off):
        return ()
    if errors is None:
        factor = np.float32(1 + (2**-7 if least == _LEAST_IN_HALF else 2**-20))
        moved = [(x * factor).astype(x.dtype) if is_inexact(x) else x for x in program.arrays]
        errors = _differences(_run(program, moved, {}), found)
    # Both runs of a program that is compiled wrong may be NaN.
    bounds = [max(least, _TIMES * error) if math.isfinite(error) else least for error in errors]
    named = {name: one for name, one, bound in zip(program.results, off, bounds, strict=True) if one > bound}
    if not named:
        return ()
    cure = ""
    for option, value in {**jax_compat.sound_options(program.platform), **_AS_WRITTEN}.items():
        again = _differences(_run(program, program.arrays, {option: value}), own)
        if all(one <= bound for one, bound in zip(again, bounds, strict=True)):
            cure = f"; with the compiler option {option}={value!r} it is right"
            break
    return tuple(
        f"XLA's compiled program differs from its operations: the result{f' {name}' * bool(name)} is "
        f"{'not finite' if math.isinf(error) else f'off by {error:.2g}'}{cure} (docs/surprises.md)."
        for name, error in named.items()
    )


def half_dtypes(jaxpr: Jaxpr) -> set[np.dtype[Any]]:
    """Returns the half dtypes in which a program computes."""
    atoms = (atom for eqn in jax_compat.equations(jaxpr) for atom in eqn.outvars)
    return {np.dtype(atom.aval.dtype) for atom in atoms if is_half(atom.aval)}


def _run(program: Traced, arrays: Sequence[Any], options: Mapping[str, Any]) -> Sequence[Any]:
    """Returns the results of the program compiled whole, with the fusions of jit."""
    # LLVM's optimization of each fusion takes half of the time, and no wrong program has come from there.
    quick = {"xla_backend_optimization_level": 0} if program.platform == "cpu" else {}
    run = jax.jit(jax.extend.core.jaxpr_as_fun(program.jaxpr), compiler_options={**quick, **options})
    found: Sequence[Any] = run(*arrays)
    return found


def _differences(found: Sequence[Any], own: Sequence[Any]) -> list[float]:
    """Returns relative differences; 0 for results that are zeros in `own`, whose roundings have no measure."""
    judged = (is_inexact(y) and bool(jnp.any(y)) for y in own)
    return [Outcome.of(x, y).error if is_judged else 0.0 for x, y, is_judged in zip(found, own, judged, strict=True)]
