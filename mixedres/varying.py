"""Over which mesh axes of a `shard_map` an array differs, which JAX's types tell."""

from __future__ import annotations

from collections.abc import Iterable

import jax


def axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes of a surrounding shard_map over which `x` differs."""
    aval = jax.typeof(x)
    kind = getattr(aval, "manual_axis_type", None)
    return frozenset(kind.varying if kind is not None else getattr(aval, "vma", ()))


def over(names: Iterable[str], x: jax.Array) -> jax.Array:
    """`x`, counted as different along these mesh axes as well; its gradient is summed over those added."""
    missing = tuple(frozenset(names) - axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def alike(*arrays: jax.Array) -> list[jax.Array]:
    """The arrays, all counted as different along the axes along which any of them is."""
    names = frozenset().union(*map(axes, arrays))
    return [over(names, x) for x in arrays]
