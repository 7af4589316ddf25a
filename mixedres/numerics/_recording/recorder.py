"""Evaluation of a traced program, operation by operation, that measures every floating-point array."""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs import control_flow
from mixedres._internal.tree import represents
from mixedres._internal.types import Array, Equation, Jaxpr
from mixedres.numerics._recording.frames import (
    CONSTANT,
    Frame,
    Index,
    Links,
    Path,
    Place,
    Statistics,
    Tensor,
    link,
    place,
)

# Their results have the elements of their operand, so one measurement is enough.
SAME_ELEMENTS = {"reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "neg", "copy", "copy_p"}
SAME_ELEMENTS |= {"pvary", "pcast"}
Numbers = dict[Path, jax.Array]
# Compiled operations that are kept for the next program.
KEPT = 4096


class Value(NamedTuple):
    """An array, or what a `Recorder` has for one, and the measured tensor with its elements."""

    array: Any
    tensor: Tensor | None = None
    choosers: tuple[Tensor, ...] = ()  # of integers: the tensors from which they were computed


@dataclasses.dataclass
class Tape:
    """Statistics of a frame, and of the frames inside, while it is traced."""

    frame: Frame
    numbers: list[Any] = dataclasses.field(default_factory=list)
    inner: Numbers = dataclasses.field(default_factory=dict)


def is_widening(eqn: Equation) -> bool:
    """Returns whether an equation converts floating-point numbers to a dtype that holds all of them."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = (jnp.result_type(atom.aval) for atom in (*eqn.invars, *eqn.outvars))
    both_floats = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return both_floats and represents(new, old)


class Site(NamedTuple):
    """The place of an equation: indices that lead to it, named scopes, its line, and the lines of its callers."""

    path: Path = ()
    scope: str = ""
    source: str = ""
    callers: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Kind:
    """Equations that share a compiled program, by what is the same: who evaluates them, primitives, types and more."""

    same: tuple[Any, ...]
    function: Callable[[list[Array]], list[Any]] = dataclasses.field(compare=False)
    options: dict[str, Any] = dataclasses.field(compare=False)  # of the compiler


@functools.lru_cache(KEPT)
def program(kind: Kind) -> Callable[[list[Array]], list[Any]]:
    """Returns the compiled function of a kind."""
    return jax.jit(kind.function, compiler_options=kind.options)


class Recorder:
    """Evaluates programs for one platform. A subclass defines what is measured."""

    # Primitives whose results are not measured, because the measured operand says the same.
    unmeasured = frozenset(SAME_ELEMENTS)
    # Names of the measurements that `operation` may return after the results of an equation.
    extras: tuple[str, ...] = ()
    # Optimization level of XLA on a CPU. Code for a program that runs once is compiled faster with 0 or 1.
    level = 0

    def __init__(self, platform: str) -> None:
        self.frames: dict[Path, Frame] = {}
        self.platform = platform
        # Called before each operation that is compiled alone.
        self.on_operation: Callable[[], object] = lambda: None
        self._is_whole = True

    @property
    def _options(self) -> dict[str, Any]:
        """Returns the options of the compiler: results are rounded to their dtype after every operation."""
        on_cpu = {"xla_backend_optimization_level": self.level} if self.platform == "cpu" else {}
        return {"xla_allow_excess_precision": False} | jax_compat.sound_options(self.platform) | on_cpu

    def measure(self, array: Array) -> Any:
        """Returns the statistics of a value, float32 (k,), or what `collect` takes for them."""
        raise NotImplementedError

    def collect(self, numbers: list[Any]) -> jax.Array:
        """Returns the results of `measure` as one array, float32 (tensors, k)."""
        return jnp.stack(numbers)

    def operation(self, eqn: Equation, arrays: list[Array]) -> list[Any]:
        """Returns the results of an equation without a body that is entered, and perhaps the `extras`."""
        return jax_compat.bind(eqn, *arrays)

    def shares(self, eqn: Equation) -> bool:
        """Returns whether equations like this one may share a compiled program."""
        return True

    def constant(self, array: Array) -> Any:
        """Returns a constant of the program in the form of a value."""
        return array

    def carried(self, array: Array) -> Any:
        """Returns a value in the form in which a scan carries it."""
        return array

    def kept(self, array: Array) -> Any:
        """Returns a value without what only `measure` needs."""
        return array

    def returned(self, array: Array) -> Any:
        """Returns what `run` returns of a result."""
        return array

    def run(
        self, jaxpr: Jaxpr, names: Sequence[str], arrays: Sequence[Array]
    ) -> tuple[list[Any], list[Tensor | None], Statistics]:
        """Runs a closed jaxpr on named arrays; returns `returned` and tensors of the results, and all statistics."""
        tensors: list[Tensor | None] = []

        def measured(*arrays: Array) -> tuple[list[Any], Numbers]:
            tape, named = self._tape(Frame("program", ())), enumerate(zip(arrays, names, strict=True))
            args = [self._argument(tape, array, (-1, i), link(), name) for i, (array, name) in named]
            results = self._body(jaxpr, tape, Site(), args)
            tensors[:] = [result.tensor for result in results]
            return [self.returned(result.array) for result in results], self._collected(tape)

        self._is_whole = bool(jax_compat.opened(jaxpr)[0].effects)
        run = jax.jit(measured, compiler_options=self._options) if self._is_whole else measured
        results, numbers = run(*arrays)
        return results, tensors, Statistics(self.frames, jax.device_get(numbers))

    def _tape(self, frame: Frame) -> Tape:
        self.frames[frame.path] = frame  # JAX may trace a body twice; the frames are the same then
        return Tape(frame)

    def _collected(self, tape: Tape) -> Numbers:
        """Returns float32 (tensors, k) for the frame of a tape and the frames inside, by path."""
        if self._is_alone(tape):
            own: Any = np.stack(jax.device_get(tape.numbers)) if tape.numbers else None
        else:
            numbers = [jax_compat.replicated(lambda x: x, number) for number in tape.numbers]
            own = self.collect(numbers) if numbers else None
        return ({} if own is None else {tape.frame.path: own}) | tape.inner

    def _is_alone(self, tape: Tape) -> bool:
        """Returns whether every operation of a frame is compiled alone."""
        return not self._is_whole and tape.frame.parent is None

    def _alone(self, eqn: Equation, arrays: list[Array]) -> list[Any]:
        """Returns `operation`, compiled alone."""
        self.on_operation()
        if self.shares(eqn) and (same := jax_compat.signature(eqn)) is not None:
            recorder = type(self)(self.platform)  # the cache keeps none with the frames of a program
            same = (type(self), self.platform, *same)
            return program(Kind(same, lambda arrays: recorder.operation(eqn, arrays), self._options))(arrays)
        return list(jax.jit(lambda arrays: self.operation(eqn, arrays), compiler_options=self._options)(arrays))

    def _compiled(self, tape: Tape, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function as a program of its own; in a frame that is compiled as a whole, the function itself."""
        return jax.jit(function, compiler_options=self._options) if self._is_alone(tape) else function

    def _measured(self, tape: Tape, array: Array, links: Links, **about: Any) -> Value:
        kept = self.kept(array)
        first = jax.tree.leaves(kept)[0]
        dtype = jnp.result_type(first)
        is_reference = type(jax.typeof(first)).__name__ == "AbstractRef"  # an array is measured when it is read
        if is_reference or not jnp.issubdtype(dtype, jnp.inexact):
            return Value(kept)
        tensor = Tensor(tape.frame, len(tape.numbers), dtype=dtype, shape=jnp.shape(first), links=links, **about)
        tape.numbers.append(jax_compat.replicated(self.measure, array))
        tape.frame.tensors.append(tensor)
        return Value(kept, tensor)

    def _argument(self, tape: Tape, array: Array, path: Path, links: Links, name: str = "") -> Value:
        return self._measured(tape, array, links, path=path, primitive="", scope="", source="", name=name)

    def _body(self, jaxpr: Jaxpr, tape: Tape, site: Site, args: Sequence[Value]) -> list[Value]:
        inner, consts = jax_compat.opened(jaxpr)
        known = map(self.constant, consts)
        constants = [self._argument(tape, x, (*site.path, -2, i), link(), CONSTANT) for i, x in enumerate(known)]

        def equation(i: int, eqn: Equation, operands: list[Value]) -> Sequence[Value]:
            scope = "/".join(part for part in (site.scope, jax_compat.name_stack(eqn)) if part)
            # Operations in JAX itself, such as the inside of jnp.where, have the line of the call.
            source, *callers = jax_compat.source_lines(eqn) or [site.source, *site.callers]
            here = Site((*site.path, i), scope, source, tuple(callers))
            return self._equation(tape, eqn, here, operands)

        return jax_compat.interpret(inner, constants, args, equation, lambda atom: Value(atom.val), frees=True)

    def _equation(self, tape: Tape, eqn: Equation, site: Site, args: list[Value]) -> Sequence[Value]:
        name = eqn.primitive.name
        if name == "shard_map":
            return self._shard_map(tape, eqn, site, args)
        if (body := control_flow.called(eqn, self.platform)) is not None:
            return self._body(body.jaxpr, tape, site, args[body.consts])
        if name == "scan" and eqn.params["length"]:
            return self._scan(tape, eqn, site, args)
        arrays = [arg.array for arg in args]
        results = self._alone(eqn, arrays) if self._is_alone(tape) else self.operation(eqn, arrays)
        if name in self.unmeasured or is_widening(eqn):
            same = args if len(args) >= len(results) else [args[0]] * len(results)
            return [arg._replace(array=self.kept(x)) for x, arg in zip(results, same, strict=False)]
        links, count = link(*(arg.tensor for arg in args)), len(eqn.outvars)
        for extra, array in zip(self.extras, results[count:], strict=False):
            self._measured(tape, array, link(), primitive=extra, **site._asdict())
        choosers = tuple(dict.fromkeys(x for arg in args for x in ([arg.tensor] if arg.tensor else arg.choosers)))
        # A selection by a comparison is named by itself.
        indices = args[1:] if name == "select_n" else args
        chosen = link(*(x for arg in indices if arg.tensor is None for x in arg.choosers))
        about = site._asdict() | {"primitive": name, "choosers": chosen}
        found = [self._measured(tape, result, links, **about) for result in results[:count]]
        return [x if x.tensor is not None else x._replace(choosers=choosers) for x in found]

    def _shard_map(self, tape: Tape, eqn: Equation, site: Site, args: list[Value]) -> Sequence[Value]:
        params, path = eqn.params, site.path
        tensors: list[Tensor | None] = []

        def function(*arrays: Array) -> tuple[tuple[Any, ...], Numbers]:
            inner = self._tape(Frame("devices", path, tape.frame))
            pairs = enumerate(zip(arrays, args, strict=True))
            values = [self._argument(inner, array, (*path, -1, i), link(arg.tensor)) for i, (array, arg) in pairs]
            results = self._body(params["jaxpr"], inner, site, values)
            tensors[:] = [result.tensor for result in results]
            return tuple(r.array for r in results), {path: x[None] for path, x in self._collected(inner).items()}

        by_device = PartitionSpec(jax_compat.manual_axes(eqn))
        mapped = jax_compat.shard_map_like(eqn, function, (tuple(params["out_specs"]), by_device))
        results, numbers = self._compiled(tape, mapped)(*(arg.array for arg in args))
        tape.inner |= numbers
        return [Value(array, tensor) for array, tensor in zip(results, tensors, strict=True)]

    def _scan(self, tape: Tape, eqn: Equation, site: Site, args: list[Value]) -> Sequence[Value]:
        params, path = eqn.params, site.path
        (body,) = control_flow.bodies(eqn, self.platform)
        consts, init, xs = args[body.consts], args[body.carry], args[body.slices]
        num_carry = len(init)
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

        def step(*arrays: Array) -> list[Any]:
            carry, slices = arrays[body.carry], arrays[body.slices]
            inner = self._tape(Frame("scan", path, tape.frame, length, reverse))
            state = [self._argument(inner, array, (*path, -1, i), carried(i)) for i, array in enumerate(carry)]
            pairs = enumerate(zip(slices, xs, strict=True), start=num_carry)
            parts = [self._argument(inner, array, (*path, -1, i), link(x.tensor)) for i, (array, x) in pairs]
            results = self._body(body.jaxpr, inner, site, [*consts, *state, *parts])
            tensors[:] = [result.tensor for result in results]
            following = [self.carried(result.array) for result in results[:num_carry]]
            return [*following, *(result.array for result in results[num_carry:]), self._collected(inner)]

        operands = [arg.array for arg in args]
        operands[body.carry] = map(self.carried, operands[body.carry])
        loop = self._compiled(tape, lambda *operands: control_flow.call(eqn, [body], [step], operands))
        *arrays, numbers = loop(*operands)
        tape.inner |= numbers

        def result_of(number: int) -> Links:
            iterations = [last] if number < num_carry else range(length)
            return lambda index: [found for i in iterations for found in place(tensors[number], (*index, i))]

        about = site._asdict() | {"primitive": "scan", "path": (*path, sys.maxsize)}  # after all of the body
        return [self._measured(tape, array, result_of(i), **about) for i, array in enumerate(arrays)]
