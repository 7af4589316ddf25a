"""Learning-rate schedules, the weight-decay mask, and optimizers as one visible chain."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mixedres._internal.tree import leaf_path

SCHEDULES = ("constant", "cosine", "piecewise", "polynomial")
OPTIMIZERS = ("sgd", "lars", "adamw")
# Convolution and dense kernels: not batch-norm scales and not biases.
KERNELS = r"/kernel$"


def schedule(
    name: str,
    *,
    peak: float,
    total_steps: int,
    warmup_steps: int = 0,
    end_factor: float = 0.0,
    boundaries: Sequence[int] = (),
    factors: Sequence[float] = (),
    power: float = 2.0,
) -> optax.Schedule:
    """Linear warm-up from 0 to `peak`, then a decay.

    Args:
      name: 'constant', 'cosine' (half a cosine from `peak` to `end_factor * peak` at `total_steps`), 'piecewise'
        (`peak` times `factors[i]` after `boundaries[i]` steps; at the boundary itself still the old value, as in the
        TensorFlow original) or 'polynomial' (``(1 - progress) ** power``, to `end_factor * peak`).
      peak: learning rate after the warm-up, > 0.
      total_steps: length of the run, with the warm-up.
      warmup_steps: steps of linear growth; step 0 has rate 0.
      end_factor: final rate as a fraction of the peak, for cosine and polynomial.
      boundaries, factors: for piecewise, as many factors as boundaries; boundaries increase and count from the start of
        the run.
      power: for polynomial.

    Returns:
      A function from the number of applied updates to the learning rate, a float32 scalar.

    Raises:
      ValueError: for an unknown name or a number out of range.
    """
    if name not in SCHEDULES:
        raise ValueError(f"schedule {name!r} is unknown; use one of {', '.join(SCHEDULES)}")
    if not peak > 0:
        raise ValueError(f"the learning rate must be > 0, got {peak:g}")
    if len(boundaries) != len(factors) or list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"boundaries must increase and have one factor each, got {tuple(boundaries)} and {tuple(factors)}"
        )
    decay_steps = max(total_steps - warmup_steps, 1)
    steps = optax.join_schedules(
        [optax.constant_schedule(jnp.float32(factor)) for factor in (1.0, *factors)], [b + 1 for b in boundaries]
    )

    # Not optax.linear_schedule, which computes (0 - peak) * (1 - count / n) + peak, 0.07 % off at the first of 25,000
    # steps; optax' cosine and polynomial schedules differ from these in the last bit.
    def rate(count: jax.Array) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((count - warmup_steps) / decay_steps, 0.0, 1.0)
        if name == "cosine":
            shape = end_factor + (1 - end_factor) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
        elif name == "polynomial":
            shape = end_factor + (1 - end_factor) * (1 - progress) ** power
        else:
            shape = steps(count)
        warmup = jnp.minimum(count / warmup_steps, 1.0) if warmup_steps else 1.0
        return jnp.asarray(peak * warmup * shape, jnp.float32)

    return rate


def path_mask(pattern: str) -> Callable[[Any], Any]:
    """A function from parameters to a tree of booleans: whether `pattern`, a regular expression, is found in the path.

    Paths look like '/block_layer1_1/conv1/kernel'.

    Raises:
      ValueError: if the pattern is no regular expression.
    """
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None

    def mask(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(lambda path, _: bool(compiled.search(f"/{leaf_path(path)}")), params)

    return mask


def create(
    name: str,
    learning_rate: optax.Schedule,
    *,
    momentum: float = 0.9,
    nesterov: bool = False,
    rate_in_momentum: bool = False,
    weight_decay: float = 0.0,
    decay_mask: str = KERNELS,
    clip_norm: float = 0.0,
    beta2: float = 0.999,
    epsilon: float = 1e-8,
    trust_coefficient: float = 0.001,
) -> optax.GradientTransformation:
    """An optimizer for unscaled float32 gradients.

    Args:
      name: 'sgd', 'lars' (You et al., arXiv 1708.03888, with optax's trust ratio |w| / |g + decay * w| where the paper
        has |w| / (|g| + decay * |w|)) or 'adamw' (arXiv 1711.05101).
      learning_rate: function of the number of applied updates.
      momentum: for sgd and lars, and beta 1 of adamw; in [0, 1).
      nesterov: for sgd and lars.
      rate_in_momentum: for sgd: ``v = momentum * v - rate * g`` and ``w += v``, as Keras has it, where a change of the
        rate does not rescale what was summed before; False: ``v = momentum * v + g`` and ``w -= rate * v``. Both are
        the same at a constant rate. lars always has the first form.
      weight_decay: >= 0. For sgd and lars coupled L2: ``weight_decay * w`` is added to the gradient. For adamw
        decoupled: the update shrinks w by ``learning_rate * weight_decay``.
      decay_mask: regular expression of the paths that decay and, for lars, have a trust ratio.
      clip_norm: largest global norm of the gradient; 0: no clipping.
      beta2, epsilon: for adamw.
      trust_coefficient: for lars.

    Raises:
      ValueError: for an unknown name or a number out of range.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer {name!r} is unknown; use one of {', '.join(OPTIMIZERS)}")
    if not 0 <= momentum < 1:
        raise ValueError(f"momentum must be in [0, 1), got {momentum}")
    if not (weight_decay >= 0 and clip_norm >= 0):
        raise ValueError(f"weight_decay and clip_norm must be >= 0, got {weight_decay} and {clip_norm}")
    if rate_in_momentum and name == "adamw":
        raise ValueError("rate_in_momentum is about the momentum of sgd; leave it out with adamw")
    mask = path_mask(decay_mask)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    decay = optax.add_decayed_weights(weight_decay, mask)
    descend = optax.scale_by_learning_rate(learning_rate)
    trace = optax.trace(momentum, nesterov=nesterov) if momentum else optax.identity()
    if name == "sgd":
        step = (descend, trace) if rate_in_momentum else (trace, descend)
        return optax.chain(clip, decay, *step)
    if name == "adamw":
        adam = optax.scale_by_adam(b1=momentum, b2=beta2, eps=epsilon)
        return optax.chain(clip, adam, decay, descend)
    # The paper's order: the rate is inside the momentum, so that a change of rate does not rescale the past.
    trust = optax.masked(optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient), mask)
    return optax.chain(clip, decay, trust, descend, trace)


def with_layer_decay(tx: optax.GradientTransformation, factor: float) -> optax.GradientTransformation:
    """`tx` with its updates multiplied by ``factor ** depth``, where depth counts from the head down.

    The head of a ResNet and the norm before it have depth 0, the last block 1, and the stem one more than the first
    block (Howard and Ruder, arXiv 1801.06146, scale every layer so, by 1/2.6).
    """

    def scale(updates: Any, params: Any = None) -> Any:
        del params
        blocks = sorted((name for name in updates if name.startswith("block_layer")), key=_block_number, reverse=True)
        depths = {name: depth for depth, name in enumerate(blocks, start=1)}
        stem = {"stem_conv": len(blocks) + 1, "stem_norm": len(blocks) + 1}

        def scaled(name: str) -> Any:
            by = factor ** (depths.get(name) or stem.get(name, 0))
            return jax.tree.map(lambda u: u * by, updates[name])

        return {name: scaled(name) for name in updates}

    return optax.chain(tx, optax.stateless(scale))


def train_only(tx: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """`tx` for the parameters whose paths match `pattern`, without state for the others.

    The others get updates of -0.0, which change no bit of any number; optax.selective_transform would give them +0.0.

    Raises:
      ValueError: if the pattern is no regular expression.
    """
    mask = path_mask(pattern)

    def select(updates: Any, params: Any = None) -> Any:
        del params
        return jax.tree.map(lambda trainable, u: u if trainable else jnp.full_like(u, -0.0), mask(updates), updates)

    return optax.chain(optax.masked(tx, mask), optax.stateless(select))


def _block_number(name: str) -> tuple[int, ...]:
    """(1, 2) for 'block_layer1_2'."""
    return tuple(map(int, name.removeprefix("block_layer").split("_")))
