"""`first_nonfinite`: the first array of a program with infinities or NaNs, and where they came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixedres._internal.errors import listed
from mixedres._internal.jaxprs.module_paths import expression
from mixedres._internal.tree import is_inexact
from mixedres._internal.types import Array, Function, PyTree
from mixedres.numerics._compiled import parted
from mixedres.numerics._recording.arguments import Traced
from mixedres.numerics._recording.frames import Operation, Place, Statistics, Tensor, factors, hidden, outside
from mixedres.numerics._recording.recorder import Recorder

# The status of an array in its statistics; 0 is neither.
_FINITE, _MASKED = 1.0, 0.5
_FACTOR = "backward (a factor of the derivative, computed in the forward pass)"
# These compute nothing: infinities in their results were written by the program.
_WRITES = {"select_n", "concatenate", "pad", "scatter", "dynamic_update_slice"}


@dataclasses.dataclass(frozen=True)
class ArrayRecord(Operation):
    """One array of the program of `first_nonfinite`, over all devices and iterations.

    The direction begins with 'backward (a factor' for a factor of the derivative of the operation on the line, such as
    0.5 / sqrt(x) for sqrt(x).

    Attributes:
      finite: whether every element is finite.
      largest: largest finite magnitude.
    """

    finite: bool
    largest: float


@dataclasses.dataclass(frozen=True)
class Origin:
    """First array with infinities or NaNs that was computed from finite arrays, or an argument with them."""

    array: ArrayRecord  # `largest` is over the devices in the iteration that failed
    inputs: tuple[ArrayRecord, ...]  # the arrays that it was computed from, without constants
    devices: tuple[int, ...]  # mesh positions where the array is not finite; () outside shard_map
    iterations: tuple[int, ...]  # of the surrounding loops, outermost first
    position: int  # index of the array in the arrays of the finding
    repeat: tuple[int, int] = (1, 1)  # (number, count) among the arrays of equal operations of its line
    caller: str = ""  # line that called the function of the line

    @property
    def is_argument(self) -> bool:
        """Returns whether the array is an argument of the function."""
        return not self.array.primitive

    def __str__(self) -> str:
        inputs = " and ".join(f"{row.largest:.6g}" for row in self.inputs)
        of_inputs = f", of its inputs {inputs}" if inputs else ""
        number, count = self.repeat
        called = f", which {self.caller} calls" if self.caller else ""
        repeat = f", number {number} of {count} from this line{called}" if count > 1 else ""
        return f"{self.array}{repeat} (largest finite magnitude {self.array.largest:.6g}{of_inputs})"

    @property
    def advice(self) -> str:
        """Returns what to try next."""
        path, direction, dtype = self.array.path, self.array.direction, self.array.dtype
        if self.is_argument:
            return f"{path} was not finite when the function began: for weights, give those of the step before"
        if dtype != np.float16:
            return f"Change its operands, which have no finite result in {dtype}"
        if direction != "forward":
            return "Try a smaller loss scale"
        if path:
            return f"Try keep_float32={expression(path)!r}, or dtype='bfloat16'"
        return "Wrap the operation, and what reads it until its values fit again, in a jax.named_scope for keep_float32"


@dataclasses.dataclass(frozen=True)
class Finding:
    """Result of `first_nonfinite`.

    Attributes:
      arrays: all floating-point arrays, arguments and constants included, in order of evaluation, but for those that
        only move, negate or widen the elements of another.
      nonfinite_results: names of the results that are not finite, such as 'loss' or 'b/1'.
      origin: where infinities and NaNs that reach a result begin: `origin.array` is the first array that is not finite,
        beside its `inputs`, `devices` and `iterations`; None if all results are finite, or constants.
      hidden: pairs of an array with infinities and of a finite array that was computed from the infinities, such as a
        quotient 1 / inf = 0; empty if a result is not finite.
      compiled: sentences about results that XLA's compiled program computes otherwise than its operations.
    """

    arrays: tuple[ArrayRecord, ...]
    nonfinite_results: tuple[str, ...]
    origin: Origin | None
    hidden: tuple[tuple[ArrayRecord, ArrayRecord], ...] = ()
    compiled: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([*self.compiled, self._sentence])

    @property
    def _sentence(self) -> str:
        if self.origin is None and self.nonfinite_results:
            named = listed([name or "the result" for name in self.nonfinite_results], 3)
            return f"constants of the program are results that are not finite: {named}"
        if self.origin is None:
            by = dict.fromkeys(f"{row.primitive} at {row.source or 'an unknown line'}" for _, row in self.hidden)
            arrays = len({id(array) for array, _ in self.hidden})
            count = f"infinities in {arrays} array{'s' * (arrays > 1)} were hidden by"
            return f"all results are finite, but {count}: {listed([*by], 3)}" if by else "all results are finite"
        iterations = ", ".join(map(str, self.origin.iterations))
        loops = f", in iteration {iterations}" if iterations else ""
        results = ", ".join(filter(None, self.nonfinite_results))  # a result that is no tree has no name
        ending = f"results that are not finite: {results}" if results else "the result is not finite"
        return f"the first array that is not finite is {self.origin}{loops}; {ending}. {self.origin.advice}"


class _Search:
    """Search in the statistics [status, largest finite magnitude] of all arrays of a program."""

    def __init__(self, statistics: Statistics) -> None:
        self._statistics = statistics
        self._factors: set[Tensor] = set()

    def finding(self, results: Sequence[tuple[str, Tensor | None]]) -> Finding:
        """Returns the finding of a program with these named results."""
        tensors = [tensor for tensor in self._statistics.tensors if tensor.name or tensor.primitive]
        bad = [(name, tensor) for name, tensor in results if tensor is not None and not self._finite((tensor, ()))]
        self._factors = factors(tensors)

        def is_written(place: Place) -> bool:
            return self._is_mask(place) or not (place[0].primitive or place[0].links(place[1]))

        pairs = [] if bad else hidden(self._statistics.tensors, lambda place: not self._finite(place), is_written)
        rows = {tensor: self._row(tensor, self._statistics.of(tensor)) for pair in pairs for tensor, _ in pair}
        return Finding(
            hidden=tuple((rows[array], rows[by]) for (array, _), (by, _) in pairs),
            arrays=tuple(self._row(t, self._statistics.of(t)) for t in tensors),
            nonfinite_results=tuple(name for name, _ in bad),
            origin=self._origin([(tensor, ()) for _, tensor in bad], tensors),
        )

    def _origin(self, bad: list[Place], tensors: list[Tensor]) -> Origin | None:
        """Returns the earliest nonfinite array that was computed from finite arrays and leads to the results `bad`."""
        # A mask of -inf may be on such a path; it is the origin only if there is no other.
        seen: set[Place] = set()
        reached_by: dict[Place, Place] = {}
        origins: list[Place] = []
        queue = list(bad)
        while queue:
            here = queue.pop()
            if here in seen:
                continue
            seen.add(here)
            causes = [found for found in here[0].links(here[1]) if not self._finite(found)]
            reached_by.update((found, here) for found in causes)
            queue += causes
            if not causes:
                origins.append(here)
        if not origins:
            return None
        tensor, index = first = min(origins, key=lambda found: (self._is_mask(found), found[0].order(found[1])))
        # An argument is one array over all devices; its statistics per device are those where it enters the shard_map.
        where = first
        while not tensor.primitive and where in reached_by and not reached_by[where][0].primitive:
            where = reached_by[where]
        is_mapped = any(frame.kind == "devices" for frame in where[0].frame.chain())
        alike = [other for other in tensors if tensor.source and other.operation == tensor.operation]
        return Origin(
            array=self._row(tensor, self._statistics.at(first)),
            inputs=tuple(self._row(t, self._statistics.at((t, i))) for t, i in dict.fromkeys(tensor.links(index))),
            devices=tuple(np.flatnonzero(self._statistics.at(where)[:, 0] != _FINITE).tolist()) if is_mapped else (),
            iterations=where[1],
            position=tensors.index(tensor) if tensor in tensors else 0,
            repeat=(alike.index(tensor) + 1, len(alike)) if tensor in alike else (1, 1),
            caller=next(iter(tensor.callers), ""),
        )

    def _finite(self, place: Place) -> bool:
        return bool((self._statistics.at(place)[:, 0] == _FINITE).all())

    def _is_mask(self, place: Place) -> bool:
        """Returns whether the array was written with -inf as its only nonfinite value."""
        tensor, index = place
        written = tensor.primitive in _WRITES or not tensor.links(index)
        return written and bool((self._statistics.at(place)[:, 0] >= _MASKED).all())

    def _row(self, tensor: Tensor, numbers: np.ndarray) -> ArrayRecord:
        argument = tensor if tensor.name or tensor.primitive else next(outside(tensor), tensor)
        about = vars(argument.operation) | ({"direction": _FACTOR} if argument in self._factors else {})
        return ArrayRecord(
            **about | {"dtype": tensor.dtype, "shape": tensor.shape},
            finite=bool((numbers[:, 0] == _FINITE).all()),
            largest=float(numbers[:, 1].max()),
        )


@jax.jit
def _statistics(array: jax.Array) -> jax.Array:
    """Returns float32 [status, largest finite magnitude]; the status is FINITE, MASKED (only -inf) or 0."""
    real = jnp.issubdtype(array.dtype, jnp.floating)
    finite = lax.is_finite(array) if real else jnp.isfinite(array)
    magnitude = lax.abs(array).astype(jnp.float32)
    # Constants with a dtype: numbers of Python become float64 where JAX is set to x64.
    zero, is_mask = np.float32(0), array.astype(jnp.float32) == np.float32(-np.inf) if real else np.zeros((), bool)
    masked = jnp.where(is_mask, np.float32(_MASKED), zero)
    operands = jnp.where(finite, np.float32(_FINITE), masked), jnp.where(finite, magnitude, zero)
    # One reduction with two results: with thousands of arrays compilation takes most of the time.
    start, axes = (np.float32(1), np.float32(0)), tuple(range(array.ndim))
    return jnp.stack(lax.reduce(operands, start, lambda a, b: (lax.min(a[0], b[0]), lax.max(a[1], b[1])), axes))


class _FiniteRecorder(Recorder):
    """Measures whether arrays are finite, and their largest finite magnitude."""

    def measure(self, array: Array) -> Any:
        """Returns `_statistics`."""
        return _statistics(array)


def first_nonfinite(fn: Function, *args: PyTree, names: Sequence[str] = ()) -> Finding:
    """Runs `fn(*args)` and finds the first array that is not finite.

        print(first_nonfinite(lambda x: jnp.log(x - 1e9).sum(), x))

    Measures for every floating-point array whether it is finite, and its largest finite magnitude, also in called
    functions, derivatives and the bodies of scan and shard_map. A `while` loop or a `cond` counts as one operation.
    Results are rounded to their dtype after every operation, as the program is written; a program that is compiled
    normally may compute intermediate values with more digits and a larger range.

    Args:
      fn: a function of pytrees of arrays, jitted or not. Named scopes and modules of Flax Linen become paths.
      *args: its arguments, which may be sharded; leaves that are no arrays are passed unchanged. What `fn` changes in
        an nnx module is lost.
      names: names of the arguments in the finding, such as ('params', 'batch'); default: 'argument 0' and so on.

    Raises:
      TypeError: for a `fn` that returns anything but arrays or numbers.
      ValueError: if the number of names is not that of the arguments.
    """
    program = Traced.of(fn, args, names)
    recorder = _FiniteRecorder(program.platform)
    results, tensors, statistics = recorder.run(program.jaxpr, program.names, program.arrays)
    found = _Search(statistics).finding(list(zip(program.results, tensors, strict=True)))
    # Constants of the program have no tensor.
    constants = [
        name
        for name, result, tensor in zip(program.results, results, tensors, strict=True)
        if tensor is None and is_inexact(result) and not jnp.isfinite(result).all()
    ]
    nonfinite = (*found.nonfinite_results, *constants)
    return dataclasses.replace(found, nonfinite_results=nonfinite, compiled=parted(program, results))
