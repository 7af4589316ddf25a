"""`first_nonfinite`: one run of a function that measures every array in it."""

from collections.abc import Sequence
from typing import Any

import jax

from mixedres._internal import jax_compat
from mixedres._internal.tree import is_array, leaves_by_path
from mixedres._internal.types import Array, Function, PyTree
from mixedres.numerics._nonfinite.finding import Finding, Measurements
from mixedres.numerics._nonfinite.interpreter import Recorder, Statistics
from mixedres.numerics._nonfinite.tensors import Tensor


def first_nonfinite(fn: Function, *args: PyTree, names: Sequence[str] = ()) -> Finding:
    """Runs `fn(*args)` and finds the first array that is not finite.

    For every floating-point array it measures whether it is finite and its largest finite magnitude, in called
    functions, derivatives and the bodies of scan and shard_map too; a `while` loop or a `cond` counts as one operation.
    Results are rounded to their dtype after every operation, as the program is written; compiled normally, it may
    compute intermediate values with more digits and a larger range.

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
    recorder, tensors = Recorder(_platform(arrays)), list[Tensor | None]()

    def measured(*arrays: Array) -> Statistics:
        results, numbers = recorder.program(jaxpr, [name for name, leaf in leaves if is_array(leaf)], arrays)
        tensors[:] = [result.tensor for result in results]
        return numbers

    compiled = (
        jax.jit(measured)
        .lower(*arrays)
        .compile(compiler_options={"xla_allow_excess_precision": False, **jax_compat.options_for_one_run()})
    )
    numbers = jax.device_get(compiled(*arrays))
    results = [name for name, _ in _named(shapes)]
    return Measurements(recorder.frames, numbers).finding(list(zip(results, tensors, strict=True)))


def _named(tree: PyTree, root: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of a tree with their paths: [('root/params/kernel', leaf), ...]."""
    return [("/".join(filter(None, (root, name))), leaf) for name, leaf in leaves_by_path(tree)]


def _platform(arrays: Sequence[Array]) -> str:
    """Returns the platform of the devices that hold the arrays, or the default one for arrays on the host."""
    held = (device.platform for array in arrays if isinstance(array, jax.Array) for device in array.devices())
    return next(held, jax.default_backend())
