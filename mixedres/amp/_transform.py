"""`autocast`: half precision for any JAX function, by a rewrite of its graph."""

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal import jax_compat
from mixedres._internal.names import PRESETS
from mixedres._internal.types import Array, DType, Function, PyTree
from mixedres.amp._builder import Settings, build
from mixedres.amp._evaluation.program import run
from mixedres.amp._flax_modules import Arguments, guarded
from mixedres.amp._graph import Graph, Scope
from mixedres.amp._keep import Keep, check_match
from mixedres.amp._loops import unsteady_loops
from mixedres.amp._rules import SPARSE_PRODUCTS, Lists

# Type of the argument `lists`: `Lists`, or {list: primitives to move to the list}; None for the default.
ListsLike = Lists | Mapping[str, Iterable[Any]] | None
DTYPES = ("float16", "bfloat16")
ALLREDUCE_DTYPES = ("param", "compute")
_FLOAT8 = re.compile(r"(?i)f(p|loat)?8|e4m3|e5m2")


class PrecisionWarning(UserWarning):
    """Warning that autocast casts no product, or that rounding may delay the end of a while loop.

    Autocast casts no product if all products ask for float32, for example by jax_default_matmul_precision, or are of
    sparse matrices. The warning comes when the rewritten function is called or traced, for a loop once in a process.
    `Report.notes` of `explain` name the same products and loops.
    """


def autocast(
    fn: Function,
    dtype: DType = jnp.float16,
    lists: ListsLike = None,
    *,
    level: str = "default",
    keep_float32: str = "",
    allreduce_dtype: str = "param",
) -> Callable[..., Any]:
    """Returns `fn` with products, and operations that are safe around them, computed in a half dtype.

    The graph of `fn` is traced, colored as a whole by `lists`, and evaluated with casts where two dtypes meet. The
    dtypes of arguments, results and gradients do not change: parameters stay float32. A float32 program without
    products is unchanged bit for bit. Composes with jax.jit, grad, vmap, checkpoint and shard_map in either order.
    Every call traces `fn` anew, so use it inside a `jax.jit`:

        step = jax.jit(autocast(lambda x, w: jnp.tanh(x @ w)))
        y = step(x, w)  # float32, from a float16 product

    Args:
      fn: a function of pytrees of arrays. Other arguments (strings, functions, Python numbers) are passed unchanged.
      dtype: float16 or bfloat16, also by name or by the name of a preset: "fp16", "bf16". float16 gradients need a loss
        scale, see `mixedres.precision`.
      lists: which primitives may be half: `Lists`, or changes of the default lists such as {'deny': {'tanh'}}.
      level: 'default', 'allow_only' (only products are half) or 'infer_as_deny', see `Lists.at_level`.
      keep_float32: regular expression of paths whose operations stay in float32, such as '^/head$'; see `Keep`.
      allreduce_dtype: dtype in which the gradient of a float32 array that `fn` copies to the devices of a `shard_map`
        (by `pvary`, `pcast` or `all_gather`) is summed over the devices. 'param': float32; 'compute': the half dtype.

    Returns:
      A function with the signature of `fn` whose results have the same structure and dtypes; numbers become arrays.

    Raises:
      TypeError: for a `fn` that is not callable, for other `lists`, and (when called) for results that are not arrays.
      ValueError: for an invalid option, and (when called) for an expression that matches no path.

    Warns:
      PrecisionWarning: when called, if `fn` has products and none is cast, and for some while loops; see there.
    """
    return rewrite(fn, checked(fn, dtype, lists, level, keep_float32, allreduce_dtype))


def checked(
    fn: Function, dtype: DType, lists: ListsLike, level: str, keep_float32: str, allreduce_dtype: str
) -> Settings:
    """Validates the arguments of `autocast`."""
    if not callable(fn):
        raise TypeError(f"autocast takes a function, got {fn!r}")
    half = half_dtype(dtype)
    if allreduce_dtype not in ALLREDUCE_DTYPES:
        raise ValueError(f"allreduce_dtype {allreduce_dtype!r} is unknown; use {' or '.join(ALLREDUCE_DTYPES)}")
    return Settings(half, Lists.parse(lists, half).at_level(level), Keep(keep_float32), allreduce_dtype)


def half_dtype(dtype: DType) -> np.dtype:
    """Returns the half dtype that an argument of `autocast` names, such as "fp16" or jnp.float16.

    Raises:
      ValueError: for anything else.
    """
    given = PRESETS[dtype].compute_dtype if isinstance(dtype, str) and dtype in PRESETS else dtype
    hint = "; qwix computes products in float8" if _FLOAT8.search(str(dtype)) else ""
    try:
        half = np.dtype(jnp.dtype(given if given is not None else "none"))
    except TypeError:
        raise ValueError(f"dtype must be float16 or bfloat16, got {dtype!r}{hint}") from None
    if half.name not in DTYPES:
        raise ValueError(f"dtype must be float16 or bfloat16, got {half.name}{hint}")
    return np.dtype(half.name)  # in the byte order of this machine


@dataclasses.dataclass(frozen=True)
class Program:
    """A function traced on its arguments and colored, for each platform that a `lax.platform_dependent` in it names."""

    graph: Graph
    others: Mapping[str, Graph]
    arrays: Sequence[Any]
    structure: Any  # of the results, after which the graphs return the changes in nnx modules

    def run(self, settings: Settings, arrays: Sequence[Array]) -> list[Any]:
        """Evaluates the graph of the platform for which the call is compiled."""

        def on(graph: Graph) -> Callable[..., list[Any]]:
            derivative = functools.partial(rewrite, settings=settings, platform=graph.platform)
            return lambda *arrays: run(graph, derivative, arrays)

        if not self.others:
            return on(self.graph)(*arrays)
        branches = {platform: on(graph) for platform, graph in self.others.items()}
        results: list[Any] = jax.lax.platform_dependent(*arrays, default=on(self.graph), **branches)
        return results


def rewrite(
    fn: Function, settings: Settings, scope: Scope | None = None, platform: str | None = None
) -> Callable[..., Any]:
    """Returns `fn` rewritten; a part of a program, such as a custom derivative, has a scope and a platform."""

    @functools.wraps(fn, updated=())
    def rewritten(*args: PyTree, **kwargs: Any) -> Any:
        call = Arguments(args, kwargs)
        program = traced(fn, settings, call, scope, platform)
        if not any(graph.has_half(()) for graph in (program.graph, *program.others.values())):
            _warn_of_products(program.graph)
        _warn_of_loops(program.graph)
        results = program.run(settings, program.arrays)
        call.update(results[program.structure.num_leaves :])
        return jax.tree.unflatten(program.structure, results[: program.structure.num_leaves])

    return rewritten


def traced(
    fn: Function, settings: Settings, call: Arguments, scope: Scope | None = None, platform: str | None = None
) -> Program:
    """Traces a call of `fn` and colors its graphs; `scope` and `platform` as in `rewrite`."""
    leaves = call.leaves
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) for leaf in leaves]
    arrays = [leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic]
    structure = None

    def flat(*arrays: Array) -> list[Any]:
        nonlocal structure
        remaining = iter(arrays)
        full = [next(remaining) if dynamic else leaf for leaf, dynamic in zip(leaves, is_array, strict=True)]
        with guarded():
            results, changes = call.apply(fn, full)
        _check_arrays(fn, results)
        flat_results, structure = jax.tree.flatten(results)
        return flat_results + changes

    flat.__name__ = getattr(fn, "__name__", "fn")  # for the messages of tracing errors
    jaxpr = jax.make_jaxpr(flat)(*arrays)
    whole = scope is None

    def colored(platform: str | None) -> Graph:
        return build(jaxpr, settings, scope or Scope(), platform, whole=whole)

    graph = colored(platform)
    others = {name: colored(name) for name in jax_compat.platforms(jaxpr)} if whole else {}
    if whole:
        check_match(settings.keep, [graph, *others.values()])
    return Program(graph, others, arrays, structure)


def _check_arrays(fn: Function, results: PyTree) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            name = getattr(fn, "__name__", repr(fn))
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"{name} returns a {type(leaf).__name__}{where}; under autocast, as under jax.jit, a function returns "
                "arrays only"
            )


def _warn_of_products(graph: Graph) -> None:
    """Warns if a program without half products has products that are not cast for their precision or as sparse."""
    precise = [node for node in graph.nodes if node.category == "allow" and node.reason.startswith("precision=")]
    why = ""
    if precise:
        why = (
            f"all {len(precise)} products ask for float32 ({precise[0].reason}); "
            "is jax_default_matmul_precision set? explain(fn)(*args) lists them"
        )
    elif count := sum(node.primitive in SPARSE_PRODUCTS for node in graph.nodes):
        why = f"all {count} products are of sparse matrices, which stay float32"
    if why:
        warnings.warn(f"autocast casts nothing: {why}", PrecisionWarning, stacklevel=3)


# Source lines of the loops that were warned of: each line is warned of once in a process.
_warned_lines: set[str] = set()


def _warn_of_loops(graph: Graph) -> None:
    for place, warning in unsteady_loops(graph):
        if place not in _warned_lines:
            _warned_lines.add(place)
            warnings.warn(warning, PrecisionWarning, stacklevel=3)
