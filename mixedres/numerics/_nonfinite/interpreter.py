"""`first_nonfinite`: evaluation of a traced program that measures every floating-point array, compiled as one program.

Calls are inlined; scan and shard_map are entered, with statistics for every iteration and device. `while` and `cond`
are single operations; of a `lax.platform_dependent` the branch of the platform is inlined.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from mixedres._internal import jax_compat
from mixedres._internal.tree import is_array, leaves_by_path
from mixedres._internal.types import Array, Equation, Function, Jaxpr, PyTree
from mixedres.numerics._nonfinite import finding
from mixedres.numerics._nonfinite.finding import Frame, Index, Links, Path, Place, Tensor, link, place

_INLINED = jax_compat.SIMPLE_CALLS - {"shard_map"} | {"custom_jvp_call", "custom_vjp_call"}
# Their results have the elements of their operand, so one measurement is enough.
_SAME_ELEMENTS = {"reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "neg", "copy", "copy_p"}
_SAME_ELEMENTS |= {"pvary", "pcast"}
Statistics = dict[Path, jax.Array]


class Value(NamedTuple):
    """An array and the measured tensor with its elements; None for integers and constants."""

    array: Any
    tensor: Tensor | None = None


@dataclasses.dataclass
class _Tape:
    """Statistics of a frame, and of the frames inside, while it is traced."""

    frame: Frame
    numbers: list[Any] = dataclasses.field(default_factory=list)
    inner: Statistics = dataclasses.field(default_factory=dict)

    def collected(self) -> Statistics:
        """Returns float32 (tensors, 2) for this frame and the frames inside, by path."""
        own = {self.frame.path: jnp.stack(self.numbers)} if self.numbers else {}
        return own | self.inner


@jax.jit
def statistics(array: jax.Array) -> jax.Array:
    """Returns float32 [status, largest finite magnitude]; the status is FINITE, MASKED (only -inf) or 0."""
    real = jnp.issubdtype(array.dtype, jnp.floating)
    finite = lax.is_finite(array) if real else jnp.isfinite(array)
    magnitude = lax.abs(array).astype(jnp.float32)
    masked = finding.MASKED * (array.astype(jnp.float32) == -jnp.inf) if real else jnp.zeros(array.shape, jnp.float32)
    operands = jnp.where(finite, finding.FINITE, masked), jnp.where(finite, magnitude, 0.0)
    # One reduction with two results: with thousands of arrays compilation takes most of the time.
    both = lax.reduce(operands, (np.float32(1), np.float32(0)), _smaller_and_larger, tuple(range(array.ndim)))
    return jnp.stack(both)


def _smaller_and_larger(a: Sequence[jax.Array], b: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    return lax.min(a[0], b[0]), lax.max(a[1], b[1])


def _is_widening(eqn: Equation) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = (jnp.result_type(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    both_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return both_floats and jnp.promote_types(old, new) == new


class _Site(NamedTuple):
    """The place of an equation: indices that lead to it, surrounding named scopes, and its source line."""

    path: Path = ()
    scope: str = ""
    source: str = ""


class Recorder:
    """Evaluates programs for one platform; `frames` are the frames of the last evaluation by path."""

    def __init__(self, platform: str) -> None:
        self.frames: dict[Path, Frame] = {}
        self._platform = platform

    def program(self, jaxpr: Jaxpr, names: Sequence[str], arrays: Sequence[Array]) -> tuple[list[Value], Statistics]:
        """Results and statistics of a closed jaxpr on the arguments `arrays`, which are called `names`."""
        tape = self._tape(Frame("program", ()))
        named = enumerate(zip(arrays, names, strict=True))
        args = [self._argument(tape, array, (-1, i), link(), name) for i, (array, name) in named]
        return self._body(jaxpr, tape, _Site(), args), tape.collected()

    def _tape(self, frame: Frame) -> _Tape:
        self.frames[frame.path] = frame  # JAX may trace a body twice; the frames are the same then
        return _Tape(frame)

    def _measured(self, tape: _Tape, array: Array, links: Links, **about: Any) -> Value:
        dtype = jnp.result_type(array)
        if not jnp.issubdtype(dtype, jnp.inexact):
            return Value(array)
        tensor = Tensor(tape.frame, len(tape.numbers), dtype=dtype, shape=jnp.shape(array), links=links, **about)
        tape.numbers.append(statistics(array))
        tape.frame.tensors.append(tensor)
        return Value(array, tensor)

    def _argument(self, tape: _Tape, array: Array, path: Path, links: Links, name: str = "") -> Value:
        return self._measured(tape, array, links, path=path, primitive="", scope="", source="", name=name)

    def _body(self, jaxpr: Jaxpr, tape: _Tape, site: _Site, args: Sequence[Value]) -> list[Value]:
        inner, consts = jax_compat.opened(jaxpr)
        constants = [self._argument(tape, x, (*site.path, -2, i), link(), "a constant") for i, x in enumerate(consts)]

        def equation(i: int, eqn: Equation, operands: list[Value]) -> Sequence[Value]:
            scope = "/".join(part for part in (site.scope, jax_compat.name_stack(eqn)) if part)
            # Operations in JAX itself, such as the inside of jnp.where, have the line of the call.
            here = _Site((*site.path, i), scope, jax_compat.source_line(eqn) or site.source)
            return self._equation(tape, eqn, here, operands)

        return jax_compat.interpret(inner, constants, args, equation, lambda atom: Value(atom.val))

    def _equation(self, tape: _Tape, eqn: Equation, site: _Site, args: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if name in _INLINED:
            return self._body(jax_compat.body(eqn), tape, site, args)
        if (branch := jax_compat.platform_branch(eqn, self._platform)) is not None:
            return self._body(branch, tape, site, args[1:])
        if name == "scan" and eqn.params["length"]:
            return self._scan(tape, eqn, site, args)
        if name == "shard_map":
            return self._shard_map(tape, eqn, site, args)
        results = jax_compat.bind(eqn, *(arg.array for arg in args))
        if name in _SAME_ELEMENTS or _is_widening(eqn):
            return [Value(result, arg.tensor) for result, arg in zip(results, args, strict=False)]
        links = link(*(arg.tensor for arg in args))
        return [self._result(tape, eqn, result, site, links) for result in results]

    def _result(self, tape: _Tape, eqn: Equation, array: Array, site: _Site, links: Links) -> Value:
        return self._measured(tape, array, links, primitive=eqn.primitive.name, **site._asdict())

    def _shard_map(self, tape: _Tape, eqn: Equation, site: _Site, args: list[Value]) -> Sequence[Value]:
        params, path = eqn.params, site.path
        tensors: list[Tensor | None] = []

        def function(*arrays: Array) -> tuple[tuple[Any, ...], Statistics]:
            inner = self._tape(Frame("devices", path, tape.frame))
            pairs = enumerate(zip(arrays, args, strict=True))
            values = [self._argument(inner, array, (*path, -1, i), link(arg.tensor)) for i, (array, arg) in pairs]
            results = self._body(params["jaxpr"], inner, site, values)
            tensors[:] = [result.tensor for result in results]
            return tuple(r.array for r in results), {path: x[None] for path, x in inner.collected().items()}

        by_device = PartitionSpec(jax_compat.manual_axes(eqn))
        mapped = jax_compat.shard_map_like(eqn, function, (tuple(params["out_specs"]), by_device))
        results, numbers = mapped(*(arg.array for arg in args))
        tape.inner |= numbers
        return [Value(array, tensor) for array, tensor in zip(results, tensors, strict=True)]

    def _scan(self, tape: _Tape, eqn: Equation, site: _Site, args: list[Value]) -> Sequence[Value]:
        params, path = eqn.params, site.path
        num_consts, num_carry = jax_compat.scan_arity(params)
        consts, init, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]
        length, reverse = params["length"], params["reverse"]
        first, last = (length - 1, 0) if reverse else (0, length - 1)
        tensors: list[Tensor | None] = []  # of the results of the body: the next carry, and slices

        def carried(number: int) -> Links:
            def links(index: Index) -> list[Place]:
                *outside, i = index
                if i == first:
                    return list(place(init[number].tensor, tuple(outside)))
                return list(place(tensors[number], (*outside, i + 1 if reverse else i - 1)))

            return links

        def step(carry: Array, slices: Array) -> Any:
            inner = self._tape(Frame("scan", path, tape.frame, length, reverse))
            state = [self._argument(inner, array, (*path, -1, i), carried(i)) for i, array in enumerate(carry)]
            pairs = enumerate(zip(slices, xs, strict=True), start=num_carry)
            parts = [self._argument(inner, array, (*path, -1, i), link(x.tensor)) for i, (array, x) in pairs]
            results = self._body(params["jaxpr"], inner, site, [*consts, *state, *parts])
            tensors[:] = [result.tensor for result in results]
            arrays = [result.array for result in results]
            return tuple(arrays[:num_carry]), (tuple(arrays[num_carry:]), inner.collected())

        start, slices = (tuple(arg.array for arg in group) for group in (init, xs))
        carry, (stacked, numbers) = lax.scan(step, start, slices, length, reverse=reverse)
        tape.inner |= numbers

        def result_of(number: int) -> Links:
            iterations = [last] if number < num_carry else range(length)
            return lambda index: [found for i in iterations for found in place(tensors[number], (*index, i))]

        after = site._replace(path=(*path, sys.maxsize))  # after all of the body
        return [self._result(tape, eqn, array, after, result_of(i)) for i, array in enumerate((*carry, *stacked))]


def first_nonfinite(fn: Function, *args: PyTree, names: Sequence[str] = ()) -> finding.Finding:
    """Runs `fn(*args)` and finds the first array that is not finite.

        print(first_nonfinite(lambda x: jnp.log(x - 1e9).sum(), x))

    Measures for every floating-point array whether it is finite, and its largest finite magnitude, also in called
    functions, derivatives and the bodies of scan and shard_map. A `while` loop or a `cond` counts as one operation.
    Results are rounded to their dtype after every operation, as the program is written; a program that is compiled
    normally may compute intermediate values with more digits and a larger range.

    Args:
      fn: a function of pytrees of arrays, jitted or not. Named scopes, which flax modules open, become paths.
      *args: its arguments, which may be sharded; leaves that are no arrays, such as the functions in an Equinox module,
        are passed unchanged. What `fn` changes in an nnx module is lost.
      names: names of the arguments in the finding, such as ('params', 'batch'); default: 'argument 0' and so on.

    Returns:
      A `Finding`.

    Raises:
      ValueError: if the number of names is not that of the arguments.
    """
    names = list(names) or [f"argument {i}" for i in range(len(args))]
    if len(names) != len(args):
        raise ValueError(f"names must have one name for each of the {len(args)} arguments, got {names!r}")
    leaves = [leaf for name, arg in zip(names, args, strict=True) for leaf in _named(arg, name)]
    arrays = [leaf for _, leaf in leaves if is_array(leaf)]

    def of_arrays(*arrays: Array) -> Any:
        remaining = iter(arrays)
        full = [next(remaining) if is_array(leaf) else leaf for _, leaf in leaves]
        return fn(*jax.tree.unflatten(jax.tree.structure(args), full))

    jaxpr, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
    held = (device.platform for array in arrays if isinstance(array, jax.Array) for device in array.devices())
    recorder, tensors = Recorder(next(held, jax.default_backend())), list[Tensor | None]()

    def measured(*arrays: Array) -> Statistics:
        results, numbers = recorder.program(jaxpr, [name for name, leaf in leaves if is_array(leaf)], arrays)
        tensors[:] = [result.tensor for result in results]
        return numbers

    options = {"xla_allow_excess_precision": False, **jax_compat.options_for_one_run()}
    numbers = jax.device_get(jax.jit(measured).lower(*arrays).compile(options)(*arrays))
    results = [name for name, _ in _named(shapes)]
    return finding.Measurements(recorder.frames, numbers).finding(list(zip(results, tensors, strict=True)))


def _named(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their paths: [('root/params/kernel', leaf), ...]."""
    return [("/".join(filter(None, (root, name))), leaf) for name, leaf in leaves_by_path(tree)]
