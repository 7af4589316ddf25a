"""`first_nonfinite`: evaluation of a traced program that measures whether its arrays are finite."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixedres._internal.tree import is_inexact
from mixedres._internal.types import Array, Function, PyTree
from mixedres.numerics._nonfinite import finding
from mixedres.numerics._recording.arguments import Traced
from mixedres.numerics._recording.recorder import Recorder


@jax.jit
def _statistics(array: jax.Array) -> jax.Array:
    """Returns float32 [status, largest finite magnitude]; the status is FINITE, MASKED (only -inf) or 0."""
    real = jnp.issubdtype(array.dtype, jnp.floating)
    finite = lax.is_finite(array) if real else jnp.isfinite(array)
    magnitude = lax.abs(array).astype(jnp.float32)
    # Constants with a dtype: numbers of Python become float64 where JAX is set to x64.
    zero, is_mask = np.float32(0), array.astype(jnp.float32) == np.float32(-np.inf) if real else np.zeros((), bool)
    masked = jnp.where(is_mask, np.float32(finding.MASKED), zero)
    operands = jnp.where(finite, np.float32(finding.FINITE), masked), jnp.where(finite, magnitude, zero)
    # One reduction with two results: with thousands of arrays compilation takes most of the time.
    both = lax.reduce(operands, (np.float32(1), np.float32(0)), _smaller_and_larger, tuple(range(array.ndim)))
    return jnp.stack(both)


def _smaller_and_larger(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return lax.min(a[0], b[0]), lax.max(a[1], b[1])


class _FiniteRecorder(Recorder):
    """Measures whether arrays are finite, and their largest finite magnitude."""

    def measure(self, array: Array) -> Any:
        """Returns `_statistics`."""
        return _statistics(array)

    def returned(self, array: Array) -> Any:
        """Returns the array."""
        return array


def first_nonfinite(fn: Function, *args: PyTree, names: Sequence[str] = ()) -> finding.Finding:
    """Runs `fn(*args)` and finds the first array that is not finite.

        print(first_nonfinite(lambda x: jnp.log(x - 1e9).sum(), x))

    Measures for every floating-point array whether it is finite, and its largest finite magnitude, also in called
    functions, derivatives and the bodies of scan and shard_map. A `while` loop or a `cond` counts as one operation.
    Results are rounded to their dtype after every operation, as the program is written; a program that is compiled
    normally may compute intermediate values with more digits and a larger range.

    Args:
      fn: a function of pytrees of arrays, jitted or not. Named scopes become paths; modules of Flax Linen
        open one each.
      *args: its arguments, which may be sharded; leaves that are no arrays, such as numbers of Python and the
        functions in an Equinox module, are passed unchanged. What `fn` changes in an nnx module is lost.
      names: names of the arguments in the finding, such as ('params', 'batch'); default: 'argument 0' and so on.

    Returns:
      A `Finding`.

    Raises:
      TypeError: for a `fn` that returns anything but arrays or numbers.
      ValueError: if the number of names is not that of the arguments.
    """
    program = Traced.of(fn, args, names)
    recorder = _FiniteRecorder(program.platform)
    results, tensors, statistics = recorder.run(program.jaxpr, program.names, program.arrays)
    found = finding.Search(statistics).finding(list(zip(program.results, tensors, strict=True)))
    # Constants of the program have no tensor.
    constants = [
        name
        for name, result, tensor in zip(program.results, results, tensors, strict=True)
        if tensor is None and is_inexact(result) and not jnp.isfinite(result).all()
    ]
    return dataclasses.replace(found, nonfinite_results=(*found.nonfinite_results, *constants))
