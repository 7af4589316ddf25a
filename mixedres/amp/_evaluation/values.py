"""Values of the rewritten program: an array in float32 or half for each float32 value of the original program."""

import math
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import primitives

from mixedres._internal import jax_compat
from mixedres._internal.tree import FLOAT32, is_half
from mixedres._internal.types import Array, Aval, DType, Equation, Jaxpr
from mixedres.amp._rules import EXTREMES


class Cell:
    """A float32 or half value of the original program as an array in float32 or half, with its casts.

    Attributes:
      array: the array in the dtype in which it was computed.
      dtype: the dtype of the value in the original program.
      exact: the half array that the original program converted to `array`; reading `exact` rounds nothing.
      exponent: the array of which `array` is the exponential, in a softmax.
      shared: whether several nodes read the value, some in half: these share one cast, and gradients are float32 sums.
    """

    __slots__ = ("_f32", "_half", "array", "dtype", "exact", "exponent", "shared", "trunk")

    def __init__(self, array: Array, dtype: np.dtype = FLOAT32, exact: Any = None, exponent: Any = None) -> None:
        self.array, self.dtype, self.exact, self.exponent = array, dtype, exact, exponent
        self.shared = self.trunk = False
        self._f32 = self._half = None

    @property
    def is_half(self) -> bool:
        """Returns whether reading the value in half rounds nothing."""
        return self.exact is not None or self.array.dtype != FLOAT32

    def f32(self) -> Any:
        """Returns the value in float32, cast at most once."""
        if self.array.dtype == FLOAT32:
            return self.array
        if self._f32 is None:
            self._f32 = _cast_up(self.array) if self.shared and self.trunk else cast(self.array, jnp.float32)
        return self._f32

    def half(self, dtype: np.dtype) -> Any:
        """Returns the value in `dtype`, by a cast for each call: gradients of readers are summed in float32."""
        exact = self.array if self.array.dtype == dtype else self.exact
        if exact is None or exact.dtype != dtype:
            if not self.shared or isinstance(self.array, np.ndarray):
                return cast(self.array, dtype)
            exact = self._half = cast(self.array, dtype) if self._half is None else self._half
        return _cast_again(self.f32(), exact) if self.shared else exact

    def given(self) -> Any:
        """Returns the value in the dtype of the original program."""
        return self.f32() if self.dtype == FLOAT32 else self.half(self.dtype)


def cast(array: Array, dtype: DType) -> Any:
    """Returns `array` cast to `dtype`; numpy arrays and scalars are converted on the host."""
    if isinstance(array, np.ndarray | np.generic) or np.isscalar(array):
        with np.errstate(over="ignore"):
            return np.asarray(array).astype(dtype)
    with jax_compat.mesh_of(array):
        return primitives.convert_element_type_p.bind(array, new_dtype=np.dtype(dtype), weak_type=False, sharding=None)


@jax.custom_jvp
def _to_float32(array: Array) -> Any:
    """Returns a half array in float32; its cotangent is stored in half."""
    return cast(array, jnp.float32)


@_to_float32.defjvp
def _to_float32_jvp(primals: Array, tangents: Array) -> Any:
    # XLA drops a rounding that it may skip, and would store the cotangent in float32 too.
    return cast(primals[0], jnp.float32), cast(jax.lax.optimization_barrier(tangents[0]), jnp.float32)


_cast_up = jax.jit(_to_float32, inline=jax_compat.INLINE)


@jax.custom_jvp
def _second_cast(array: Array, half: DType) -> Any:
    """Returns `half`, with the derivative of a cast from `array` to `half`."""
    return half


@_second_cast.defjvp
def _second_cast_jvp(primals: Array, tangents: Array) -> Any:
    return primals[1], cast(tangents[0], primals[1].dtype)


_cast_again = jax.jit(_second_cast, inline=jax_compat.INLINE)


def as_dtype(array: Array, dtype: DType) -> Any:
    """Returns `array` in `dtype`, cast only if it has another dtype."""
    return array if getattr(array, "dtype", None) == dtype else cast(array, dtype)


def in_dtype(params: dict[str, Any], dtype: np.dtype, of: Iterable[DType] = (jnp.float32,)) -> dict[str, Any]:
    """Returns the parameters of an equation that name one of the dtypes `of`, with `dtype` in place of that dtype."""
    names = ("preferred_element_type", "new_dtype", "out_dtype")
    changed: dict[str, Any] = {name: dtype for name in names if params.get(name) is not None and params[name] in of}
    if params.get("update_jaxpr") is not None:  # of a scatter: the operation on two numbers
        changed["update_jaxpr"] = _on_two(params["update_jaxpr"], dtype)
    return changed


def bind_in(dtype: np.dtype, eqn: Equation, operands: Iterable[Array]) -> list[Any]:
    """Evaluates an equation in `dtype`, on operands of this dtype or without one."""
    params = in_dtype(eqn.params, dtype)
    on_cpu = dtype == jnp.bfloat16 and jax.default_backend() == "cpu"
    if on_cpu and eqn.primitive.name in EXTREMES:
        # The same bits. XLA of JAX 0.12.0 returns NaN for relu(relu(x) + x).mean() in bfloat16: it fuses both maxima,
        # which share their 0, into the reduction.
        wide = jax_compat.bind(eqn, *(as_dtype(x, jnp.float32) for x in operands))
        return [cast(x, dtype) for x in wide]
    if on_cpu and (forms := _as_matrices(eqn)):
        # XLA of JAX 0.12.0 adds in bfloat16 over two axes, as for gradients of weights that multiply sequences.
        matrices = (jnp.reshape(x, shape) for x, shape in zip(operands, forms[1:], strict=True))
        (found,) = jax_compat.bind(eqn, *matrices, **params, dimension_numbers=forms[0])
        return [jnp.reshape(found, eqn.outvars[0].aval.shape)]
    return jax_compat.bind(eqn, *operands, **params)


def _as_matrices(eqn: Equation) -> tuple[Any, ...] | None:
    """Returns the dimension numbers and shapes of matrices whose product has the elements of `eqn`'s.

    None for products of matrices, for other operations, and if an array would be transposed.
    """
    shapes = [atom.aval.shape for atom in eqn.invars]
    if eqn.primitive.name != "dot_general" or max(map(len, shapes)) < 3:
        return None
    contracted, batch = eqn.params["dimension_numbers"]
    if batch[0] or eqn.params.get("out_sharding") is not None:
        return None
    numbers, matrices = [], []
    for axes, shape in zip(contracted, shapes, strict=True):
        count, rank = len(axes), len(shape)
        is_first = tuple(axes) == tuple(range(count))
        if not 0 < count < rank or not (is_first or tuple(axes) == tuple(range(rank - count, rank))):
            return None
        middle = count if is_first else rank - count
        numbers.append((0 if is_first else 1,))
        matrices.append((math.prod(shape[:middle]), math.prod(shape[middle:])))
    return (tuple(numbers), ((), ())), *matrices


def _on_two(jaxpr: Jaxpr, dtype: np.dtype) -> Jaxpr:
    """Returns a jaxpr of two numbers as an open jaxpr of two numbers of `dtype`."""

    def function(*numbers: Array) -> list[Any]:
        return jax_compat.interpret(jaxpr, (), numbers, lambda _, eqn, operands: jax_compat.bind(eqn, *operands))

    traced: Jaxpr = jax_compat.opened(jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct((), dtype),) * 2))[0]
    return traced


def is_f32(aval: Aval) -> bool:
    """Returns whether `aval` is float32, so that the rewrite may change the dtype."""
    return bool(getattr(aval, "dtype", None) == FLOAT32)


def as_given(value: Any) -> Any:
    """Returns the array of a value in the dtype of the original program."""
    return value.given() if isinstance(value, Cell) else value


def as_float32(value: Any) -> Any:
    """Returns the array of a value, in float32 if autocast may choose the dtype."""
    return value.f32() if isinstance(value, Cell) else value


def as_computed(value: Any) -> Any:
    """Returns the array of a value in the dtype in which it was computed; half for a half value of the program."""
    return value.array if isinstance(value, Cell) and value.dtype == FLOAT32 else as_given(value)


def cells(variables: Iterable[Any], arrays: Iterable[Any]) -> list[Any]:
    """Returns the arrays as values of `variables`: cells for float32 variables, and for half ones in float32."""
    return [
        Cell(array, var.aval.dtype) if is_f32(var.aval) or (is_half(var.aval) and is_f32(array)) else array
        for var, array in zip(variables, arrays, strict=True)
    ]
