"""Leaves of a pytree: their paths, and what kind of array each is."""

import hashlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres._internal.types import DType

# Dtypes; an array's dtype is compared with them ten times as fast as with jnp.float32.
FLOAT32 = np.dtype(np.float32)
HALF = (np.dtype(jnp.float16), np.dtype(jnp.bfloat16))


def leaf_path(path: Any) -> str:
    """Returns the path of a leaf, 'params/head/kernel', as this library spells it; '' for a tree that is a leaf."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def leaves_by_path(tree: Any) -> list[tuple[str, Any]]:
    """Returns [(path, leaf), ...] in the order of `jax.tree.leaves`; paths may repeat ('1' and 1 as keys)."""
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", ())
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, variable))
    return [(leaf_path(path), array) for path, leaf in leaves for array in jax.tree.leaves(leaf)]


def is_array(leaf: Any) -> bool:
    """Returns whether a leaf is an array or a number, which a program can be traced for, and not, say, a function."""
    return hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Returns {'params/head/kernel': leaf, ...}."""
    return {leaf_path(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def fingerprint(variables: Any) -> str:
    """Returns SHA-256, in hexadecimal, over path, dtype, shape and bytes of every array of a pytree."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(variables):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}\n".encode())
        digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def is_half(x: Any) -> bool:
    """Returns whether an array, or the aval of an array, is float16 or bfloat16."""
    return getattr(x, "dtype", None) in HALF


def is_inexact(x: Any) -> bool:
    """Returns whether an array, the aval of an array or a number has a floating-point or complex dtype."""
    return bool(jnp.issubdtype(jnp.result_type(x), jnp.inexact))


def at_least_float32(dtype: DType) -> np.dtype[Any]:
    """Returns float32, or the given dtype of real numbers if it is wider; for strict promotion too."""
    given = np.dtype(jnp.dtype(dtype))
    return given if given.itemsize > 4 else np.dtype(np.float32)


def represents(wide: DType, narrow: DType) -> bool:
    """Returns whether a floating-point dtype has every number of another one, such as float32 those of float8_e5m2."""
    new, old = map(jnp.finfo, (wide, narrow))
    return bool(new.nmant >= old.nmant and new.maxexp >= old.maxexp and new.minexp <= old.minexp)
