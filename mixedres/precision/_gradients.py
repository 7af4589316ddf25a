"""Gradients that carry their loss scale, and `value_and_grad`, which computes them."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from mixedres._internal.types import Function, Params, PyTree
from mixedres.precision._loss_scale import LossScale, NoOpLossScale, divide

# Product of the scale and of the last element of the carried scale; see `ScaledGradients`.
_LARGE = 1e30
# States of optax wrappers that take gradients as a tree like the parameters, so that they belong inside `loss_scaled`.
_INSIDE = {
    optax.PartitionState: "partition",
    optax.ApplyIfFiniteState: "apply_if_finite",
    optax.ConditionallyTransformState: "conditionally_transform",
    optax.ConditionallyMaskState: "conditionally_mask",
}


class LossScaledState(NamedTuple):
    """State of `loss_scaled`.

    Attributes:
      inner_state: the wrapped optimizer's state.
      loss_scale: loss scale of the next step, which `value_and_grad` reads.
      grads_finite: boolean scalar, whether the last update was applied; true before the first.
    """

    inner_state: Any
    loss_scale: LossScale
    grads_finite: jax.Array


def find_state(tree: PyTree) -> LossScaledState:
    """Returns the only `LossScaledState` in a pytree, with plain arrays where `nnx.Optimizer` has variables.

        state = find_state(optax.chain(loss_scaled(optax.sgd(0.1), NoOpLossScale())).init(params))
        print(state.loss_scale.total_skipped, state.grads_finite)

    Raises:
      TypeError: if there is no such state, or a wrapper that takes no scaled gradients, such as
        `optax.apply_if_finite`.
      ValueError: if `tree` contains several.
    """
    found = states_in(tree)
    if not found:
        raise TypeError(
            f"no LossScaledState is in the given {type(tree).__name__}; pass the state of a precision.loss_scaled "
            "optimizer, or what contains it (the first argument of the function that value_and_grad returns)"
        )
    if len(found) > 1:
        raise ValueError(
            f"{len(found)} LossScaledStates are in the given {type(tree).__name__}; pass what contains one of "
            "them, such as state.inner_states['a'] of optax.partition; for one loss, write "
            "loss_scaled(optax.partition(...), loss_scale)"
        )
    _check_wrappers(tree, found[0])
    nnx: Any = sys.modules.get("flax.nnx")
    state: LossScaledState = found[0] if nnx is None else nnx.as_pure(found[0])
    return state


def _check_wrappers(tree: PyTree, state: LossScaledState) -> None:
    """Raises TypeError for an optax wrapper around `loss_scaled` that refuses scaled gradients."""
    for outer in jax.tree.leaves(tree, is_leaf=lambda x: type(x) in _INSIDE):
        wrapper = _INSIDE.get(type(outer))
        if wrapper and states_in(outer) and not isinstance(state.loss_scale, NoOpLossScale):
            raise TypeError(
                f"optax.{wrapper} is around loss_scaled, and takes no scaled gradients; put it inside: "
                f"precision.loss_scaled(optax.{wrapper}(...), loss_scale), with plain optimizers in it"
            )


def states_in(tree: PyTree) -> list[LossScaledState]:
    """Returns all states of `loss_scaled` in a pytree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, LossScaledState))
    return [x for x in leaves if isinstance(x, LossScaledState)]


# For the errors of JAX about trees that differ. They show types or, up to JAX 0.10, objects.
_ADVICE = (
    "tx.update takes them, .unscaled() returns a plain tree; put other wrappers inside, as in "
    "loss_scaled(optax.masked(tx, mask), loss_scale)"
)


class _WithAdvice(type):
    def __repr__(cls) -> str:
        return f"<class '{cls.__name__}'; {_ADVICE}>"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class ScaledGradients(metaclass=_WithAdvice):
    """Gradients of a scaled loss, with the scale; `value_and_grad` and `scaled` make them.

        grads = scaled({"w": 8 * w}, StaticLossScale(8.0))
        assert (grads.unscaled()["w"] == w).all()

    A pytree. Linear maps do not change the scale: sums and means over microbatches or devices, products with a number
    other than 0. After other maps, such as clipping, and for sums of gradients with different scales, the scale is NaN,
    and `loss_scaled` skips the step. A global norm of scaled gradients is infinite.

    Attributes:
      tree: the scaled gradients.
      carried_scale: float32 (3,), (scale, 1, 1e30 / scale) times the factor of the linear maps so far. The scale is the
        ratio of the first two elements. The third shows other maps, and its square makes norms infinite.
    """

    tree: Params
    carried_scale: Any

    @property
    def scale(self) -> jax.Array:
        """Returns the float32 loss scale; NaN if a map was not linear, or a sum left the range of its dtype."""
        _, one, large = self._carried()
        scale = self.unchecked_scale
        # 1 up to rounding, also that of bfloat16; infinite after a cast to float16, which is no error.
        ratio = large / one * (scale / _LARGE)
        is_linear = (jnp.abs(ratio - 1) < 0.02) | jnp.isinf(ratio)
        return jnp.where(is_linear & (scale > 0) & (scale < jnp.inf), scale, jnp.nan)

    @property
    def unchecked_scale(self) -> jax.Array:
        """Returns the float32 loss scale without looking for other maps; without maps XLA removes the division."""
        times_scale, one, _ = self._carried()
        return times_scale / one

    def _carried(self) -> jax.Array:
        (carried,) = jax.tree.leaves(self.carried_scale)  # of a variable of nnx too
        return jnp.asarray(carried, jnp.float32)

    def unscaled(self) -> Params:
        """Returns the gradients divided by the scale, a plain tree; half-precision leaves are widened first.

        All are NaN after a map that is not linear, such as clipping. Leaves of integers stay as they are.
        """
        return divide(self.tree, self.scale)

    def __contains__(self, name: object) -> bool:
        """Returns whether the gradients are a dict with this key; Flax's `TrainState` asks."""
        return isinstance(self.tree, Mapping) and name in self.tree

    def __repr__(self) -> str:
        """Returns a short text with advice."""
        count = len(jax.tree.leaves(self.tree))
        return f"<ScaledGradients with {count} leaves; {_ADVICE}>"


def scaled(grads: Params, state: PyTree) -> ScaledGradients:
    """Marks gradients of a loss that you scaled yourself, for the `update` of `loss_scaled`; changes no number.

        state = loss_scaled(optax.sgd(0.1), StaticLossScale(8.0)).init(params)
        grads = scaled(jax.grad(lambda params: state.loss_scale.scale(loss_fn(params, x)))(params), state)

    `state` is the loss scale, or what contains the state of `loss_scaled`: see `find_state`.

    Raises:
      TypeError: for gradients that carry a scale already, and for a `state` without a loss scale.
      ValueError: for a `state` with several.
    """
    parts = jax.tree.leaves(grads, is_leaf=lambda x: isinstance(x, ScaledGradients))
    if scaled_gradients_in(grads) is not None or any(isinstance(part, ScaledGradients) for part in parts):
        raise TypeError("these gradients carry their loss scale already; give them to update as they are")
    loss_scale = state if isinstance(state, LossScale) else find_state(state).loss_scale
    carried: Any = _carrying(loss_scale.loss_scale)
    # nnx.Optimizer filters gradients by the type of their variables.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is not None:
        leaves = jax.tree.leaves(grads, is_leaf=lambda x: isinstance(x, nnx.Variable))
        if leaves and isinstance(leaves[0], nnx.Variable):
            carried = type(leaves[0])(carried)
    return ScaledGradients(grads, carried)


def scaled_gradients_in(tree: PyTree) -> ScaledGradients | None:
    """Returns the scaled gradients that `tree` is, or that are all its leaves; else None."""
    # Leaves, as in an `nnx.State`, are gradients of several losses, whose scale is NaN if they differ.
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(tree, nnx.State) and set(tree) == {"tree", "carried_scale"}:
        return ScaledGradients(tree["tree"], tree["carried_scale"])
    if isinstance(tree, ScaledGradients):
        return tree
    parts, structure = jax.tree.flatten(tree, is_leaf=lambda x: isinstance(x, ScaledGradients))
    if not parts or not all(isinstance(part, ScaledGradients) for part in parts):
        return None
    scale = parts[0].scale
    scale = jnp.where(jnp.stack([part.scale == scale for part in parts]).all(), scale, jnp.nan)
    return ScaledGradients(jax.tree.unflatten(structure, [part.tree for part in parts]), _carrying(scale))


def _carrying(scale: jax.Array | float) -> jax.Array:
    return jnp.stack([scale, jnp.float32(1), _LARGE / scale])


def value_and_grad(
    loss_fn: Function, *, has_aux: bool = False, transform: Function = jax.value_and_grad, **options: Any
) -> Callable[..., Any]:
    """Returns a function like `jax.value_and_grad(loss_fn)` that scales the loss before the differentiation.

        state = loss_scaled(optax.sgd(0.1), DynamicLossScale()).init(params)
        loss, grads = value_and_grad(loss_fn)(state, params, x)

    The first argument of the function is the loss scale, or what contains the state of `loss_scaled` (see
    `find_state`). The other arguments are those of `loss_fn`. The function returns the loss without the scale, and
    `ScaledGradients` for `update`.

    Args:
      loss_fn: a function that returns a scalar, or a scalar and other results with `has_aux`.
      has_aux: `loss_fn` returns (loss, aux), and the returned function ((loss, aux), grads), as in JAX.
      transform: `nnx.value_and_grad` for nnx modules, `equinox.filter_value_and_grad` for Equinox modules.
      **options: options of `transform`, such as `argnums`, which counts the arguments of `loss_fn`.

    Raises:
      TypeError: when the function is called, for a first argument without a loss scale, and see `find_state`.
      ValueError: when the function is called, for a first argument with several.
    """

    def value_and_scaled_grad(state: PyTree, *args: Any, **kwargs: Any) -> tuple[Any, ScaledGradients]:
        loss_scale = state if isinstance(state, LossScale) else find_state(state).loss_scale

        def scaled_loss(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            result = loss_fn(*args, **kwargs)
            return loss_scale.scale(result[0] if has_aux else result), result

        (_, result), grads = transform(scaled_loss, has_aux=True, **options)(*args, **kwargs)
        return result, scaled(grads, loss_scale)

    return value_and_scaled_grad
