"""Loss scales with jmp's interface: every field is in the pytree, and all arithmetic is float32.

Differences from jmp: all fields are leaves (jmp drops ``min_loss_scale`` at every jit boundary and has no leaves in
``StaticLossScale``), the scale is a strongly typed float32 array (a Python float would turn float16 arithmetic back
into float16 and compile the step twice), there is a maximum, and skipped steps are counted.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np

from mixedres._internal.tree import is_inexact
from mixedres._internal.types import Array, DType

T = TypeVar("T")
LossScaleT = TypeVar("LossScaleT", bound="_Counted")

# The constants of TensorFlow's dynamic loss scale: training/experimental/loss_scale.py.
INITIAL_LOSS_SCALE = 2.0**15
PERIOD = 2000
FACTOR = 2.0
# TensorFlow's minimum is 1. Where unscaled gradients exceed 65504, it would skip every step; PyTorch has no minimum.
MIN_LOSS_SCALE = 2.0**-14
MAX_LOSS_SCALE = 2.0**24


def _array(dtype: DType, value: Array) -> Any:
    """Returns `value` as a strongly typed scalar array; some jnp functions would return a `np.generic` weakly typed."""
    if isinstance(value, (int, float, np.generic)):  # JAX would compile a program for the conversion
        value = np.asarray(value, dtype)
    return jax.lax.convert_element_type(jnp.asarray(value), dtype)


def _zero() -> jax.Array:
    return jnp.asarray(np.zeros((), np.int32))


def _widen(x: Array) -> Any:
    """Converts half precision to float32. Not by `promote_types`, which strict promotion forbids."""
    dtype = jnp.result_type(x)
    return jnp.asarray(x, jnp.float32 if dtype.itemsize < 4 else dtype)


def map_inexact(function: Callable[[Any], Any], tree: T) -> T:
    """Maps `function` over the floating-point and complex leaves, half ones in float32; other leaves are unchanged."""
    return jax.tree.map(lambda x: function(_widen(x)) if is_inexact(x) else x, tree)


def divide(tree: T, scale: jax.Array) -> T:
    """Returns the tree divided by the scale; half-precision leaves are widened to float32 before the division."""
    return map_inexact(lambda x: x / scale.astype(x.dtype), tree)


def _register(cls: type[LossScaleT]) -> type[LossScaleT]:
    """Registers a dataclass as a pytree whose leaves are *all* of its fields, in order of declaration."""
    names = [field.name for field in dataclasses.fields(cls)]

    def flatten(x: LossScaleT) -> tuple[list[tuple[Any, Any]], None]:
        return [(jax.tree_util.GetAttrKey(name), getattr(x, name)) for name in names], None

    def unflatten(_: None, leaves: Any) -> LossScaleT:
        new = object.__new__(cls)
        for name, leaf in zip(names, leaves, strict=True):
            object.__setattr__(new, name, leaf)
        return new

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)
    return cls


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Counted:
    """Counters of every loss scale."""

    consecutive_skipped: jax.Array = dataclasses.field(default_factory=_zero)
    total_skipped: jax.Array = dataclasses.field(default_factory=_zero)

    def _replace(self: LossScaleT, **changes: Any) -> LossScaleT:
        """Replaces fields like `dataclasses.replace`, without the checks of the constructor: values may be tracers."""
        new = object.__new__(type(self))
        for field in dataclasses.fields(self):
            object.__setattr__(new, field.name, changes.get(field.name, getattr(self, field.name)))
        return new

    def adjust(self: LossScaleT, grads_finite: Any) -> LossScaleT:
        """Returns the loss scale with one more skipped step if `grads_finite` (a boolean scalar) is false."""
        skipped = jnp.logical_not(jnp.asarray(grads_finite, bool)).astype(jnp.int32)
        return self._replace(
            consecutive_skipped=(self.consecutive_skipped + 1) * skipped, total_skipped=self.total_skipped + skipped
        )

    def _convert(self, **dtypes: Any) -> None:
        """Turns the named fields into strongly typed scalar arrays."""
        dtypes |= {"consecutive_skipped": jnp.int32, "total_skipped": jnp.int32}
        for name, dtype in dtypes.items():
            object.__setattr__(self, name, _array(dtype, getattr(self, name)))


@_register
@dataclasses.dataclass(frozen=True)
class NoOpLossScale(_Counted, jmp.NoOpLossScale):
    """Loss scale of 1, for float32, and for bfloat16, which has the range of float32.

    Attributes:
      consecutive_skipped: int32 scalar, steps skipped since the last applied one.
      total_skipped: int32 scalar, steps skipped since the start.
    """

    def __post_init__(self) -> None:
        self._convert()

    @property
    def loss_scale(self) -> jax.Array:
        """Returns 1, a float32 scalar."""
        return jnp.ones((), jnp.float32)

    @property
    def at_minimum(self) -> jax.Array:
        """Returns True, a boolean scalar: no lower scale can help a step that is not finite."""
        return jnp.asarray(True)

    def scale(self, tree: T) -> T:
        """Returns the tree itself."""
        return tree

    def unscale(self, tree: T) -> T:
        """Returns the tree with half-precision leaves widened to float32, as other loss scales do."""
        return map_inexact(lambda x: x, tree)


class _Scaled(_Counted):
    """Loss scale that multiplies and divides trees, in place of jmp's methods."""

    loss_scale: Any

    def scale(self, tree: T) -> T:
        """Returns the tree times the scale; half-precision leaves become float32, so that they cannot overflow."""
        return map_inexact(lambda x: x * self.loss_scale.astype(x.dtype), tree)

    def unscale(self, tree: T) -> T:
        """Returns the tree divided by the scale; half-precision leaves are widened to float32 before the division."""
        return divide(tree, self.loss_scale)


@_register
@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Scaled, jmp.StaticLossScale):
    """Fixed loss scale. The scale is a leaf: checkpoints save it, and a new value needs no compilation.

    Attributes:
      loss_scale: float32 scalar, finite and > 0; another number raises ValueError.
      consecutive_skipped: int32 scalar, steps skipped since the last applied one.
      total_skipped: int32 scalar, steps skipped since the start.
    """

    loss_scale: jax.Array | float

    def __post_init__(self) -> None:
        _check_number("loss_scale", self.loss_scale)
        self._convert(loss_scale=jnp.float32)

    @property
    def at_minimum(self) -> jax.Array:
        """Returns False, a boolean scalar: with a fixed scale occasional overflows are expected."""
        return jnp.asarray(False)


@_register
@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Scaled, jmp.DynamicLossScale):
    """Loss scale that doubles after `period` consecutive finite steps and halves after a step that is not finite.

        loss_scale = DynamicLossScale(period=1000)
        loss, grads = value_and_grad(loss_fn)(loss_scale, params, x)

    A product that would pass `max_loss_scale` leaves the scale unchanged. Defaults and rule are those of TensorFlow's
    DynamicLossScale, except for the maximum, which is Apex's.

    Attributes:
      loss_scale: float32 scalar, the present scale.
      counter: int32 scalar, finite steps since the scale last changed or last failed to.
      period: int32 scalar >= 1, finite steps before the scale grows.
      factor: float32 scalar > 1.
      min_loss_scale: float32 scalar > 0, the smallest scale.
      max_loss_scale: float32 scalar < inf, the largest scale.
      consecutive_skipped: int32 scalar, steps skipped since the last applied one.
      total_skipped: int32 scalar, steps skipped since the start.

    Raises:
      ValueError: where a number is outside these ranges.
    """

    loss_scale: jax.Array | float = INITIAL_LOSS_SCALE
    _: dataclasses.KW_ONLY  # jmp's second argument is the counter, torch's the factor
    counter: jax.Array = dataclasses.field(default_factory=_zero)
    period: jax.Array | float = PERIOD
    factor: jax.Array | float = FACTOR
    min_loss_scale: jax.Array | float = MIN_LOSS_SCALE
    max_loss_scale: jax.Array | float = MAX_LOSS_SCALE

    def __post_init__(self) -> None:
        for name in ("loss_scale", "period", "factor", "min_loss_scale", "max_loss_scale"):
            _check_number(name, getattr(self, name))
        self._check_ranges()
        numbers = ("loss_scale", "factor", "min_loss_scale", "max_loss_scale")
        self._convert(counter=jnp.int32, period=jnp.int32, **dict.fromkeys(numbers, jnp.float32))

    def _check_ranges(self) -> None:
        fields = (self.loss_scale, self.period, self.factor, self.min_loss_scale, self.max_loss_scale)
        if any(isinstance(x, jax.core.Tracer) for x in fields):
            return
        scale, period, factor, low, high = (float(x) for x in fields)
        if period < 1 or period != int(period) or period > 2**31 - 1:
            raise ValueError(f"period must be a whole number of steps >= 1, got {period:g}")
        if np.float32(factor) <= 1:
            raise ValueError(f"factor must be > 1, got {factor:g}")
        if not low <= scale <= high:
            raise ValueError(
                f"loss_scale {scale:g} is not between min_loss_scale {low:g} and max_loss_scale {high:g}; "
                "set min_loss_scale or max_loss_scale as well"
            )

    @property
    def at_minimum(self) -> jax.Array:
        """Returns whether the scale is at its minimum, so that skipping steps does not help; a boolean scalar.

        In your own loop, end with an error if a step was skipped although its scale was at the minimum.
        """
        return jnp.less_equal(self.loss_scale, self.min_loss_scale)

    def adjust(self, grads_finite: Any) -> DynamicLossScale:
        """Returns the loss scale for the next step; `grads_finite`: a boolean scalar for the gradients of this step."""
        finite = jnp.asarray(grads_finite, bool)
        counter = self.counter + 1
        due = counter >= self.period
        grown = self.loss_scale * self.factor
        up = jnp.where(due & (grown <= self.max_loss_scale), grown, self.loss_scale)
        down = jnp.maximum(self.loss_scale / self.factor, self.min_loss_scale)
        return (
            super()
            .adjust(finite)
            ._replace(loss_scale=jnp.where(finite, up, down), counter=jnp.where(finite & ~due, counter, 0))
        )


# Type of a loss scale: any of the three classes.
LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def register_with_flax() -> None:
    """Registers the loss scales with `flax.serialization`, if flax has been imported: they are saved as dicts."""
    serialization: Any = sys.modules.get("flax.serialization")
    if serialization is None:
        return

    def to_dict(loss_scale: Any) -> dict[str, Any]:
        fields = ((field.name, getattr(loss_scale, field.name)) for field in dataclasses.fields(loss_scale))
        return {name: serialization.to_state_dict(value) for name, value in fields}

    def from_dict(loss_scale: Any, state: dict[str, Any]) -> Any:
        own = to_dict(loss_scale)
        if own.keys() != state.keys():
            raise ValueError(f"a {type(loss_scale).__name__} has {', '.join(own)}, and the file {', '.join(state)}")
        return loss_scale._replace(**{name: serialization.from_state_dict(own[name], state[name]) for name in own})

    for cls in (NoOpLossScale, StaticLossScale, DynamicLossScale):
        serialization.register_serialization_state(cls, to_dict, from_dict, override=True)


def _check_number(name: str, value: Array | float) -> None:
    """Raises ValueError unless `value` is a finite positive float32 scalar; tracers are not checked."""
    if isinstance(value, jax.core.Tracer):
        return
    try:
        if isinstance(value, (bool, np.bool_, str, bytes)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number > 0, got {value!r}") from None
    # A number can be positive and finite in float64 and yet be 0 or inf as a float32.
    with np.errstate(over="ignore", under="ignore"):
        single = float(np.float32(number))
    if not (math.isfinite(single) and single > 0):
        raise ValueError(f"{name} must be a finite number > 0 in float32, got {value!r}")


def make_loss_scale(spec: Any, **dynamic: Any) -> LossScale:
    """Returns the loss scale that `spec` names.

        loss_scale = make_loss_scale("dynamic", period=1000)

    Args:
      spec: 'none', 'dynamic', a number > 0 (or its string), or a loss scale, which is returned unchanged.
      **dynamic: options of `DynamicLossScale`, such as `period`; ignored unless `spec` is 'dynamic'.

    Raises:
      TypeError: for an option that `DynamicLossScale` does not have.
      ValueError: for any other `spec`, also a loss scale of jmp, and for an option outside its range.
    """
    if isinstance(spec, LossScale):
        return spec
    if spec == "dynamic":
        return DynamicLossScale(**dynamic)
    if spec == "none":
        return NoOpLossScale()
    allowed = "use 'none', 'dynamic' or a number > 0 such as 128"
    if isinstance(spec, bool) or not isinstance(spec, (str, int, float, np.number, np.ndarray, jax.Array)):
        raise ValueError(f"loss scale {spec!r} is not one; {allowed}")
    try:
        return StaticLossScale(float(spec))
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"loss scale {spec!r} is not one; {allowed}") from None
