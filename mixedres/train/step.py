"""The training and evaluation steps: pure functions of (state, batch). No config, no logging.

The order of the training step, and why:

  forward          compute dtype; logits come out in float32
  loss             float32
  scale            multiply the loss, so that small gradients survive the half-precision backward pass
  gradient         with respect to a per-device view of the float32 parameters (`jax.lax.pcast`): differentiating
                   replicated ones would already sum over the devices, in the compute dtype, and give n times the mean
  all-reduce       mean of the scaled gradients, in the parameter or the compute dtype
  unscale, check,  `mixedres.precision.loss_scaled`: in float32, by the scale that was used, one verdict for all
  optimize           devices because the gradients are already averaged
  select           old or new, over the whole state; on a skipped step only the loss scale and `step` move
  halt             where skipping cannot help: the state remains the one before the failing step, and every later step
                   leaves it unchanged, so that steps dispatched ahead spoil nothing
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres._internal.mesh import AXIS
from mixedres._internal.types import ApplyFn, Batch, JittedStep, Metrics, Params, PyTree, Variables
from mixedres.models import NormalizeFn, kernel_layout
from mixedres.precision import LossScale, LossScaledState, scaled
from mixedres.train import losses
from mixedres.train.gradients import StepOptions, scaled_grads

CompilerOptions: TypeAlias = dict[str, Any] | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The state of a run between two steps.

    Attributes:
      step: int32 scalar, number of batches consumed, with those of skipped steps: the data position.
      params: float32 parameters.
      batch_stats: float32 running statistics; {} for a network without any.
      opt_state: state of `mixedres.precision.loss_scaled`, with the loss scale.
      ema: float32 moving averages {'params', 'batch_stats'}, or None.
      halted: boolean scalar; true if the step after this state cannot be taken, see `train_step`.
    """

    step: jax.Array
    params: Params
    batch_stats: PyTree
    opt_state: LossScaledState
    ema: Variables | None
    halted: jax.Array

    @property
    def loss_scale(self) -> LossScale:
        """Returns the loss scale of the next step."""
        return self.opt_state.loss_scale

    @property
    def variables(self) -> Variables:
        """Returns parameters and statistics as the model's `apply` takes them."""
        return {"params": self.params, "batch_stats": self.batch_stats}

    @property
    def eval_variables(self) -> Variables:
        """Returns the variables to evaluate: the moving average if there is one."""
        return self.variables if self.ema is None else self.ema


def init_state(variables: Variables, tx: optax.GradientTransformation, *, ema: bool) -> TrainState:
    """Returns the state before the first step, from the result of a model's `init` and a `loss_scaled` optimizer."""
    params, batch_stats = variables["params"], variables.get("batch_stats", {})
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        batch_stats=batch_stats,
        opt_state=tx.init(params),
        ema=jax.tree.map(jnp.copy, {"params": params, "batch_stats": batch_stats}) if ema else None,
        halted=jnp.asarray(False),
    )


def train_step(state: TrainState, batch: Batch, *, options: StepOptions) -> tuple[TrainState, Metrics]:
    """Takes one step on this device's part of the batch; runs inside `jax.shard_map` over `AXIS`.

    A step whose loss or gradients are not finite is skipped if a lower loss scale can help. It halts if there is no
    loss scale, if the scale is at its minimum, and after `options.max_consecutive_skips` such steps in a row: from then
    on every step returns the state bit for bit as it was, except for `halted`.

    `batch`: 'image' (b, h, w, c) uint8 or float and 'label' (b,) int32, this device's examples.

    Returns the new state, and float32 scalar metrics over the global batch: 'loss' (mean, unscaled, smoothed), 'top1'
    (fraction), 'grads_finite' (0 or 1, for loss and gradients), 'loss_scale' (the scale that was used) and 'halted' (0
    or 1).
    """
    grads, batch_stats, metrics = scaled_grads(state.variables, batch, state.loss_scale, state.step, options)
    checked = {"checked": kernel_layout.to_ohwi(grads)} if options.ohwi else {}
    assert options.tx is not None
    updates, opt_state = options.tx.update(
        scaled(grads, state.loss_scale), state.opt_state, state.params, value=metrics["loss"], **checked
    )
    params = optax.apply_updates(state.params, updates)
    finite = opt_state.grads_finite
    ema = _average(state, {"params": params, "batch_stats": batch_stats}, options.ema_decay)

    too_many = opt_state.loss_scale.consecutive_skipped >= options.max_consecutive_skips
    cannot_recover = state.loss_scale.at_minimum | too_many
    halted = state.halted | (~finite & cannot_recover)
    # The updates of a skipped step are -0.0 and leave params unchanged, except for subnormals that a device flushes.
    params, batch_stats, ema = _select(
        finite & ~halted, (params, batch_stats, ema), (state.params, state.batch_stats, state.ema)
    )
    count, opt_state = jmp.select_tree(halted, (state.step, state.opt_state), (state.step + 1, opt_state))
    metrics |= {
        "grads_finite": finite.astype(jnp.float32),
        "loss_scale": jnp.asarray(state.loss_scale.loss_scale),
        "halted": halted.astype(jnp.float32),
    }
    return TrainState(count, params, batch_stats, opt_state, ema, halted), metrics


def loss_and_grads(state: TrainState, batch: Batch, *, options: StepOptions) -> tuple[jax.Array, Params]:
    """Computes loss and unscaled gradients of a step; `train_step` takes the step only if all of them are finite."""
    grads, _, metrics = scaled_grads(state.variables, batch, state.loss_scale, state.step, options)
    with jax.named_scope("unscale"):
        return metrics["loss"], state.loss_scale.unscale(grads)


def eval_step(
    variables: Variables,
    batch: Batch,
    baseline: jax.Array | None,
    sums: Metrics,
    *,
    apply_fn: ApplyFn,
    normalize: NormalizeFn,
) -> tuple[Metrics, Metrics]:
    """Adds one batch to the sums of an evaluation; runs inside `jax.shard_map` over `AXIS`.

    `batch`: as in `train_step`, and 'mask' (b,) bool: false for the padding of the last batch. `baseline`: (b,) int32,
    predicted classes to compare with, or None.

    Returns the new sums, and the results of this device's images: 'predicted' (b,) int32 class, 'loss' (b,) float32,
    and the k = min(5, classes) most probable classes, 'top' (b, k) int32, with their 'probability' (b, k) float32.
    """
    logits = apply_fn(variables, normalize(batch["image"]), train=False).astype(jnp.float32)
    labels, mask = batch["label"], batch["mask"]
    classes = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    counts = {
        "top1": losses.in_top_k(logits, labels, 1),
        "top5": losses.in_top_k(logits, labels, 5),
        "examples": jnp.ones_like(mask),
        "changed": classes != (classes if baseline is None else baseline),
        # The predicted class of an image with such logits means nothing.
        "nonfinite": ~jnp.isfinite(logits).all(-1),
    }
    new: Metrics = {name: jnp.sum(values & mask) for name, values in counts.items()}
    loss = losses.cross_entropy(logits, labels)
    new["loss"] = jnp.sum(jnp.where(mask, loss, 0.0))
    new = jax.lax.psum(new, AXIS)
    # The order of the logits: probabilities of large logits may round to one number.
    top = jax.lax.top_k(logits, min(5, logits.shape[-1]))[1]
    probability = jnp.take_along_axis(jax.nn.softmax(logits), top, axis=-1)
    results = {"predicted": classes, "loss": loss, "top": top, "probability": probability}
    return jax.tree.map(lambda old, add: old + add.astype(old.dtype), sums, new), results


def zero_sums() -> dict[str, np.ndarray]:
    """Returns the first sums of an evaluation, on the host: int32 counts, exact to 2**31 images, and a float32 loss."""
    counts = {name: np.zeros((), np.int32) for name in ("top1", "top5", "examples", "changed", "nonfinite")}
    return counts | {"loss": np.zeros((), np.float32)}


def jit_sharded(
    step: Callable[..., PyTree],
    mesh: Mesh,
    in_specs: PyTree,
    out_specs: PyTree = P(),  # noqa: B008
    *,
    donate: int | tuple[int, ...] = (),
    first_format: PyTree = None,  # memory layout and sharding of the first input and the first output
    compiler_options: CompilerOptions = None,
) -> JittedStep:
    """Returns `step` under `shard_map` and `jit`, with inputs and outputs sharded by the specs."""
    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs)
    inputs, outputs = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), (in_specs, out_specs), is_leaf=lambda x: isinstance(x, P)
    )
    if first_format:
        inputs, outputs = (first_format, *inputs[1:]), (first_format, outputs)
    return jax.jit(
        mapped,
        in_shardings=inputs,
        out_shardings=outputs,
        donate_argnums=donate,
        compiler_options=compiler_options,
    )


def jit_train_step(
    mesh: Mesh,
    options: StepOptions,
    *,
    donate: bool | None = None,  # whether the new state takes the memory of the old state; None: yes, except on the CPU
    state_format: PyTree = None,  # see `mixedres.models.kernel_layout.formats`
    compiler_options: CompilerOptions = None,
) -> JittedStep:
    """Returns `train_step` with `options` as a jitted, sharded function (state, batch) -> (state, metrics)."""
    platform = mesh.devices.flat[0].platform
    # XLA for CPUs would first copy a donated state: 7 % of a step of ResNet-50 with 16 images of 64 pixels.
    donates = platform != "cpu" if donate is None else donate
    # XLA for CPUs and TPUs joins all gradients into one all-reduce without a kernel for each.
    in_buckets = options.in_buckets or (mesh.size > 1 and platform not in ("cpu", "tpu"))
    options = dataclasses.replace(options, ohwi=state_format is not None, in_buckets=in_buckets)
    step = partial(train_step, options=options)
    return jit_sharded(
        step,
        mesh,
        (P(), P(AXIS)),
        donate=0 if donates else (),
        first_format=state_format,
        compiler_options=compiler_options,
    )


def jit_eval_step(
    mesh: Mesh, *, apply_fn: ApplyFn, normalize: NormalizeFn, compiler_options: CompilerOptions = None
) -> JittedStep:
    """Returns the jitted, sharded (variables, batch, baseline, sums) -> (sums, results) of `eval_step`."""
    step = partial(eval_step, apply_fn=apply_fn, normalize=normalize)
    specs = (P(), P(AXIS), P(AXIS), P())
    return jit_sharded(step, mesh, specs, (P(), P(AXIS)), compiler_options=compiler_options)


def _select(keep: jax.Array, new: PyTree, old: PyTree) -> PyTree:
    """Returns `new` if the boolean scalar `keep` is true, else `old`, leaf by leaf."""
    # All read one array of `keep`, which the barrier keeps XLA for GPUs from splitting into a kernel for each small
    # vector: 183 kernels fewer in a step of ResNet-50.
    longest = max((x.size for x in jax.tree.leaves(new) if x.ndim == 1), default=0)
    shared = jax.lax.optimization_barrier(jnp.full(longest, keep))
    return jax.tree.map(lambda n, o: jnp.where(shared[: n.size] if n.ndim == 1 else keep, n, o), new, old)


def _average(state: TrainState, new: Variables, decay: float) -> Variables | None:
    """Returns the moving average after this update."""
    if state.ema is None:
        return None
    applied = (state.step - state.loss_scale.total_skipped).astype(jnp.float32)
    # The rule of TensorFlow's ExponentialMovingAverage with num_updates.
    weight = 1.0 - jnp.minimum(jnp.float32(decay), (1.0 + applied) / (10.0 + applied))
    # In this form the average of equal numbers is that number.
    average: Variables = jax.tree.map(lambda old, x: old + weight * (x - old), state.ema, new)
    return average
