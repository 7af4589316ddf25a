"""`autocast`: half precision for any JAX function, decided on its whole graph."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres.autocast.coloring import color
from mixedres.autocast.evaluate import run
from mixedres.autocast.flatten import build
from mixedres.autocast.graph import Graph
from mixedres.autocast.rules import Lists

ListsLike = Lists | Mapping[str, Iterable[Any]] | None
DTYPES = ("float16", "bfloat16")


class PrecisionWarning(UserWarning):
    """Nothing was cast although there are products of float32: every one of them asks for full precision."""


def autocast(
    fn: Callable[..., Any], dtype: Any = jnp.float16, lists: ListsLike = None, *, level: str = "default"
) -> Callable[..., Any]:
    """`fn` with its products, and what is safe around them, computed in a half dtype.

    The graph of `fn` is traced, coloured as a whole by `lists`, and evaluated with casts where two dtypes meet.
    Arguments, results and their gradients keep their dtypes: parameters stay float32. A program without float32
    products comes back bit for bit. Composes with jax.jit, grad, vmap, checkpoint, shard_map, in either order. Every
    call traces `fn` anew, so put it inside a `jax.jit`: `jax.jit(autocast(fn))`.

    Args:
      fn: a function of pytrees of arrays that returns pytrees of arrays. Arguments that are no arrays (strings, None,
        functions, Python numbers) reach it unchanged.
      dtype: float16 or bfloat16. float16 gradients need a loss scale, see `mixedres.precision`.
      lists: which primitive may be half: `Lists`, or moves on the default ones such as {'deny': {'tanh'}}.
      level: 'default', 'allow_only' (only the products are half) or 'infer_as_deny', see `Lists.at_level`.

    Returns:
      A function with the signature of `fn`, and the structure and dtypes of its results.

    Raises:
      TypeError: for a `fn` that cannot be called, or (when called) that returns something else than arrays.
      ValueError: for a dtype, lists or a level that is not allowed.
    """
    rewrite = functools.partial(autocast, dtype=dtype, lists=lists, level=level)
    half, resolved = checked(fn, dtype, lists, level)

    @functools.wraps(fn, updated=())
    def rewritten(*args: Any, **kwargs: Any) -> Any:
        graph, arrays, tree = traced(fn, half, resolved, args, kwargs)
        if not graph.has_half(()):
            _warn_of_precision(graph)
        return jax.tree.unflatten(tree, run(graph, rewrite, arrays))

    return rewritten


def checked(fn: Callable[..., Any], dtype: Any, lists: ListsLike, level: str) -> tuple[np.dtype, Lists]:
    """The dtype and the lists that are meant; see `autocast` for what is raised."""
    if not callable(fn):
        raise TypeError(f"autocast takes a function, got {fn!r}")
    try:
        half = np.dtype(jnp.dtype(dtype if dtype is not None else "none"))
    except TypeError:
        raise ValueError(f"dtype must be float16 or bfloat16, got {dtype!r}") from None
    if half.name not in DTYPES:
        raise ValueError(f"dtype must be float16 or bfloat16, got {half.name}")
    return half, Lists.of(lists, half).at_level(level)


def traced(
    fn: Callable[..., Any], dtype: np.dtype, lists: Lists, args: Any, kwargs: Any
) -> tuple[Graph, list[Any], Any]:
    """(coloured graph, array arguments, structure of the results) of a call of `fn`."""
    leaves, tree = jax.tree.flatten((args, kwargs))
    is_array = [isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct) for leaf in leaves]
    arrays = [leaf for leaf, dynamic in zip(leaves, is_array, strict=True) if dynamic]
    structure = None

    def flat(*arrays: Any) -> list[Any]:
        nonlocal structure
        remaining = iter(arrays)
        full = [next(remaining) if dynamic else leaf for leaf, dynamic in zip(leaves, is_array, strict=True)]
        call_args, call_kwargs = jax.tree.unflatten(tree, full)
        results = fn(*call_args, **call_kwargs)
        _check_arrays(fn, results)
        flat_results, structure = jax.tree.flatten(results)
        return flat_results

    flat.__name__ = getattr(fn, "__name__", "fn")  # for the messages of tracing errors
    jaxpr = jax.make_jaxpr(flat)(*arrays)
    return build(jaxpr, lists, dtype, color), arrays, structure


def _check_arrays(fn: Callable[..., Any], results: Any) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(results):
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            name = getattr(fn, "__name__", repr(fn))
            where = f" at {jax.tree_util.keystr(path)}" if path else ""
            raise TypeError(
                f"{name} returns a {type(leaf).__name__}{where}; under autocast, as under jax.jit, a function returns "
                "arrays only"
            )


def _warn_of_precision(graph: Graph) -> None:
    kept = [node for node in graph.nodes if node.category == "allow" and node.reason.startswith("precision=")]
    if kept:
        warnings.warn(
            f"autocast casts nothing: all {len(kept)} products ask for float32 ({kept[0].reason}); "
            "is jax_default_matmul_precision set? explain(fn)(*args) lists them",
            PrecisionWarning,
            stacklevel=3,
        )
