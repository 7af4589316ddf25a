"""Names of types that are `Any` or a plain dictionary to a checker. Importing this imports no JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import numpy as np

# Containers of arrays, nested: dictionaries, tuples, dataclasses that are registered with JAX.
PyTree: TypeAlias = Any
# Parameters of a network, {module: {name: array}}, and gradients or updates of the same structure.
Params: TypeAlias = Any
# {'params': ..., 'batch_stats': ...}, as a Flax module takes them; networks without running statistics have no second.
Variables: TypeAlias = dict[str, Any]
# A dtype, or what JAX takes for one.
DType: TypeAlias = Any
# Values of JSON: numbers, texts, None, lists and dictionaries.
Json: TypeAlias = Any
Record: TypeAlias = dict[str, Any]
# {'image', 'label'} on the devices, and scalars by name.
Batch: TypeAlias = "dict[str, jax.Array]"
Metrics: TypeAlias = "dict[str, jax.Array]"
HostArrays: TypeAlias = "dict[str, np.ndarray]"
# A function from parameters to a pytree of booleans.
MaskFn: TypeAlias = Callable[[PyTree], PyTree]
# The `apply` of a Flax module: (variables, images, train=...) -> logits.
ApplyFn: TypeAlias = Callable[..., Any]
# A jitted or compiled step.
Step: TypeAlias = Callable[..., Any]
