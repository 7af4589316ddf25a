"""Numbers that are known before the program runs, and whether a half type can hold them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres.autocast.compat import Equation

# Larger ones are not looked at for small numbers: data have some, and lose little by them.
SMALL = 16
# Operations that only reshape, move or convert one number.
_KEEP = ("broadcast_in_dim", "reshape", "squeeze", "copy", "expand_dims", "pvary", "pcast")


def known(const: Any) -> np.ndarray | None:
    """The numbers of a literal or a constant of the host, and of one element of a device; None for other arrays."""
    if isinstance(const, jax.core.Tracer) or (not hasattr(const, "dtype") and not np.isscalar(const)):
        return None
    if isinstance(const, jax.Array) and (const.size != 1 or not const.is_fully_addressable):
        return None  # fetching it would wait for the device
    try:
        return np.asarray(const)
    except (TypeError, ValueError):
        return None


def folded(eqn: Equation, operands: list[np.ndarray | None]) -> np.ndarray | None:
    """The number that a reshaped, broadcast or converted number is; None for anything else."""
    if len(operands) != 1 or operands[0] is None or operands[0].size != 1:
        return None
    if eqn.primitive.name in _KEEP:
        return operands[0]
    if eqn.primitive.name == "convert_element_type":
        return operands[0].astype(eqn.params["new_dtype"])
    return None


def unfit(constant: np.ndarray, dtype: np.dtype) -> bool:
    """Whether `dtype` has no number for a constant: it would overflow, underflow, or become 1 as 0.9999 does."""
    if not jnp.issubdtype(constant.dtype, jnp.floating):
        return False
    limits = jnp.finfo(dtype)  # type: ignore[no-untyped-call]
    size = np.abs(constant[np.isfinite(constant) & (constant != 0)].astype(np.float64))
    if constant.size <= SMALL:
        underflows = np.any(size < float(limits.smallest_normal))
        with np.errstate(over="ignore"):
            becomes_one = np.any((size.astype(dtype) == 1) & (size != 1))
        if underflows or becomes_one:
            return True
    return bool(np.any(size > float(limits.max)))
