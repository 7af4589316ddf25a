"""Builder of the objects that a config names. It writes nothing, so that a mistake in the config costs nothing."""

import json
import pathlib
import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mixedres import data, models, precision
from mixedres._internal.errors import ConfigError, config_errors, nearest
from mixedres._internal.mesh import AXIS, check_devices, make_mesh
from mixedres.config import KEYS, duration_in_steps, flatten, precision_of
from mixedres.train import optimizers
from mixedres.train.experiment import Experiment, for_training

# {kind of device: names of `arithmetic`} for which fused norms make the step faster on average over the benchmarks in
# experiments/results, and in none of them 5 % slower; python -m experiments.gpu enters a GPU. docs/performance.md has
# the numbers. Norms are plain on a kind of device that was not measured.
FUSED_IS_FASTER: dict[str, list[str]] = json.loads((pathlib.Path(__file__).parent / "fused_is_faster.json").read_text())
# The keys that mean something for ResNets alone.
_OF_RESNETS = ("model.", "batch_norm.", "optimizer.layer_decay")


def build(config: ConfigDict, source: data.Source) -> Experiment:
    """Builds the parts of a run from a config that has a batch size; raises ConfigError at the first mistake."""
    check_devices()
    chosen, loss_scale = precision_of(config)
    mesh, batch_size = make_mesh(devices_of(config)), config.batch_size
    _check_division(batch_size, mesh.size, config.microbatches)
    device = mesh.devices.flat[0]
    model = _network(config, source.num_classes, chosen, device.device_kind)
    steps_per_epoch = source.train_examples // batch_size
    in_steps = partial(duration_in_steps, steps_per_epoch=steps_per_epoch)
    total_steps = config.steps or in_steps(config.epochs)
    in_schedule = in_steps
    if config.schedule.epoch == "fractional":  # as TensorFlow's r1 counts
        batches = source.train_examples / batch_size
        in_schedule = partial(duration_in_steps, steps_per_epoch=batches, round_down=True)
    model = for_training(model, device.platform, chosen, config, total_steps * batch_size, source)
    learning_rate, tx = _optimizer(config, batch_size, total_steps, in_schedule)
    experiment = Experiment(
        config=config,
        precision=chosen,
        source=source,
        model=model,
        mesh=mesh,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        total_steps=total_steps,
        eval_every=in_steps(config.eval_every),
        checkpoint_every=in_steps(config.checkpoint_every),
        patience=in_steps(config.patience),
        warmup_steps=in_schedule(config.schedule.warmup),
        learning_rate=learning_rate,
        # Checking updates takes 167 more kernels in a step of ResNet-50. These optimizers compute in float32 and add an
        # epsilon to what they divide by, so that finite gradients make finite updates.
        tx=precision.loss_scaled(tx, loss_scale, check_updates=False),
    )
    _check_paths(experiment)
    return experiment


def devices_of(config: ConfigDict) -> list[jax.Device]:
    """Returns the devices of the run: equally many of every process, in the order of the processes."""
    check_devices()
    devices, hosts = jax.devices(), jax.process_count()
    count = config.num_devices or len(devices)
    if count > len(devices):
        owner = "this machine has" if hosts == 1 else f"the {hosts} processes have"
        raise ConfigError(f"config.num_devices is {count}, but {owner} {len(devices)} ({devices[0].platform})")
    by_host = [[device for device in devices if device.process_index == host] for host in range(hosts)]
    if count % hosts or min(map(len, by_host)) < count // hosts:
        have = ", ".join(str(len(own)) for own in by_host)
        raise ConfigError(
            f"{count} devices cannot be shared equally by {hosts} processes that have {have}; "
            "give all of them as many, or set config.num_devices to a number that they can share"
        )
    return [device for own in by_host for device in own[: count // hosts]]


def _check_division(batch_size: int, devices: int, microbatches: int) -> None:
    """Raises ConfigError if devices and microbatches do not divide the batch."""
    parts = devices * microbatches
    if batch_size % parts:
        below = batch_size // parts * parts
        sizes = f"{below} and {below + parts}" if below else f"{parts}"
        raise ConfigError(
            f"config.batch_size is {batch_size}, not a multiple of {parts} (devices: {devices}, microbatches: "
            f"{microbatches}); the nearest sizes that are: {sizes}"
        )


def _network(config: ConfigDict, num_classes: int, chosen: precision.Precision, kind: str) -> models.Network:
    """Returns the network of the config: a ResNet, or one of `models.NETWORKS`, which take no options of ResNets."""
    make = models.NETWORKS.get(config.model.name)
    if make is None:
        options = config.model.to_dict()
        fused = _is_fused(options.pop("fused"), config, chosen, kind)
        with config_errors("config.model"):
            return models.create(
                **options,
                num_classes=num_classes,
                momentum=config.batch_norm.momentum,
                epsilon=config.batch_norm.epsilon,
                unbiased=config.batch_norm.unbiased,
                axis_name=AXIS if config.batch_norm.sync else None,
                fused=fused,
                **chosen.network_options,
            )
    flat = flatten(config)
    for key in KEYS:
        if key.path.startswith(_OF_RESNETS) and key.path != "model.name" and flat[key.path] != key.default:
            raise ConfigError(
                f"config.{key.path}={flat[key.path]} is about ResNets, and model.name={config.model.name} is none; "
                f"leave it out, or set it to its default, {key.default}"
            )
    with config_errors("config.model"):
        network: models.Network = make(num_classes=num_classes, **chosen.network_options)
        return network


def _is_fused(given: str, config: ConfigDict, chosen: precision.Precision, kind: str) -> bool:
    """Returns whether batch norms are fused with the operations after them; `given` is 'auto', 'true' or 'false'."""
    obstacle = chosen.why_not_fusable
    if config.batch_norm.frozen:
        obstacle = "batch_norm.frozen: fused norms take the statistics of the batch; leave one of them out"
    if given == "true" and obstacle:
        raise ConfigError(f"config.model.fused=true does not go with {obstacle}")
    is_faster = arithmetic(chosen) in FUSED_IS_FASTER.get(kind, ())
    return not obstacle and (given == "true" or (given == "auto" and is_faster))


def arithmetic(chosen: precision.Precision) -> str:
    """Returns the compute dtype, such as 'bfloat16', or 'bfloat16 rewritten' if a graph rewrite casts to the dtype."""
    dtype = jnp.dtype(chosen.policy.compute_dtype).name
    return f"{dtype} rewritten" if chosen.implementation == "graph_rewrite" else dtype


def _check_paths(experiment: Experiment) -> None:
    """Raises ConfigError if `trainable` or `keep_float32` matches no path."""
    trainable, keep_float32 = experiment.config.trainable, experiment.precision.keep_float32
    params = experiment.variable_shapes()["params"] if trainable or keep_float32 else {}
    paths = models.module_paths(params)
    if keep_float32 and not any(re.search(keep_float32, path) for path in paths):
        raise ConfigError(
            f"config.precision.keep_float32={keep_float32} matches no module; module paths look like "
            f"{nearest(keep_float32, paths)}"
        )
    if keep_float32 and experiment.config.model.name in models.NETWORKS and _is_ignored(experiment):
        raise ConfigError(
            f"config.precision.keep_float32={keep_float32} changes nothing in {experiment.config.model.name}: give its "
            "layers the dtypes of mixedres.models.policy_of(self, NAME), or set precision.implementation=graph_rewrite"
        )
    if trainable and not any(jax.tree.leaves(optimizers.path_mask(trainable)(params))):
        raise ConfigError(
            f"config.trainable={trainable} matches no parameter; parameter paths look like /head/kernel and "
            "/block_layer1_1/conv1/kernel"
        )


def _is_ignored(experiment: Experiment) -> bool:
    """Returns whether a network that casts computes the same without `keep_float32`."""
    if experiment.precision.implementation != "casting":
        return False
    images = jax.ShapeDtypeStruct((1, *experiment.source.image_shape), jnp.float32)
    variables, changed = experiment.variable_shapes(), experiment.model.clone(keep_float32="")
    programs = [
        str(jax.make_jaxpr(partial(model.apply, train=False))(variables, images))
        for model in (experiment.model, changed)
    ]
    return programs[0] == programs[1]


def _optimizer(
    config: ConfigDict, batch_size: int, total_steps: int, in_steps: Callable[[str | float], int]
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """Returns the schedule, with its peak scaled to the batch, and the optimizer."""
    options = config.optimizer.to_dict()
    reference, layer_decay = options.pop("lr_reference_batch"), options.pop("layer_decay")
    peak = options.pop("learning_rate") * (batch_size / reference if reference else 1.0)
    planned = config.schedule.to_dict()
    del planned["epoch"]  # which decided what `in_steps` does
    with config_errors("config.schedule"):
        planned["warmup_steps"] = in_steps(planned.pop("warmup"))
        given = planned["boundaries"]
        steps = planned["boundaries"] = [in_steps(boundary) for boundary in given]
        if steps != sorted(set(steps)):  # `schedule` checks it too, and knows the steps alone
            raise ConfigError(
                f"config.schedule.boundaries={','.join(map(str, given))}: the boundaries are the steps "
                f"{', '.join(map(str, steps))}, and must increase; write the earliest first"
            )
        learning_rate = optimizers.schedule(**planned, peak=peak, total_steps=total_steps)
    with config_errors("config.optimizer"):
        tx = optimizers.create(options.pop("name"), learning_rate, **options)
    if layer_decay < 1:
        tx = optimizers.with_layer_decay(tx, layer_decay)
    if config.trainable:
        with config_errors("config.trainable"):
            tx = optimizers.train_only(tx, config.trainable)
    return learning_rate, tx
