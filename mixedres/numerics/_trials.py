"""Gradients in half precision, run at loss scales before the scales are recommended."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres import amp
from mixedres._internal import jax_compat
from mixedres._internal.types import Array, Batch, Function
from mixedres.numerics._report import Report
from mixedres.numerics._scales import BEYOND, LARGEST_SHOWN, Trial, largest_finite


def tried(
    report: Report,
    loss_fn: Function,
    has_aux: bool,
    floats: dict[str, Any],
    exact: dict[str, Any],
    batch: Sequence[Batch],
) -> tuple[tuple[Trial, ...], str]:
    """Returns the errors of the gradient in float16 at loss scales, by one program whose argument is the scale.

    Tried are the recommended scale, the scale in use, and half of the largest scale with finite gradients.

    Args:
      report: the counts, with the layers that stay in float32.
      loss_fn: (floats, *batch) -> scalar in float32, or (scalar, aux) if `has_aux`.
      has_aux: see `jax.grad`.
      floats: the parameters.
      exact: their gradients in float32.
      batch: the other arguments.

    Returns:
      The trials by scale, and the reason why there is none: the layers that should stay in float32 have no scope, or
      autocast does not take the function. Both are empty if all gradients are zero, or one is not finite.
    """

    def loss(floats: dict[str, Any], *batch: Batch) -> Any:
        value = loss_fn(floats, *batch)
        return value[0] if has_aux else value

    if not 0 < sum(np.square(np.asarray(array, np.float64)).sum() for array in exact.values()) < math.inf:
        return (), ""
    half = amp.autocast(loss, report.dtype, keep_float32=report.keep_float32_pattern)

    def error(scale: Array, floats: dict[str, Any], exact: dict[str, Any], *batch: Batch) -> jax.Array:
        """Returns the error, infinite for an infinite loss, and for each parameter whether half alone has zeros."""

        def scaled(floats: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            value = half(floats, *batch).astype(jnp.float32)
            return value * scale, value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(floats)
        pairs = [(grads[name].astype(jnp.float32) / scale, exact[name].astype(jnp.float32)) for name in exact]
        squares = [(jnp.square(a - b).sum(), jnp.square(b).sum()) for a, b in pairs]
        whole = jnp.sqrt(sum(off for off, _ in squares) / sum(whole for _, whole in squares))
        zeros = [(~jnp.any(a) & jnp.any(b)).astype(jnp.float32) for a, b in pairs]
        return jnp.stack([jnp.where(jnp.isfinite(value), whole, jnp.inf), *zeros])

    arguments = (floats, exact, *batch)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", amp.PrecisionWarning)
            run = jax.jit(error, compiler_options=jax_compat.options_for_one_run())
            compiled = run.lower(np.float32(1), *arguments).compile()
    except (TypeError, ValueError) as refusal:
        return (), f"the gradient in float16 was not tried: {str(refusal).partition(chr(10))[0]}"

    @functools.cache
    def trial(exponent: int) -> Trial:
        found, *zeros = np.asarray(compiled(np.float32(2.0**exponent), *arguments)).tolist()
        lost = tuple(name for name, is_zero in zip(exact, zeros, strict=True) if is_zero)
        return Trial(exponent, found if math.isfinite(found) else math.inf, lost)

    largest = largest_finite(lambda exponent: trial(exponent).error, LARGEST_SHOWN + 1)
    used = [report.log2_scale] if report.log2_scale else []
    scales = sorted({min(largest, BEYOND - 1) - 1, report.recommended_log2_scale, *used})
    with jax.debug_nans(False), jax.debug_infs(False):
        limit = largest if math.isfinite(trial(largest).error) else None
        return tuple(dataclasses.replace(trial(exponent), largest=limit) for exponent in scales), ""
