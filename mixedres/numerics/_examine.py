"""`examine`: counts the tensors of every layer by exponent during one gradient of a loss."""

import dataclasses
import functools
import math
import re
import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mixedres import amp
from mixedres._internal import jax_compat
from mixedres._internal.errors import listed
from mixedres._internal.tree import is_array, is_inexact, leaves_by_path
from mixedres._internal.types import Array, Function, Params, PyTree
from mixedres.numerics._compiled import parted
from mixedres.numerics._recording.arguments import Traced
from mixedres.numerics._report import GradientAt, Report
from mixedres.numerics._rows import TensorRow, log2_of_scale
from mixedres.numerics.counting import Exponents, TapStatistics, exponents, tap_modules, tapped_value_and_grad
from mixedres.numerics.counting.taps import names, read


def examine(
    loss_fn: Function,
    params: Params,
    *batch: PyTree,
    scale: float = 1.0,
    select: str = "",
    has_aux: bool = False,
    title: str = "numerics",
    tries: bool = True,
) -> Report:
    """Reports what float16 and bfloat16 would do to the values and gradients of `loss_fn`.

        print(examine(loss_fn, params, x).advice)

    Use the loss as computed in float32 and without a loss scale: what float16 has already lost cannot be counted. The
    report covers the results of flax.linen modules, all values passed to `numerics.tap`, the gradients of both, the
    parameters, and their gradients. `loss_fn` is compiled and run once. Then the gradient of `autocast(loss_fn)` in
    float16 is run at the loss scales that the advice names, unless the counts already speak for bfloat16, the gradients
    are all zero or not finite, or, with a note, autocast refuses the function.

    Args:
      loss_fn: (params, *batch) -> float scalar, or (scalar, aux) if `has_aux`; jitted or not.
      params: a pytree, such as a dict, an Equinox module or an nnx module, whose floating-point and complex leaves get
        gradients. What `loss_fn` changes in a module is lost.
      *batch: the other arguments, which are traced; bind strings and switches by `functools.partial`.
      scale: the loss scale in use, a power of two.
      select: regular expression of the names to examine, such as 'block1/conv2' or 'block1/conv2/kernel'; '' for all.
      has_aux: see `jax.grad`.
      title: title of the report.
      tries: run the gradient in float16; False: only count.

    Raises:
      ValueError: for a scale that is not a power of two, parameters without floating-point numbers or with two of one
        name, a loss that is not a float scalar, a `select` that matches no name, and a tap in a custom derivative.
    """
    log2_scale = log2_of_scale(scale)
    arrays, floats = _arrays_by_name(params)

    result_of = _of_floats(loss_fn, arrays, jax.tree.structure(params))
    _check_scalar(jax.eval_shape(lambda *args: result_of(*args), floats, *batch), has_aux)
    loss_of = (lambda *args: result_of(*args)[0]) if has_aux else result_of
    found = names(loss_of, floats, *batch)
    wanted = _selected(select, [*(found | floats)])
    dtypes = {name: dtype for name, dtype in found.items() if name in wanted}
    seen, gradients, loss = _count(loss_of, floats, batch, [*dtypes], [x for x in floats if x in wanted])
    rows = seen.rows(arrays)
    counted = {row.name for row in rows if row.kind == "activation"}
    notes = _notes(found, dtypes, seen.taps.names, [name for name in seen.taps.names if name not in counted])
    if tries:
        notes += _parted(loss_of, floats, batch, _named(np.asarray(loss), gradients))
    report = Report(rows, log2_scale, title, tuple(notes), loss=loss)
    if not tries or report.dtype != "float16" or not math.isfinite(loss):
        return report
    try:
        return report.tried(_gradient_in_half(report, loss_of, floats, batch), jax.device_get(gradients))
    except (TypeError, ValueError) as refusal:
        why = f"the gradient in float16 was not tried: {str(refusal).partition(chr(10))[0]}"
        return dataclasses.replace(report, notes=(*report.notes, why))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TensorCounts:
    """Counts of an examination on the device: a pytree of arrays that add up.

    Attributes:
      taps: counts of values and their gradients.
      gradients: {name: uint32 (BINS,) counts} of weight gradients of up to 2**32 elements, see `counting.exponents`.
      parameters: {name: uint32 (BINS,) counts} of the weights.
    """

    taps: TapStatistics
    gradients: dict[str, jax.Array]
    parameters: dict[str, jax.Array]

    def rows(self, params: Mapping[str, Any]) -> tuple[TensorRow, ...]:
        """Returns the rows of a report in the order of execution; `params`: arrays or shapes by name."""
        rows, modules = [], list(dict.fromkeys(map(_module, self.taps.names)))
        for name, tapped in read(self.taps).items():
            about = (name, _module(name), np.dtype(tapped.dtype), ())
            row = TensorRow("activation", *about, (tapped.value,), tapped.executions)
            rows += [row, dataclasses.replace(row, kind="gradient", parts=(tapped.gradient,))]
        gradients, parameters = jax.device_get((self.gradients, self.parameters))
        for name, gradient in gradients.items():
            dtype, shape = np.dtype(jnp.result_type(params[name])), jnp.shape(params[name])
            part = Exponents(parameters[name])
            row = TensorRow("parameter", name, module_of(name, modules), dtype, shape, (part,), 1)
            rows += [dataclasses.replace(row, kind="weight gradient", parts=(Exponents(gradient),)), row]
        place = {module: index for index, module in enumerate(modules)}
        return tuple(sorted(rows, key=lambda row: place.get(row.module, len(place))))  # rows without a module last


def _of_floats(loss_fn: Function, arrays: dict[str, Any], structure: Any) -> Function:
    """Returns `loss_fn`, with its modules tapped, as a function of the real arrays of `_arrays_by_name`."""

    def loss_of(floats: dict[str, Any], *batch: PyTree) -> Any:
        are_complex = {name: jnp.iscomplexobj(arrays[name]) for name in floats}
        given = {name: jax.lax.complex(*x) if are_complex[name] else x for name, x in floats.items()}
        tapped = tap_modules(loss_fn) if "flax.linen" in sys.modules else loss_fn
        return tapped(jax.tree.unflatten(structure, list((arrays | given).values())), *batch)

    return loss_of


def _selected(select: str, names: Sequence[str]) -> set[str]:
    """Returns the names that the regular expression `select` finds; raises ValueError if it finds none."""
    try:
        found = set(filter(re.compile(select).search, names))
    except re.error as error:
        raise ValueError(f"select={select!r} is not a regular expression: {error}") from None
    if not found:
        raise ValueError(f"select={select!r} matches no name; there are {listed(names, 3)}")
    return found


def _count(
    loss_fn: Function, floats: dict[str, Any], batch: Sequence[PyTree], taps: list[str], wanted: list[str]
) -> tuple[TensorCounts, dict[str, Any], float]:
    """Returns the counts of the taps and of the parameters in `wanted`, all gradients, and the loss."""

    def counted(floats: dict[str, Any], *batch: PyTree) -> tuple[TensorCounts, dict[str, Any], jax.Array]:
        loss, gradients, statistics = tapped_value_and_grad(loss_fn, select=taps)(floats, *batch)
        counts = [{name: exponents(x[name]) for name in wanted} for x in (gradients, floats)]
        return TensorCounts(statistics, *counts), gradients, loss

    try:
        seen, gradients, loss = jax.jit(counted, compiler_options=jax_compat.options_for_one_run())(floats, *batch)
    except jax.errors.UnexpectedTracerError:
        raise ValueError(
            "a tap is inside a function with a custom derivative (jax.custom_vjp or custom_jvp), or in a transform "
            "that stores its values; tap the arguments and results of that function instead"
        ) from None
    return seen, gradients, float(loss)


def _named(loss: Array, gradients: Mapping[str, Array]) -> dict[str, Array]:
    return {"loss": loss, **{f"gradient of {name}": array for name, array in gradients.items()}}


def _parted(
    loss_fn: Function, floats: dict[str, Any], batch: Sequence[PyTree], own: dict[str, Array]
) -> tuple[str, ...]:
    """Returns sentences about loss and gradients, if the program that the user compiles computes others than `own`."""

    def run(floats: dict[str, Any], *batch: PyTree) -> dict[str, Array]:
        return _named(*jax.value_and_grad(loss_fn)(floats, *batch))

    return parted(Traced.of(run, (floats, *batch), ()), jax.tree.leaves(own))


def _gradient_in_half(report: Report, loss_fn: Function, floats: dict[str, Any], batch: Sequence[PyTree]) -> GradientAt:
    """Returns (loss scale) -> (loss, gradients) in float16, but for the layers to keep; compiled at the first call."""
    half = amp.autocast(loss_fn, report.dtype, keep_float32=report.keep_float32_pattern)

    def run(scale: Array, floats: dict[str, Any], *batch: PyTree) -> tuple[jax.Array, dict[str, Any]]:
        def scaled(floats: dict[str, Any]) -> tuple[jax.Array, jax.Array]:
            value = half(floats, *batch).astype(jnp.float32)
            return value * scale, value

        (_, value), grads = jax.value_and_grad(scaled, has_aux=True)(floats)
        return value, {name: array.astype(jnp.float32) / scale for name, array in grads.items()}

    @functools.cache
    def compiled() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", amp.PrecisionWarning)
            lowered = jax.jit(run, compiler_options=jax_compat.options_for_one_run()).lower(
                np.float32(1), floats, *batch
            )
        return lowered.compile()

    return lambda scale: compiled()(np.float32(scale), floats, *batch)


def _arrays_by_name(params: Params) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the leaves of params by name, and those to differentiate, real; raises ValueError as `examine`."""
    leaves = [(path or "params", leaf) for path, leaf in leaves_by_path(params)]
    names, arrays = [name for name, _ in leaves], dict(leaves)
    if len(arrays) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two of params are called {twice!r}; rename one")
    floats = {
        name: jnp.stack([jnp.real(leaf), jnp.imag(leaf)]) if jnp.iscomplexobj(leaf) else leaf
        for name, leaf in arrays.items()
        if is_array(leaf) and is_inexact(leaf)
    }
    if not floats:
        kinds = {name: jnp.result_type(x) if is_array(x) else type(x).__name__ for name, x in arrays.items()}
        found = listed([f"{name} is {kind}" for name, kind in kinds.items()], 3) or "none"
        raise ValueError(f"params contain no floating-point array to differentiate: {found}")
    return arrays, floats


def _check_scalar(result: Array, has_aux: bool) -> None:
    loss = result[0] if has_aux and isinstance(result, tuple) and result else result
    if getattr(loss, "shape", None) != () or not jnp.issubdtype(loss.dtype, jnp.floating):
        given = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", loss)
        hint = "" if has_aux else "; set has_aux=True if it returns (loss, aux)"
        raise ValueError(f"loss_fn must return a float scalar, got {given}{hint}")


def module_of(parameter: str, names: Iterable[str]) -> str:
    """Returns the longest of `names` that begins the path of a parameter without 'params/'; '' if none does."""
    path = parameter.removeprefix("params/")
    return max((name for name in names if path.startswith(f"{name}/") or path == name), key=len, default="")


def _module(name: str) -> str:
    """Returns 'cell' for 'cell[0]', one of the results of a module."""
    return name.partition("[")[0] or name


def _notes(found: dict[str, Any], dtypes: dict[str, Any], used: Sequence[str], never: list[str]) -> list[str]:
    notes = []
    if unused := [name for name in dtypes if name not in used]:
        notes.append(f"not examined, because the loss does not depend on them: {listed(unused, 3)}")
    if never:
        notes.append(
            "not examined, because they were never executed, or only inside a derivative that the function computes "
            f"itself: {listed(never, 3)}"
        )
    if not found:
        notes.append(
            "no tap was executed, so activations and their gradients were not examined; call numerics.tap(x, name) in "
            "the loss, or use modules of flax.linen"
        )
    half = [name for name, dtype in dtypes.items() if dtype.itemsize < 4 and dtype == np.float16]
    if half:
        notes.append(
            f"{len(half)} of {len(dtypes)} activations are already float16 (for example {half[0]}): earlier losses "
            "cannot be seen; use the loss as computed in float32"
        )
    return notes
