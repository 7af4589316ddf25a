"""Float32 values of the original program while the rewritten one is evaluated: arrays in float32 or in half."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives


class Cell:
    """A float32 value of the original program: its array, in float32 or in half, and what it has been cast to.

    Attributes:
      array: as it was computed.
      exact: the half array that an existing conversion made `array` from; reading it rounds nothing.
    """

    __slots__ = ("_f32", "array", "exact")

    def __init__(self, array: Any, exact: Any = None) -> None:
        self.array, self.exact, self._f32 = array, exact, None

    def f32(self) -> Any:
        """The value in float32, cast at most once."""
        if self.array.dtype == jnp.float32:
            return self.array
        if self._f32 is None:
            self._f32 = cast(self.array, jnp.float32)
        return self._f32

    def half(self, dtype: np.dtype) -> Any:
        """The value in `dtype`, cast anew."""
        if self.array.dtype == dtype:
            return self.array
        if self.exact is not None and self.exact.dtype == dtype:
            return self.exact
        return cast(self.array, dtype)


def cast(array: Any, dtype: Any) -> Any:
    """`array` in `dtype`; numbers of the host are converted there, without an operation."""
    if isinstance(array, np.ndarray | np.generic) or np.isscalar(array):
        with np.errstate(over="ignore"):
            return np.asarray(array).astype(dtype)
    return primitives.convert_element_type_p.bind(array, new_dtype=np.dtype(dtype), weak_type=False, sharding=None)


def is_f32(aval: Any) -> bool:
    """Whether the rewrite may change the dtype of such a value."""
    return bool(getattr(aval, "dtype", None) == jnp.float32)


def as_float32(value: Any) -> Any:
    """The array of an original dtype."""
    return value.f32() if isinstance(value, Cell) else value


def as_computed(value: Any) -> Any:
    """The array in the dtype it was computed in."""
    return value.array if isinstance(value, Cell) else value


def cells(variables: Iterable[Any], arrays: Iterable[Any]) -> list[Any]:
    """The arrays as the values of `variables`: cells where those are float32."""
    return [Cell(array) if is_f32(var.aval) else array for var, array in zip(variables, arrays, strict=True)]
