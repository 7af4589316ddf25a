"""Explanation of a step that is not finite: the tensor, the likely cause, and the config key to try."""

import jax.numpy as jnp

from mixedres import precision
from mixedres._internal.types import DType
from mixedres.numerics import ArrayRecord, Finding

# Primitives that are not finite for some finite operands in every dtype, such as 0 / 0 or log 0.
_PARTIAL = {"div", "rem", "log", "log1p", "log2", "rsqrt", "sqrt", "pow", "integer_pow", "atanh", "acos", "asin", "tan"}
_PRODUCTS = {"conv_general_dilated", "dot_general"}
_SMALLER_STEPS = (
    "lower config.optimizer.learning_rate, lengthen config.schedule.warmup, or set config.optimizer.clip_norm"
)


def location(finding: Finding, devices: int) -> str:
    """Returns a clause that names the first tensor that is not finite; `devices`: number of devices of the step."""
    origin = finding.origin
    if origin is None:
        return "the step does not repeat: examined, its loss and every gradient are finite"
    text = f"the first tensor that is not finite is {origin}"
    if 0 < len(origin.devices) < devices:
        plural = "s" * (len(origin.devices) > 1)
        text += f" on device{plural} {', '.join(map(str, origin.devices))} of {devices}"
    if origin.iterations:
        text += f" in microbatch {', '.join(map(str, origin.iterations))}"
    return text


def products_before(finding: Finding, count: int = 5) -> list[str]:
    """Returns lines about the last products before the first tensor that is not finite, with their magnitudes."""
    if finding.origin is None:
        return []
    rows = [row for row in finding.arrays[: finding.origin.position] if row.primitive in _PRODUCTS]
    return [f"{row}: {row.largest:.4g}" for row in rows[-count:]]


def cause(finding: Finding, chosen: precision.Precision, loss_scale: precision.LossScale) -> str:
    """Returns the likely cause and what to try, without a full stop, for a step in this precision at `loss_scale`."""
    origin = finding.origin
    if origin is None:
        return (
            "The compiled step rounds differently where the compiler fuses operations; if this happens again, "
            f"{_or(_wider(chosen), _SMALLER_STEPS)}, and test the machine's memory"
        )
    if origin.is_argument and origin.array.path.startswith("batch/"):
        return (
            "The input is not finite, so no setting of the training helps; look at nonfinite/batch.npz and at the data "
            "that config.data.name names"
        )
    if origin.is_argument:
        return f"The tensor was not finite before the step, after an update that was too large; {_SMALLER_STEPS}"
    limit = _largest(origin.array.dtype)
    inputs_are_large = any(row.largest > limit / 1e3 for row in origin.inputs)
    if origin.array.primitive in _PARTIAL and not inputs_are_large:
        return f"For these operands {origin.array.primitive} has no finite result; {_SMALLER_STEPS}"
    half = limit < _largest(jnp.bfloat16)
    if half and origin.array.direction == "forward":
        _, slash, layer = origin.array.path.partition("/")  # no slash: the layer is the whole network
        keep = f"keep the layer in float32 with config.precision.keep_float32=^/{layer}$" if slash else ""
        return (
            f"The forward pass outgrew {origin.array.dtype}, which ends at {limit:.0f}, and no loss scale "
            f"changes that; {_or(_wider(chosen), keep, _SMALLER_STEPS)}"
        )
    if half:
        return _cause_in_gradient(origin.array, chosen, loss_scale)
    return (
        f"Numbers beyond {limit:.2g} mean that training diverged, not that {origin.array.dtype} is too narrow; "
        f"{_SMALLER_STEPS}"
    )


def _cause_in_gradient(row: ArrayRecord, chosen: precision.Precision, loss_scale: precision.LossScale) -> str:
    scale = float(loss_scale.loss_scale)
    text = f"A gradient outgrew {row.dtype}, which ends at {_largest(row.dtype):.0f}, at loss scale {scale:g}; "
    if isinstance(loss_scale, precision.NoOpLossScale):
        return text + _or(_wider(chosen), _SMALLER_STEPS)
    if isinstance(loss_scale, precision.StaticLossScale):
        return text + "lower config.precision.loss_scale or set it to 'dynamic'"
    if bool(loss_scale.at_minimum):
        return text + f"the scale is at its minimum: {_or('lower config.loss_scale.min', _wider(chosen))}"
    return text + (
        "the scale halves at every skipped step: lower config.loss_scale.initial, or raise "
        "config.max_consecutive_skips until the scale is low enough"
    )


def _wider(chosen: precision.Precision) -> str:
    """Returns the advice to take a preset with a wider range; '' if the range is that of float32 already."""
    if chosen.wider is None:
        return ""
    advice = [f"set config.precision.name={chosen.wider}"] if chosen.wider != chosen.name else []
    if str(chosen.policy) != str(precision.get(chosen.name).policy):
        advice.append("remove config.precision.policy")
    return " and ".join(advice)


def _or(*advice: str) -> str:
    """Returns the pieces of advice that are not empty, as alternatives."""
    given = [text for text in advice if text]
    return ", or ".join([", ".join(given[:-1]), given[-1]] if len(given) > 1 else given)


def _largest(dtype: DType) -> float:
    return float(jnp.finfo(dtype).max)  # type: ignore[no-untyped-call]
