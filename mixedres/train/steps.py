"""The jitted steps of an experiment, the shapes that they are compiled for, and the step that counts tensors."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mixedres import models
from mixedres._internal.mesh import AXIS
from mixedres._internal.tree import named_leaves
from mixedres._internal.types import Batch, JittedStep, Metrics, PyTree, Variables
from mixedres.models import kernel_layout
from mixedres.numerics import TensorCounts, counting
from mixedres.precision import NoOpLossScale
from mixedres.train import step
from mixedres.train.experiment import Experiment
from mixedres.train.gradients import StepOptions, scaled_loss, split_batch


def train_step(experiment: Experiment) -> JittedStep:
    """Returns the jitted (state, batch) -> (state, metrics) of `mixedres.train.step.train_step`."""
    return step.jit_train_step(
        experiment.mesh,
        experiment.step_options,
        state_format=_state_format(experiment),
        compiler_options=experiment.compiler_options,
    )


def loss_and_grads(experiment: Experiment) -> JittedStep:
    """Returns the jitted (state, batch) -> (loss, unscaled gradients) of the training step.

    It has no compiler options, because JAX refuses to trace a function that has some. Compile it with those of the
    experiment.
    """
    loss_and_grads = partial(step.loss_and_grads, options=experiment.step_options)
    return step.jit_sharded(loss_and_grads, experiment.mesh, (P(), P(AXIS)))


def eval_step(experiment: Experiment) -> JittedStep:
    """Returns the jitted (variables, batch, baseline, sums) -> (sums, results) of `mixedres.train.step.eval_step`.

    On GPUs batch norms are folded into convolutions, see `mixedres.models.folding`. On CPUs this takes as long.
    """
    fold = experiment.devices[0].platform == "gpu" and experiment.precision.implementation == "casting"

    def apply_fn(variables: Variables, images: jax.Array, *, train: bool) -> jax.Array:
        model, variables = models.for_inference(experiment.model, variables, fold=fold)
        logits: jax.Array = experiment.precision.rewrite(model.apply)(variables, images, train=train)
        return logits

    options = experiment.compiler_options
    return step.jit_eval_step(
        experiment.mesh, apply_fn=apply_fn, normalize=experiment.normalize_fn, compiler_options=options
    )


def numerics_step(experiment: Experiment) -> JittedStep:
    """Returns the jitted (variables, batch) -> `numerics.TensorCounts` of a training step without a loss scale.

    The network is in its plain form, because only single layers can be counted.
    """
    if isinstance(experiment.model, models.ResNet):
        plain = experiment.model.clone(fused=False, use_onednn=False)
        experiment = dataclasses.replace(experiment, model=plain)
    count = partial(tensor_counts, options=experiment.step_options)
    return step.jit_sharded(count, experiment.mesh, (P(), P(AXIS)))


def tensor_counts(variables: Variables, batch: Batch, *, options: StepOptions) -> TensorCounts:
    """Counts the tensors of one step without a loss scale, over all devices; runs inside `jax.shard_map` over `AXIS`.

    Counts the gradients that each device computes, before any mean over microbatches and devices, because these
    gradients must fit into float16.

    Args: as for `mixedres.train.gradients.scaled_grads`.
    """
    loss_fn = partial(scaled_loss, options=options)
    per_device = jax.lax.pcast((variables["params"], variables["batch_stats"]), AXIS, to="varying")

    def count(part: Batch) -> tuple[counting.TapStatistics, dict[str, jax.Array]]:
        grad_fn = counting.tapped_value_and_grad(counting.tap_modules(loss_fn), has_aux=True)
        _, grads, statistics = grad_fn(*per_device, part, NoOpLossScale())
        return statistics, _histograms(grads)

    if options.microbatches == 1:  # convolutions in a loop are slow on the CPU
        statistics, gradients = count(batch)
    else:
        parts = split_batch(batch, options.microbatches)
        statistics, gradients = jax.tree.map(lambda x: x.sum(0), jax.lax.map(count, parts))
    # The statistics of the taps are gradients of replicated values, so they are already sums over the devices.
    return TensorCounts(statistics, jax.lax.psum(gradients, AXIS), _histograms(variables["params"]))


def batch_shapes(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the global batch of a training step as shapes, for compiling ahead."""
    shape = (experiment.batch_size, *experiment.source.image_shape)
    sharding = experiment.batch_sharding
    return {
        "image": jax.ShapeDtypeStruct(shape, experiment.source.image_dtype, sharding=sharding),
        "label": jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=sharding),
    }


def eval_batch_shapes(experiment: Experiment) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the global batch of an evaluation as shapes."""
    shapes = batch_shapes(experiment)
    mask = jax.ShapeDtypeStruct(shapes["label"].shape, bool, sharding=experiment.batch_sharding)
    return shapes | {"mask": mask}


def variable_shapes(experiment: Experiment) -> Variables:
    """Returns {'params', 'batch_stats'} of the network as shapes."""
    state: step.TrainState = jax.eval_shape(experiment.init_state)
    return state.variables


def state_shapes(experiment: Experiment) -> step.TrainState:
    """Returns the shapes, dtypes and placement of the state of a training step, for compiling ahead.

    Each leaf of the state is a `jax.ShapeDtypeStruct`.
    """
    state: step.TrainState = jax.eval_shape(experiment.init_state)
    placement = _state_format(experiment) or jax.tree.map(lambda _: experiment.replicated_sharding, state)
    state = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), state, placement)
    return state


def place_state(experiment: Experiment, state: step.TrainState) -> step.TrainState:
    """Returns the state, which is on the devices, in the memory layout that the training step takes."""
    layout = _state_format(experiment)
    return state if layout is None else jax.jit(lambda state: state, out_shardings=layout)(state)


def zero_sums(experiment: Experiment) -> Metrics:
    """Returns the sums at the start of an evaluation, on every device."""
    place = partial(jax.make_array_from_process_local_data, experiment.replicated_sharding)
    with jax.transfer_guard("allow"):
        return {name: place(zero) for name, zero in step.zero_sums().items()}


def has_ohwi_kernels(experiment: Experiment) -> bool:
    """Returns whether kernels have the layout of `mixedres.models.kernel_layout`, which is slow on CPUs."""
    return experiment.is_fused and experiment.devices[0].platform != "cpu"


def _state_format(experiment: Experiment) -> PyTree:
    """Returns memory layout and sharding of the state; None for the default layout."""
    if not has_ohwi_kernels(experiment):
        return None
    return kernel_layout.formats(jax.eval_shape(experiment.init_state), experiment.replicated_sharding)


def _histograms(tree: PyTree) -> dict[str, jax.Array]:
    return {name: counting.exponents(leaf) for name, leaf in named_leaves(tree).items()}
