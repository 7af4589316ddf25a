"""Statistics of values and of their gradients, which the custom backward pass of `tap` returns as gradients."""

import contextlib
import contextvars
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.xla_metadata import set_xla_metadata

from mixedres._internal import jax_compat
from mixedres._internal.types import Array, Function, PyTree
from mixedres.numerics.counting.histograms import BINS, Exponents, exponents

T = TypeVar("T")
# The bins, and the number of executions of the tap.
_SLOTS = BINS + 1
# Gradients are float32, which counts to 2**24: with separate low and high parts, sums of 4,096 counts are exact.
_LOW_BITS = 12
_SHAPE = (2, 2, _SLOTS)  # (value or gradient, low or high part, bin)


@dataclasses.dataclass
class _Capture:
    """Mode of taps: they add to `names`, return gradients of `dummies`, and mark what the loss reached."""

    names: dict[str, np.dtype] = dataclasses.field(default_factory=dict)
    dummies: dict[str, jax.Array] = dataclasses.field(default_factory=dict)
    reached: set[str] = dataclasses.field(default_factory=set)


_capture: contextvars.ContextVar[_Capture | None] = contextvars.ContextVar("capture", default=None)
_serial = itertools.count()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TapStatistics:
    """Counts of taps on the device: a pytree whose arrays add up over devices, batches and steps.

    Attributes:
      names: names of the taps, in the order of execution.
      dtypes: value dtypes of the taps, in the same order.
      counts: for each tap float32 (2, 2, BINS + 1): of the value and of its gradient, a low and a high part of every
        count, which is low + 4096 * high. The last slot counts executions. `counting.read` converts them to histograms.
    """

    names: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    dtypes: tuple[np.dtype, ...] = dataclasses.field(metadata={"static": True})
    counts: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Tapped:
    """Statistics of one tap on the host. A tap is a call of `numerics.tap`, which gives a name to a value.

    Attributes:
      dtype: dtype of the value.
      value: histogram of the exponents of the value's elements, over all executions.
      gradient: histogram of the exponents of the elements of the value's gradient, over all executions.
      executions: number of executions; every iteration, device and example of a vmap counts.
    """

    dtype: np.dtype
    value: Exponents
    gradient: Exponents
    executions: int


def tap(x: T, name: str) -> T:
    """Returns `x`; while statistics are taken, counts its floating-point arrays under `name`.

        y = tap(x @ w, "product")

    Taps of the same name are counted together. The leaves of a pytree are named 'name[0]', "name['key']" and so on.
    """
    capture = _capture.get()
    if capture is None:
        return x
    same: T = jax.tree_util.tree_map_with_path(lambda path, leaf: _tapped(capture, name, path, leaf), x)
    return same


def _tapped(capture: _Capture, name: str, path: Any, leaf: Array) -> Any:
    if not isinstance(leaf, jax.Array) or not jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf
    name += jax.tree_util.keystr(path)
    capture.names.setdefault(name, leaf.dtype)
    if name not in capture.dummies:
        return leaf
    dummy = jax_compat.vary_over(jax_compat.varying_axes(leaf), capture.dummies[name])
    return _identity(partial(capture.reached.add, name), leaf, dummy)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _identity(mark: Callable[[], None], x: jax.Array, dummy: jax.Array) -> jax.Array:
    """Returns `x`; `mark` is called when the backward pass is traced."""
    return x


def _forward(mark: Callable[[], None], x: jax.Array, dummy: jax.Array) -> tuple[jax.Array, jax.Array]:
    # The residual is the histogram, not x; the product with the dummy makes it vary over the same mesh axes.
    return x, _counted(x) + 0.0 * dummy[0]


def _backward(mark: Callable[[], None], value: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    mark()
    return gradient, jnp.stack([value, _counted(gradient)])


_identity.defvjp(_forward, _backward)


def _counted(x: jax.Array) -> jax.Array:
    """Counts of `x` as float32 (low or high part, _SLOTS); the last slot is 1 for this execution."""
    counts = jnp.concatenate([exponents(x), jnp.ones(1, jnp.uint32)])
    low, high = counts & np.uint32(2**_LOW_BITS - 1), counts >> np.uint32(_LOW_BITS)
    return jnp.stack([low, high]).astype(jnp.float32)


@contextlib.contextmanager
def _capturing(capture: _Capture) -> Iterator[None]:
    token = _capture.set(capture)
    try:
        # New metadata miss the trace cache of jit: a function that was traced before is traced again with taps.
        with set_xla_metadata(taps=str(next(_serial))):
            yield
    finally:
        _capture.reset(token)


def names(fn: Function, *args: PyTree) -> dict[str, np.dtype]:
    """Returns {name: dtype} of the taps that ``fn(*args)`` executes, in order; only traces `fn`."""
    capture = _Capture()
    with _capturing(capture):
        jax.eval_shape(lambda *a: fn(*a), *args)
    return capture.names


def tapped_value_and_grad(
    fn: Function, argnums: int | Sequence[int] = 0, has_aux: bool = False, select: Collection[str] | None = None
) -> Callable[..., tuple[Any, Any, TapStatistics]]:
    """Returns `jax.value_and_grad` of `fn` that gives (value, gradients, `TapStatistics` of the taps in `fn`).

    `select`: name or names of the taps to count, which may be empty; None for all. Names without a tap are ignored.
    Strings and switches are given to the result by name, because arguments given by place are traced.

    Raises:
      ValueError: when called, if `fn` executes no tap and `select` is None.
    """
    chosen = (select,) if isinstance(select, str) else select
    wanted = (argnums,) if isinstance(argnums, int) else tuple(argnums)

    def run(*args: PyTree, **kwargs: PyTree) -> tuple[Any, Any, TapStatistics]:
        called = partial(fn, **kwargs)
        found = {name: dtype for name, dtype in names(called, *args).items() if chosen is None or name in chosen}
        if not found and chosen is None:
            raise ValueError("the function executes no tap; call numerics.tap(x, name) in it")

        capture = _Capture()

        def with_dummies(dummies: dict[str, jax.Array], *args: PyTree) -> Any:
            capture.dummies = dummies
            with _capturing(capture):
                return called(*args)

        dummies = {name: jnp.zeros(_SHAPE, jnp.float32) for name in found}
        shifted = (0, *(number + 1 if number >= 0 else number for number in wanted))
        value, (statistics, *gradients) = jax.value_and_grad(with_dummies, shifted, has_aux)(dummies, *args)
        reached = tuple(name for name in found if name in capture.reached)
        dtypes, counts = tuple(found[name] for name in reached), tuple(statistics[name] for name in reached)
        gradients = gradients[0] if isinstance(argnums, int) else tuple(gradients)
        return value, gradients, TapStatistics(reached, dtypes, counts)

    return run


def read(statistics: TapStatistics) -> dict[str, Tapped]:
    """Converts the statistics of `tapped_value_and_grad`, or sums of them, to {name: `Tapped`} on the host.

    Leaves out taps that were never executed, for example in a branch that was not taken.
    """
    read = {}
    for name, dtype, parts in zip(statistics.names, statistics.dtypes, jax.device_get(statistics.counts), strict=True):
        counts = np.asarray(parts).astype(np.uint64)
        counts = counts[:, 0] + (counts[:, 1] << np.uint64(_LOW_BITS))
        executions = int(counts[0, -1])
        if executions:
            read[name] = Tapped(dtype, Exponents(counts[0, :-1]), Exponents(counts[1, :-1]), executions)
    return read


def tap_modules(fn: Callable[..., T]) -> Callable[..., T]:
    """Returns `fn` with a tap on the result of every Linen module that it calls, named by its path: 'block1/conv2'.

    All calls of a module are one tap; methods other than `__call__` have none. The outermost module has a tap, with the
    name of its class, only if it contains no other module.
    """
    import flax.linen as nn  # numerics needs JAX alone

    def run(*args: PyTree, **kwargs: Any) -> T:
        inside = 0

        def interceptor(call: Callable[..., Any], args: PyTree, kwargs: Any, context: Any) -> Any:
            nonlocal inside
            before = inside
            result = call(*args, **kwargs)
            path = "/".join(context.module.path)
            if context.method_name != "__call__" or (not path and inside > before):
                return result
            inside += 1
            return tap(result, path or type(context.module).__name__)

        with nn.intercept_methods(interceptor):
            return fn(*args, **kwargs)

    return run
