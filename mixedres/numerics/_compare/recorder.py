"""Evaluation of a half program beside its float32 program, with the errors of every array."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import jaxpr_as_fun

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs import control_flow
from mixedres._internal.tree import at_least_float32, is_half, is_inexact
from mixedres._internal.types import Array, DType, Equation
from mixedres.numerics._compare import exact
from mixedres.numerics._compare.constants import evenly_spaced
from mixedres.numerics._compare.exact import widened
from mixedres.numerics._recording.recorder import SAME_ELEMENTS, Recorder
from mixedres.numerics._scales import relative_error

# The statistics of an array: sums of squares over its elements, and numbers of elements.
SQUARES, ERROR, OWN, INFINITE, ZEROS = range(5)
# Arrays up to this size are measured together: thousands of small reductions would take most of the compile time.
_SMALL = 4096
# Numbers beyond are masks, such as -1e30, like infinities.
_MASK = 1e18
# The numbers of iterations of a `while` loop in both programs.
ITERATIONS = ("iterations", "iterations in float32")


class Pair(NamedTuple):
    """A value in the half program and in the float32 program."""

    array: Any
    exact: Any = None  # None: the same elements
    own: Any = None  # the operation in float32 on the operands of the half program; None if it rounds nothing


class PairRecorder(Recorder):
    """Carries a `Pair` for every value. Integers have pairs too, because they may depend on rounded numbers."""

    # These copy elements, so the errors are those of the operand.
    unmeasured = frozenset(SAME_ELEMENTS | {"slice", "pad", "split", "stop_gradient"})
    extras = ITERATIONS
    # XLA for CPUs computes these in float32 where an operand is half, and rounds the result. `logistic` and
    # `integer_pow` are missing: XLA rounds in between, as for `rsqrt`, `expm1` and `log1p` before JAX 0.11.
    elementwise = frozenset({"add", "sub", "mul", "div", "neg", "abs", "sign", "exp", "log", "sqrt", "tanh", "erf"})
    elementwise |= {"square", "sin", "cos", "eq", "ne", "lt", "le", "gt", "ge"}
    rounded = elementwise | {"dot_general", "conv_general_dilated", "convert_element_type", "select_n", "add_any"}
    rounded |= {"stop_gradient", "reshape", "squeeze", "transpose", "broadcast_in_dim"}
    level = 1

    def __init__(self, platform: str) -> None:
        super().__init__(platform)
        # {operation: None} of those through which the float32 program was not followed, in order.
        self.unfollowed: dict[str, None] = {}

    def operation(self, eqn: Equation, arrays: list[Array]) -> list[Any]:
        """Evaluates an equation in both programs, and in float32 on the operands of the half program."""
        pairs = [_pair(array) for array in arrays]
        # Collectives have effects that name a mesh axis; other effects must not happen twice.
        effects = any("NamedAxis" not in type(effect).__name__ for effect in eqn.effects)
        same = all(pair.exact is None for pair in pairs)
        rounds = exact.rounds(eqn)
        meets = effects or eqn.primitive.name in exact.MEETING
        if meets and (rounds or not same):
            # A callback without results only looks at the numbers. A mutable array takes them.
            writes = {type(effect).__name__ for effect in eqn.effects} & {"WriteEffect", "AccumEffect"}
            if eqn.outvars or writes:
                self.unfollowed[f"{eqn.primitive.name} at {jax_compat.source_line(eqn) or 'an unknown line'}"] = None
        if meets or (same and not rounds):
            return [Pair(array) for array in jax_compat.bind(eqn, *(pair.array for pair in pairs))]
        if eqn.primitive.name == "while":
            return self._loop(eqn, pairs, same=same)
        own: list[Any] = [None] * len(eqn.outvars)
        if rounds and not (eqn.primitive.name in self.unmeasured and not same):
            own = exact.evaluate(eqn, [widened(pair.array) for pair in pairs], self.platform)
        if self.platform == "cpu" and eqn.primitive.name in self.rounded and own[0] is not None:
            computed = [lax.convert_element_type(own[0], eqn.outvars[0].aval.dtype)]
        else:
            computed = jax_compat.bind(eqn, *(pair.array for pair in pairs))
        wide = own if same else exact.evaluate(eqn, [_exact(pair) for pair in pairs], self.platform)
        return [Pair(*results) for results in zip(computed, wide, own, strict=True)]

    def _alone(self, eqn: Equation, arrays: list[Array]) -> list[Any]:
        """Returns `operation`; on CPUs the programs are those of float32 operations, which more equations share."""
        pairs = [_pair(array) for array in arrays]
        rounds, kind = exact.rounds(eqn), exact.kind(eqn, self.platform)
        is_float32 = self.platform == "cpu" and (eqn.primitive.name in self.rounded or not rounds)
        if kind is None or not is_float32 or not all(map(_is_on_host, jax.tree.leaves(pairs))):
            return super()._alone(eqn, arrays)
        self.on_operation()
        same = all(pair.exact is None for pair in pairs)
        with np.errstate(all="ignore"):
            found = exact.on_host(eqn, kind, [np.asarray(pair.array) for pair in pairs])
            computed = [x.astype(var.aval.dtype) for x, var in zip(found, eqn.outvars, strict=True)]
            own = found if rounds and (same or eqn.primitive.name not in self.unmeasured) else [None] * len(found)
            wide = exact.on_host(eqn, kind, [np.asarray(_exact(pair)) for pair in pairs]) if not same else own
        return [Pair(*results) for results in zip(computed, wide, own, strict=True)]

    def _loop(self, eqn: Equation, pairs: list[Pair], *, same: bool) -> list[Any]:
        """Evaluates a `while` loop in both programs, and counts its iterations."""
        found = control_flow.bodies(eqn, self.platform)
        half = [jaxpr_as_fun(jax_compat.closed(body.jaxpr)) for body in found]
        wide = [exact.in_float32(body.jaxpr, self.platform) for body in found]
        computed, count = control_flow.call_counted(eqn, found, half, [pair.array for pair in pairs])
        results, exact_count = control_flow.call_counted(eqn, found, wide, [_exact(pair) for pair in pairs])
        own = results if same else exact.evaluate(eqn, [widened(pair.array) for pair in pairs], self.platform)
        counts = [Pair(number.astype(jnp.float32)) for number in (count, exact_count)]
        return [*(Pair(*parts) for parts in zip(computed, results, own, strict=True)), *counts]

    def shares(self, eqn: Equation) -> bool:
        """Returns False for the equations that are listed in `unfollowed` by their line."""
        return eqn.primitive.name not in exact.MEETING

    def constant(self, array: Array) -> Pair:
        """Returns a constant of the half program beside the numbers that were rounded, where it shows them."""
        table = evenly_spaced(array)
        return Pair(array) if table is None else Pair(array, jnp.asarray(table))

    def carried(self, array: Array) -> Pair:
        """Returns a pair of two arrays, because those of later iterations may differ."""
        pair = _pair(array)
        return Pair(pair.array, _exact(pair))

    def kept(self, array: Array) -> Pair:
        """Returns the pair without `own`."""
        return _pair(array)._replace(own=None)

    def returned(self, array: Array) -> Any:
        """Returns the arrays of the half program and of the float32 program."""
        pair = _pair(array)
        return pair.array, _exact(pair)

    def measure(self, array: Array) -> Any:
        """Returns `_errors`, or the pair itself if it is small."""
        pair = _pair(array)
        if not isinstance(pair.array, jax.core.Tracer):
            if self.platform != "cpu":
                return _errors_on_device(pair)
            with np.errstate(all="ignore"):  # NumPy has nothing to compile
                return _errors(jax.device_get(pair), np)
        return pair if np.size(pair.array) <= _SMALL else _errors_on_device(pair)

    def collect(self, numbers: list[Any]) -> jax.Array:
        """Returns all statistics; the pairs of small arrays of one shape are measured together."""
        alike: dict[Any, list[int]] = {}
        for position, found in enumerate(numbers):
            if isinstance(found, Pair):
                kinds = tuple(None if x is None else (jnp.shape(x), jnp.result_type(x)) for x in found)
                alike.setdefault(kinds, []).append(position)
        result = list(numbers)
        for positions in alike.values():
            parts = [numbers[position] for position in positions]
            varying = [jax_compat.vary_alike(*map(jnp.asarray, jax.tree.leaves(part))) for part in parts]
            _, structure = jax.tree.flatten(parts[0])
            stacked = [jnp.stack(jax_compat.vary_alike(*column)) for column in zip(*varying, strict=True)]
            found = jax.vmap(_errors)(jax.tree.unflatten(structure, stacked))
            for position, row in zip(positions, found, strict=True):
                result[position] = row
        return jnp.stack(jax_compat.vary_alike(*result))


def _is_on_host(array: Array) -> bool:
    """Returns whether NumPy can take an array: numbers on one device."""
    is_number = not jnp.issubdtype(array.dtype, jax.dtypes.extended)
    return is_number and (not isinstance(array, jax.Array) or len(array.devices()) == 1)


def _pair(array: Array) -> Pair:
    return array if isinstance(array, Pair) else Pair(array)


def _exact(pair: Pair) -> Any:
    return widened(pair.array) if pair.exact is None else pair.exact


def _errors(pair: Pair, xp: Any = jnp) -> Any:
    """Returns the statistics of a pair, float32 (5,), without masks and infinities of float32; `xp` is jnp or numpy."""
    array = _real(pair.array, xp)
    wide, own = (None if x is None else _real(x, xp) for x in (pair.exact, pair.own))
    regular = _is_regular(array if wide is None else wide)
    found = [np.float32(0)] * 5
    found[SQUARES] = _squares(xp.where(regular, array if wide is None else wide, 0), xp)
    for sums, against in ((ERROR, wide), (OWN, own)):
        if against is not None:
            found[sums] = _squares(xp.where(_is_regular(against), array - against, 0), xp)
    if wide is not None:
        found[INFINITE] = _squares(regular & ~xp.isfinite(array), xp)
    if own is not None and is_half(pair.array):
        found[ZEROS] = _squares((array == 0) & (own != 0), xp)
    return xp.stack(found)


_errors_on_device = jax.jit(_errors)


def _is_regular(array: Any) -> Any:
    return abs(array) < _MASK


def _real(array: Array, xp: Any) -> Any:
    """Returns real numbers of at least float32: a difference in float8 would round, or be NaN where there is no 0."""
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        return xp.stack([array.real, array.imag])
    return array.astype(at_least_float32(array.dtype))


def _squares(array: Array, xp: Any) -> Any:
    """Returns the sum of squares, by a product: XLA for CPUs compiles a product faster than a reduction."""
    flat = array.reshape(-1).astype(np.float32)
    return xp.dot(flat, flat) if xp is np else xp.dot(flat, flat, precision=lax.Precision.HIGHEST)


def rounding(dtype: DType) -> float:
    """Returns the largest relative error of one rounding to `dtype`."""
    return float(jnp.finfo(dtype).eps) / 2  # type: ignore[no-untyped-call]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A result of the half program beside that of the float32 program, element by element in float64."""

    error: float = 0.0  # relative l2 error of the elements that are compared
    overflows: bool = False  # the half result has infinities or NaNs that float32 does not have
    is_compared: bool = True  # whether an element was compared; True for an empty result and for integers
    is_finite: bool = True  # whether all elements are finite in float32
    changed: float = 0.0  # fraction of integers that differ, or of floating-point numbers that are finite in half alone

    @classmethod
    def of(cls, half: Any, exact: Any) -> "Outcome":
        """Returns the outcome of two arrays; masks such as -1e30 that are infinite in half are not compared."""
        if not np.size(exact):
            return cls()
        if not is_inexact(exact):
            return cls(changed=float((_integers(half) != _integers(exact)).mean()))
        wide = np.asarray(exact, np.complex128 if jnp.iscomplexobj(exact) else np.float64)
        found = np.asarray(widened(half)).astype(wide.dtype)
        finite = np.isfinite(wide)
        compared = finite & ((abs(np.where(finite, wide, 0)) < _MASK) | np.isfinite(found))
        overflows = bool((compared & ~np.isfinite(found)).any())
        error = math.inf if overflows else relative_error([found[compared]], [wide[compared]])
        changed = float((np.isfinite(found) & ~finite).mean())
        return cls(error, overflows, bool(compared.any()), bool(finite.all()), changed)


def _integers(array: Any) -> np.ndarray:
    """Returns the numbers of an array of integers, of booleans or of random keys."""
    is_key = jnp.issubdtype(jnp.result_type(array), jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array)
