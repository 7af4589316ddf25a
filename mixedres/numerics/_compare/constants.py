"""Constants that became 0 or infinite in half precision, and the operations that they meet."""

from __future__ import annotations

import contextlib
import dis
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs import control_flow
from mixedres._internal.tree import HALF, is_half
from mixedres._internal.types import Array, Equation, Jaxpr
from mixedres.numerics._recording.recorder import SAME_ELEMENTS

_SUMS = {"add", "sub", "add_any"}
# A result may be 0 only because a constant is.
_HOLDS = _SUMS | {"max", "select_n"}
# Their result at 0 is infinite or NaN, or their derivative is.
_SINGULAR = {"log", "log1p", "rsqrt"}
# Their results have the numbers of their operand.
_COPIES = SAME_ELEMENTS | {"convert_element_type", "optimization_barrier", "stop_gradient", "slice"}
# A sum that is 0 only because a constant is makes their results 0.
_THROUGH = _COPIES | {"sqrt", "mul", "div", "square", "abs", "integer_pow", "reduce_sum", "cumsum", "concatenate"}
_THROUGH |= {"select_n", "reduce_max", "reduce_min", "gather", "dynamic_slice", "split", "pad"} | _SUMS
# A number near 1 lost digits if its distance from 1 changes by more than this fraction.
_DIGITS = 0.02
# Larger constants are weights, not tables such as positions.
_LARGEST = 2**22
# Fewer numbers in a row may lie on a line by chance, and so may numbers that span fewer spacings of the dtype.
_SHORTEST, _SPAN = 16, 16
# Distance from the line, in spacings of the dtype: half a spacing is the rounding itself.
_NEAR = 0.75


class _Lost(NamedTuple):
    """A constant that became 0 or infinite in half, in a value of the program."""

    place: str  # the sentence about the constant, without its end
    is_zero: bool  # not infinite
    is_written: bool  # the number in the source is known to be another one
    within: str = "constant"  # 'constant' for a value that is the constant, 'sum' or 'maximum' if it is an operand


class _Value(NamedTuple):
    """Knowledge about a value: the number of a constant of one number, the lost constants inside it."""

    number: float | None = None
    lost: frozenset[_Lost] = frozenset()
    is_constant: bool = False  # in half, it was half before the function was traced


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """Keeps the roundings of constants to half as operations of the programs that are traced inside.

    JAX rounds 0.9995 beside a bfloat16 array to 1 while it traces, and the float32 program would have the 1 too. Casts
    of 0 are kept too: then a 0 in half that is no cast may have been another number.
    """

    def is_kept(constant: Any, dtype: Any) -> bool:
        if dtype not in HALF or isinstance(constant, jax.Array) or hasattr(constant, "__jax_array__"):
            return False
        exact = np.asarray(constant)
        if exact.dtype.kind not in "iuf" or exact.dtype == dtype:
            return False
        with np.errstate(all="ignore"):
            rounded = exact.astype(dtype).astype(exact.dtype)
        return not (exact.any() and np.array_equal(rounded, exact, equal_nan=exact.dtype.kind == "f"))

    with jax_compat.kept_casts(is_kept):
        yield


class Constants(NamedTuple):
    """Sentences about constants that make the program wrong, or may do so, and whether a known one was rounded."""

    wrong: tuple[str, ...]
    doubtful: tuple[str, ...]
    is_rounded: bool


def lost_constants(jaxpr: Jaxpr, platform: str) -> Constants:
    """Returns what half precision does to the constants of a program.

    Wrong are a factor and a divisor that became 0 or infinite, and a sum or maximum with a constant that became 0 and
    that meets a division, a root or a logarithm. Others may be harmless: a decay of 0.9995, evenly spaced tables.
    """
    wrong: dict[str, None] = {}
    doubtful: dict[str, None] = {}
    tables: dict[str, None] = {}
    rounded: list[Equation] = []

    def run(body: Jaxpr, args: Sequence[_Value]) -> list[_Value]:
        inner, consts = jax_compat.opened(body)
        tables.update(dict.fromkeys(_of_tables(inner, consts)))
        known = [_of_constant(const) for const in consts] or [_Value()] * len(inner.constvars)
        return jax_compat.interpret(inner, known, args, equation, lambda atom: _of_constant(atom.val), binds=False)

    def equation(_: int, eqn: Equation, operands: list[_Value]) -> list[_Value]:
        if found := control_flow.bodies(eqn, platform):
            return _of_bodies(eqn, found, operands, run)
        if not eqn.outvars:
            return []
        operands = [_named(eqn, *pair) for pair in zip(eqn.invars, operands, strict=True)]
        wrong.update(dict.fromkeys(_wrong(eqn, operands)))
        doubtful.update(dict.fromkeys(_doubtful(eqn, operands)))
        number = _cast_number(eqn, operands)
        if number is not None and number != _rounded(number, eqn.outvars[0].aval.dtype):
            rounded.append(eqn)
        return [_result(eqn, operands)] * len(eqn.outvars)

    inner, _ = jax_compat.opened(jaxpr)
    run(jaxpr, [_Value()] * len(inner.invars))
    return Constants((*wrong,), (*doubtful, *tables), bool(rounded or tables))


def _of_bodies(eqn: Equation, found: Sequence[control_flow.Body], operands: list[_Value], run: Any) -> list[_Value]:
    """Returns the values of the results of an equation with bodies; those of a loop after two iterations."""
    results = [_Value()] * len(eqn.outvars)
    state = [_Value(None, value.lost) for value in operands[found[-1].carry]]
    for _ in range(2 if state else 1):
        for body in found:
            given = [*operands[body.consts], *state, *operands[body.slices]]
            if len(outs := run(body.jaxpr, given)) == len(results):  # not the predicate of a while loop
                results = [_Value(None, a.lost | b.lost) for a, b in zip(results, outs, strict=True)]
        state = [_Value(None, a.lost | b.lost) for a, b in zip(state, results, strict=False)]
    return results


def _of_constant(array: Any) -> _Value:
    if not _is_known(array) or np.size(array) != 1 or not jnp.issubdtype(jnp.result_type(array), jnp.number):
        return _Value()
    return _Value(float(np.real(np.asarray(array)).astype(np.float64).reshape(())), is_constant=True)


def _named(eqn: Equation, atom: Any, value: _Value) -> _Value:
    """Returns an operand, with itself as a lost constant if it is 0 or infinite; its line may show another number."""
    if not value.is_constant or value.number is None or not is_half(atom.aval) or not _is_lost(value.number):
        return value
    written = [x for x in _numbers_at(eqn) if not _is_lost(x) and _rounded(x, atom.aval.dtype) == value.number]
    return _lost(eqn, value.number, atom.aval.dtype, *written[:1])


def _numbers_at(eqn: Equation) -> list[float]:
    """Returns the numbers in the line of code that wrote an equation."""
    if not (authors := jax_compat.authors(eqn.source_info.traceback)):
        return []
    code, last, _ = authors[0]
    read = [(one.argval, one.positions and one.positions.lineno, one.offset) for one in dis.get_instructions(code)]
    line = next((line for _, line, offset in read if offset == last), None)
    return [float(number) for number, where, _ in read if where == line and type(number) in (int, float)]


def _is_lost(number: float) -> bool:
    return not number or not math.isfinite(number)


def _rounded(number: float, dtype: Any) -> float:
    with np.errstate(over="ignore"):
        return float(np.float64(number).astype(dtype))


def _lost(eqn: Equation, number: float, dtype: Any, written: float | None = None) -> _Value:
    example = f"{written:.7g}" if written is not None else "1e9" if number else "1e-8"
    sentence = f"{_place(eqn)} is {'infinite' if number else '0'} in {dtype}, as {example} is in {dtype}"
    return _Value(number, frozenset({_Lost(sentence, not number, written is not None)}))


def _place(eqn: Equation) -> str:
    return f"At {jax_compat.source_line(eqn) or 'an unknown line'} a constant"


def _of_tables(jaxpr: Jaxpr, constants: Sequence[Array]) -> Iterator[str]:
    """Yields sentences about constants of evenly spaced numbers that lost their differences."""
    for variable, constant in zip(jaxpr.constvars, constants, strict=bool(constants)):
        if (exact := evenly_spaced(constant)) is not None:
            reader = next((eqn for eqn in jaxpr.eqns if variable in eqn.invars), None)
            place = "A constant" if reader is None else _place(reader)
            off = float(abs(exact - np.asarray(constant).astype(np.float32)).max())
            yield f"{place} of evenly spaced numbers is rounded to {variable.aval.dtype}, by up to {off:.2g}."


def _doubtful(eqn: Equation, operands: Sequence[_Value]) -> Iterator[str]:
    """Yields sentences about operands that are infinite, and about the cast of a number near 1 that changes it."""
    if eqn.primitive.name in _SUMS | {"select_n"}:
        yield from (f"{lost.place}." for value in operands for lost in value.lost if not lost.is_zero)
    number, dtype = _cast_number(eqn, operands), eqn.outvars[0].aval.dtype
    if number is not None and 0.5 < number < 2:
        rounded = _rounded(number, dtype)
        if abs(rounded - number) > _DIGITS * abs(1 - number):
            yield f"{_place(eqn)} of {number:.7g} is {rounded:.7g} in {dtype}."


def _cast_number(eqn: Equation, operands: Sequence[_Value]) -> float | None:
    """Returns the number that an equation casts to half, if it casts a constant."""
    casts = eqn.primitive.name == "convert_element_type" and is_half(eqn.outvars[0].aval)
    return operands[0].number if casts and not operands[0].lost else None


def _wrong(eqn: Equation, operands: Sequence[_Value]) -> Iterator[str]:
    """Yields sentences about the lost constants that make the result of an equation wrong."""
    name = eqn.primitive.name
    for position, value in enumerate(operands):
        is_divisor = name == "div" and position == 1
        is_base = (name == "pow" and not position) or (name == "integer_pow" and eqn.params["y"] < 0)
        is_singular = name in _SINGULAR or is_base or is_divisor
        for lost in value.lost:
            # A factor of 0 may be meant. An infinite one never is.
            if lost.within == "constant" and name in ("mul", "div") and (lost.is_written or not lost.is_zero):
                yield f"{lost.place}, and it is a {'divisor' if is_divisor else 'factor'}."
            elif lost.within != "constant" and (is_singular or (name == "sqrt" and lost.within == "sum")):
                yield f"{lost.place}, and the result meets {name}."


def _result(eqn: Equation, operands: Sequence[_Value]) -> _Value:
    """Returns what is known of the results of an equation."""
    name, aval = eqn.primitive.name, eqn.outvars[0].aval
    if (number := _cast_number(eqn, operands)) is not None:
        rounded = _rounded(number, aval.dtype)
        return _lost(eqn, rounded, aval.dtype, number) if _is_lost(rounded) and rounded != number else _Value(rounded)
    number = operands[0].number if name in _COPIES and len(operands) == 1 else None
    held = {lost for value in operands for lost in value.lost}
    alone = {lost for lost in held if lost.within == "constant"}
    if name in _COPIES:
        return _Value(None if number is None else -number if name == "neg" else number, frozenset(held))
    # Relu is a maximum with a 0 that was meant.
    read = {lost for lost in alone if lost.is_zero and (lost.is_written or name in _SUMS)}
    within = {lost._replace(within="sum" if name in _SUMS else "maximum") for lost in read if name in _HOLDS}
    return _Value(None, frozenset(within | (held - alone if name in _THROUGH else set())))


def _is_known(array: Array) -> bool:
    """Returns whether the numbers of a constant are at hand: not in a program that is traced, or on other hosts."""
    return not isinstance(array, jax.core.Tracer) and getattr(array, "is_fully_addressable", True)


def evenly_spaced(array: Array) -> np.ndarray | None:
    """Returns the float32 numbers of which a constant half array has roundings that are further apart; else None.

    A straight line through the rounded numbers of a table, such as positions, gives the numbers back. Beyond 2048
    float16 has the even numbers alone, and bfloat16 beyond 256.
    """
    if not is_half(array) or np.size(array) > _LARGEST or not _is_known(array):
        return None
    numbers = np.asarray(array).astype(np.float64)
    digits = int(jnp.finfo(array.dtype).nmant)  # type: ignore[no-untyped-call]
    for axis in range(numbers.ndim):
        rows = np.moveaxis(numbers, axis, 0)
        if len(rows) >= _SHORTEST and np.isfinite(rows).all() and (line := _line(rows, digits)) is not None:
            return np.asarray(np.moveaxis(line, 0, axis), np.float32)
    return None


def _line(rows: np.ndarray, digits: int) -> np.ndarray | None:
    """Returns the straight lines through columns of rounded numbers, or None if one is not straight or none lost."""
    largest = abs(rows).max(0)
    spacing = 2.0 ** (np.floor(np.log2(np.maximum(abs(rows), largest * 2.0**-digits) + 1e-300)) - digits)
    weight = spacing**-2.0
    place = np.arange(len(rows), dtype=np.float64).reshape(-1, *[1] * (rows.ndim - 1))
    center = (weight * place).sum(0) / weight.sum(0)
    mean = (weight * rows).sum(0) / weight.sum(0)
    step = (weight * (place - center) * (rows - mean)).sum(0) / (weight * (place - center) ** 2).sum(0)
    line = mean + step * (place - center)
    lost = (abs(step) < spacing.max(0)) & (abs(step) * len(rows) > _SPAN * spacing.max(0))
    return line if (abs(line - rows) <= _NEAR * spacing).all() and lost.any() else None
