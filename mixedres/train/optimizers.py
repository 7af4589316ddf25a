"""Learning-rate schedules, the weight-decay mask, and a table of optimizers."""

import re
from collections.abc import Collection, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mixedres._internal import registry
from mixedres._internal.errors import one_line
from mixedres._internal.names import SCHEDULES
from mixedres._internal.tree import leaf_path
from mixedres._internal.types import MaskFn, PyTree
from mixedres.config import optimizer_options

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
    """Returns a learning-rate schedule: a linear warm-up from 0 to `peak`, then a decay.

    Args:
      name: 'constant', 'cosine' (half a cosine from `peak` to `end_factor * peak` at `total_steps`), 'piecewise'
        (`peak` times `factors[i]` after `boundaries[i]` steps; the step at the boundary still has the old rate, as in
        the TensorFlow original), 'polynomial' (``(1 - progress) ** power``, to `end_factor * peak`), or a name of
        `registry.SCHEDULES`.
      total_steps: length of the run, warm-up included.
      warmup_steps: steps of linear growth; step 0 has rate 0.
      boundaries: increasing numbers of steps since the start of the run.

    Returns the float32 rate by the number of applied updates; raises ValueError for a name or number out of range.
    """
    if name not in (*SCHEDULES, *registry.SCHEDULES):
        raise ValueError(f"schedule {name!r} is unknown; use one of {', '.join((*SCHEDULES, *registry.SCHEDULES))}")
    if not peak > 0:
        raise ValueError(f"the learning rate must be > 0, got {peak:g}")
    if len(boundaries) != len(factors) or list(boundaries) != sorted(set(boundaries)):
        raise ValueError(
            f"boundaries must increase and have one factor each, got {tuple(boundaries)} and {tuple(factors)}"
        )
    decay_steps = max(total_steps - warmup_steps, 1)
    steps = optax.join_schedules(
        [optax.constant_schedule(np.float32(factor)) for factor in (1.0, *factors)], [b + 1 for b in boundaries]
    )

    # Not optax.linear_schedule, which computes (0 - peak) * (1 - count / n) + peak, 0.07 % off at the first of 25,000
    # steps; optax' cosine and polynomial schedules differ from these in the last bit.
    def rate(count: jax.Array) -> jax.Array:
        count = jnp.asarray(count, jnp.float32)
        progress = jnp.clip((count - warmup_steps) / decay_steps, 0.0, 1.0)
        shapes = registry.SCHEDULES | {
            "cosine": lambda progress: end_factor + (1 - end_factor) * 0.5 * (1 + jnp.cos(jnp.pi * progress)),
            "polynomial": lambda progress: end_factor + (1 - end_factor) * (1 - progress) ** power,
        }
        shape = shapes[name](progress) if name in shapes else steps(count)
        warmup = jnp.minimum(count / warmup_steps, 1.0) if warmup_steps else 1.0
        return jnp.asarray(peak * warmup * shape, jnp.float32)

    if name in registry.SCHEDULES:
        try:
            jax.eval_shape(rate, np.int32(0))
        except Exception as error:
            raise ValueError(f"schedule {name!r} fails: {type(error).__name__}: {one_line(error)}") from None
    return rate


def path_mask(pattern: str) -> MaskFn:
    """Returns a function from a pytree to booleans: true where the path, such as '/block1/conv1/kernel', matches."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None

    def mask(params: PyTree) -> PyTree:
        return jax.tree_util.tree_map_with_path(lambda path, _: bool(compiled.search(f"/{leaf_path(path)}")), params)

    return mask


# The transformations of an optimizer, in order.
Chain = tuple[optax.GradientTransformation, ...]


class Parts(NamedTuple):
    """The transformations that all optimizers share, and a function that marks the parameters that decay."""

    descend: optax.GradientTransformation  # multiplies by minus the learning rate
    decay: optax.GradientTransformation  # adds ``weight_decay * w`` to the parameters that decay
    mask: MaskFn


def _sgd(parts: Parts, *, momentum: float, nesterov: bool, rate_in_momentum: bool) -> Chain:
    trace = _trace(momentum, nesterov)
    return (parts.decay, parts.descend, trace) if rate_in_momentum else (parts.decay, trace, parts.descend)


def _lars(parts: Parts, *, momentum: float, nesterov: bool, trust_coefficient: float) -> Chain:
    trust = optax.masked(optax.scale_by_trust_ratio(trust_coefficient=trust_coefficient), parts.mask)
    # The paper's order: the rate is inside the momentum, so that a change of the rate does not rescale earlier updates.
    return parts.decay, trust, parts.descend, _trace(momentum, nesterov)


def _adamw(parts: Parts, *, momentum: float, beta2: float, epsilon: float) -> Chain:
    return optax.scale_by_adam(b1=momentum, b2=beta2, eps=epsilon), parts.decay, parts.descend


def _muon(parts: Parts, *, momentum: float, nesterov: bool, beta2: float, epsilon: float) -> Chain:
    # optax multiplies by minus the rate; the rate itself is in `descend`.
    muon = optax.contrib.muon(-1.0, beta=momentum, nesterov=nesterov, eps=epsilon, adam_b1=momentum, adam_b2=beta2)
    return _on_matrices(muon), parts.decay, parts.descend


def _trace(momentum: float, nesterov: bool) -> optax.GradientTransformation:
    return optax.trace(momentum, nesterov=nesterov) if momentum else optax.identity()


def _on_matrices(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns `tx` on parameters of at most two axes: a kernel (h, w, in, out) is (h * w * in, out)."""

    def flat(tree: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.reshape(-1, x.shape[-1]) if x.ndim > 2 else x, tree)

    def update(updates: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        new, state = tx.update(flat(updates), state, flat(params))
        return jax.tree.map(lambda u, like: u.reshape(like.shape), new, updates), state

    # `optax.contrib.MuonDimensionNumbers` would do the same, but optax 0.2.5 does not have them.
    return optax.GradientTransformation(lambda params: tx.init(flat(params)), update)


# The keyword-only arguments of a function are the options of its optimizer, as `mixedres._internal.names` has them.
registry.OPTIMIZERS.add_built_in({"sgd": _sgd, "lars": _lars, "adamw": _adamw, "muon": _muon})


def create(
    name: str,
    learning_rate: optax.Schedule,
    *,
    weight_decay: float = 0.0,
    decay_mask: str = KERNELS,
    clip_norm: float = 0.0,
    **options: float,
) -> optax.GradientTransformation:
    """Returns an optimizer for unscaled float32 gradients.

    Args:
      name: a name of `registry.OPTIMIZERS`: 'sgd', 'lars' (You et al., arXiv 1708.03888, with optax's trust ratio |w| /
        |g + decay * w| where the paper has |w| / (|g| + decay * |w|)), 'adamw' (arXiv 1711.05101), 'muon' (arXiv
        2502.16982), or a registered one. Muon moves a kernel by its momentum with all singular values near 1;
        parameters with one axis are updated by adamw.
      learning_rate: function of the number of applied updates.
      weight_decay: >= 0. For sgd and lars coupled L2: ``weight_decay * w`` is added to the gradient. For adamw and muon
        decoupled: the update shrinks w by ``learning_rate * weight_decay``.
      decay_mask: regular expression of the paths that decay and, for lars, have a trust ratio.
      clip_norm: largest global norm of the gradient; 0: no clipping.
      **options: options of this optimizer, each by default as in a fresh config:
        momentum: momentum of sgd, lars and muon, and beta 1 of adamw; in [0, 1).
        nesterov: Nesterov momentum, for sgd, lars and muon.
        rate_in_momentum: for sgd: ``v = momentum * v - rate * g`` and ``w += v``, as Keras has it, where a change of
          the rate does not rescale earlier updates; False: ``v = momentum * v + g`` and ``w -= rate * v``. Both are the
          same at a constant rate. lars always has the first form.
        beta2, epsilon: for adamw and muon.
        trust_coefficient: for lars.

    Raises:
      ValueError: for an unknown name, a number out of range, and an option that this optimizer does not take.
    """
    chosen = optimizer_options(name, options)
    if not (weight_decay >= 0 and clip_norm >= 0):
        raise ValueError(f"weight_decay and clip_norm must be >= 0, got {weight_decay} and {clip_norm}")
    mask = path_mask(decay_mask)
    parts = Parts(optax.scale_by_learning_rate(learning_rate), optax.add_decayed_weights(weight_decay, mask), mask)
    clip = optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity()
    made = registry.OPTIMIZERS[name](parts, **chosen)
    chain = made if isinstance(made, tuple) and not hasattr(made, "update") else (made,)
    if not all(hasattr(one, "init") and hasattr(one, "update") for one in chain):
        raise ValueError(f"optimizer {name!r} must return transformations of optax, got {made!r:.100}")
    return optax.chain(clip, *chain)


def with_layer_decay(tx: optax.GradientTransformation, factor: float) -> optax.GradientTransformation:
    """Returns `tx` with its updates multiplied by ``factor ** depth`` (Howard and Ruder, arXiv 1801.06146: 1/2.6)."""

    def scale(updates: PyTree, _: PyTree) -> PyTree:
        depth = depths(updates)
        return jax.tree_util.tree_map_with_path(lambda path, u: u * factor ** depth[path[0].key], updates)

    return optax.chain(tx, optax.stateless(scale))


def depths(names: Collection[str]) -> dict[str, int]:
    """Returns the depth of each module of a ResNet, from the head (0) and the last block (1) down to the stem."""
    blocks = [name for name in names if name.startswith("block_layer")]  # such as 'block_layer1_2'
    blocks.sort(key=lambda name: tuple(map(int, name.removeprefix("block_layer").split("_"))), reverse=True)
    known = {name: depth for depth, name in enumerate(blocks, start=1)}
    known |= dict.fromkeys(("stem_conv", "stem_norm"), len(blocks) + 1)
    return {name: known.get(name, 0) for name in names}


def train_only(tx: optax.GradientTransformation, pattern: str) -> optax.GradientTransformation:
    """Returns `tx` for the parameters whose paths match `pattern`; the other parameters stay as they are."""
    # The updates of others are -0.0, which change no bit; optax.selective_transform would give +0.0.
    mask = path_mask(pattern)

    def select(updates: PyTree, _: PyTree) -> PyTree:
        return jax.tree.map(lambda trainable, u: u if trainable else jnp.full_like(u, -0.0), mask(updates), updates)

    return optax.chain(optax.masked(tx, mask), optax.stateless(select))
