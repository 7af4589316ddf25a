"""A function traced on its arguments, with the names of arguments and results."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from mixedres._internal.tree import is_array as is_array_or_number
from mixedres._internal.tree import leaves_by_path
from mixedres._internal.types import Array, Function, Jaxpr, PyTree


@dataclasses.dataclass(frozen=True)
class Traced:
    """A traced function: its closed program, arguments and results, and the platform where the arguments are."""

    jaxpr: Jaxpr
    arrays: list[Any]
    names: list[str]
    results: list[str]
    platform: str

    @classmethod
    def of(cls, fn: Function, args: Sequence[PyTree], names: Sequence[str]) -> Traced:
        """Traces `fn(*args)`; ValueError: for another number of names; TypeError: for a result that is no array."""
        names = list(names) or [f"argument {i}" for i in range(len(args))]
        if len(names) != len(args):
            raise ValueError(f"names must have one name for each of the {len(args)} arguments, got {names!r}")
        leaves = [leaf for name, arg in zip(names, args, strict=True) for leaf in _named(arg, name)]
        arrays = [leaf for _, leaf in leaves if is_array(leaf)]

        def of_arrays(*arrays: Array) -> Any:
            remaining = iter(arrays)
            full = [next(remaining) if is_array(leaf) else leaf for _, leaf in leaves]
            results = fn(*jax.tree.unflatten(jax.tree.structure(args), full))
            for leaf in jax.tree.leaves(results):
                if not is_array_or_number(leaf):
                    name = getattr(fn, "__name__", type(fn).__name__)
                    raise TypeError(f"{name} returns a {type(leaf).__name__}; give a function that returns arrays only")
            return results

        jaxpr, shapes = jax.make_jaxpr(of_arrays, return_shape=True)(*arrays)
        held = (device.platform for array in arrays if isinstance(array, jax.Array) for device in array.devices())
        return cls(
            jaxpr,
            arrays,
            [name for name, leaf in leaves if is_array(leaf)],
            [name for name, _ in _named(shapes)],
            next(held, jax.default_backend()),
        )


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array, and not a number of Python."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


def _named(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their paths: [('root/params/kernel', leaf), ...]."""
    return [("/".join(filter(None, (root, name))), leaf) for name, leaf in leaves_by_path(tree)]
