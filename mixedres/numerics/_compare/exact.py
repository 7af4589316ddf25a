"""Evaluation of an equation in float32: the same operation on the same numbers, without the roundings to half."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mixedres._internal import jax_compat
from mixedres._internal.jaxprs import control_flow
from mixedres._internal.tree import HALF, is_half
from mixedres._internal.types import Array, DType, Equation, Function, Jaxpr
from mixedres.numerics._compare.constants import evenly_spaced
from mixedres.numerics._recording.recorder import Kind, program

# They run once, on the numbers of the half program. The float32 program goes on from their results. So do operations on
# mutable arrays and other operations with effects.
MEETING = {"bitcast_convert_type", "pure_callback", "pallas_call"}
_DEFAULTS = (None, lax.Precision.DEFAULT, (lax.Precision.DEFAULT, lax.Precision.DEFAULT))


def rounds(eqn: Equation) -> bool:
    """Returns whether an equation, or an equation in its bodies, has half operands or results."""
    inside = (inner for body in jax_compat.bodies(eqn) for inner in jax_compat.equations(body))
    atoms = (atom for one in (eqn, *inside) for atom in (*one.invars, *one.outvars))
    return any(is_half(atom.aval) for atom in atoms)


def widened(array: Array) -> Any:
    """Returns a half array in float32, and any other array as it is."""
    if not is_half(array):
        return array
    if isinstance(array, jax.Array):
        with jax_compat.mesh_of(array):
            return lax.convert_element_type(array, jnp.float32)
    return np.asarray(array, np.float32)


def evaluate(eqn: Equation, args: Sequence[Array], platform: str) -> list[Any]:
    """Evaluates an equation, and its bodies, in float32 instead of half; so are the operands `args`."""
    name, params = eqn.primitive.name, eqn.params
    if found := control_flow.bodies(eqn, platform):
        return control_flow.call(eqn, found, [in_float32(body.jaxpr, platform) for body in found], args)
    if name == "reduce_precision" and not _is_coarser(eqn):
        return list(args)
    if name == "convert_element_type" and jnp.result_type(args[0]) == _wide(params["new_dtype"]):
        return list(args)
    changed = {key: _changed(value, platform) for key, value in params.items()}
    if platform != "cpu" and "precision" in params and params["precision"] in _DEFAULTS:
        changed["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)  # the default may be TF32
    return jax_compat.bind(eqn, *args, **changed)


def _is_coarser(eqn: Equation) -> bool:
    """Returns whether a `reduce_precision` rounds to fewer digits than its operand has, as in a fake quantization."""
    own = jnp.finfo(eqn.invars[0].aval.dtype)  # type: ignore[no-untyped-call]
    return bool(eqn.params["mantissa_bits"] < own.nmant or eqn.params["exponent_bits"] < own.nexp)


def kind(eqn: Equation, platform: str) -> Kind | None:
    """Returns the kind of an equation in float32; None if it has a body or effects, or cannot be hashed."""
    found = jax_compat.signature(eqn)
    if found is None or eqn.effects or eqn.primitive.name in MEETING or list(jax_compat.bodies(eqn)):
        return None
    params = tuple((key, _changed(value, platform)) for key, value in eqn.params.items())
    types = tuple((atom.aval.shape, _wide(atom.aval.dtype)) for atom in eqn.invars)
    same, options = (platform, eqn.primitive, params, types), jax_compat.options_for_one_run(platform)
    return Kind(same, lambda arrays: evaluate(eqn, arrays, platform), options)


def on_host(eqn: Equation, kind: Kind, arrays: Sequence[np.ndarray]) -> list[Any]:
    """Returns the results of an equation in float32, from NumPy where it moves or converts, without compiling."""
    name, wide = eqn.primitive.name, [widened(array) for array in arrays]
    shape, dtype = eqn.outvars[0].aval.shape, _wide(eqn.outvars[0].aval.dtype)
    if name == "squeeze" or (name == "reshape" and eqn.params["dimensions"] is None):
        return [wide[0].reshape(shape)]
    if name == "transpose":
        return [wide[0].transpose(eqn.params["permutation"])]
    if name == "broadcast_in_dim":
        places = eqn.params["broadcast_dimensions"]
        kept = [wide[0].shape[places.index(i)] if i in places else 1 for i in range(len(shape))]
        return [np.broadcast_to(wide[0].reshape(kept), shape)]
    if name == "convert_element_type" and {wide[0].dtype, dtype} <= {np.dtype(np.float32), np.dtype(np.float64)}:
        return [wide[0].astype(dtype)]
    return [np.asarray(x) for x in program(kind)(wide)]


def in_float32(jaxpr: Jaxpr, platform: str) -> Function:
    """Returns the function of a body, evaluated as by `evaluate`."""
    inner, consts = jax_compat.opened(jaxpr)
    wide = [widened(x) if (table := evenly_spaced(x)) is None else table for x in consts]

    def run(*args: Array) -> list[Any]:
        return jax_compat.interpret(
            inner, wide, args, lambda _, eqn, args: evaluate(eqn, args, platform), lambda x: widened(x.val)
        )

    return run


def _wide(dtype: DType) -> np.dtype:
    return np.dtype(np.float32) if dtype in HALF else dtype


def _changed(value: Any, platform: str) -> Any:
    """Returns a parameter of an equation with float32 in place of half, in bodies too."""
    if isinstance(value, np.dtype | type) and value in HALF:
        return np.dtype(np.float32)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(part, platform) for part in value))
    if not hasattr(value, "eqns"):
        return value
    avals = [jax.ShapeDtypeStruct(var.aval.shape, _wide(var.aval.dtype)) for var in jax_compat.opened(value)[0].invars]
    wide = jax.make_jaxpr(in_float32(value, platform))(*avals)
    return wide if hasattr(value, "consts") else wide.jaxpr
