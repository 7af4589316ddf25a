"""Names for types, most of which are `Any` or a plain dictionary to a checker."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import jax
    import numpy as np

    # One array: a `jax.Array`, a tracer or a numpy array. The module is imported where JAX is not.
    Array: TypeAlias = jax.Array | np.ndarray
else:
    Array = Any

# Arrays in nested containers: dictionaries, tuples, and dataclasses that are registered with JAX.
PyTree: TypeAlias = Any
# Parameters of a network by module and name; gradients and updates have the same structure.
Params: TypeAlias = Any
# {'params', 'batch_stats'}, as the `apply` of a Flax module takes them. 'batch_stats' is empty without batch norm.
Variables: TypeAlias = dict[str, Any]
# {'image', 'label'}, arrays on the devices.
Batch: TypeAlias = dict[str, Any]
# Scalars by name, on the devices or on the host.
Metrics: TypeAlias = dict[str, Any]
# A value of JSON, and an object of JSON, such as a flat config or the record of a checkpoint.
Json: TypeAlias = Any
Record: TypeAlias = dict[str, Any]
# A dtype, or what numpy takes for one.
DType: TypeAlias = Any
# The `apply` of a Flax module: (variables, images, train) -> logits.
ApplyFn: TypeAlias = Callable[..., Any]
# A function from parameters to a pytree of booleans.
MaskFn: TypeAlias = Callable[[PyTree], PyTree]
# A jitted step, and a step that was compiled ahead.
JittedStep: TypeAlias = Any
CompiledStep: TypeAlias = Callable[..., Any]
# Programs of `jax.make_jaxpr`, closed or open, and their parts; JAX has no public types that say more.
Jaxpr: TypeAlias = Any
Equation: TypeAlias = Any
Atom: TypeAlias = Any
Aval: TypeAlias = Any
# A function of pytrees of arrays, such as a loss or the `apply` of a network.
Function: TypeAlias = Callable[..., Any]
# Precision of a product: None, a name or a `jax.lax.Precision`.
PrecisionLike: TypeAlias = Any
