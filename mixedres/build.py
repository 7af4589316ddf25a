"""From a config to the objects that it names; nothing is written here, so that a mistake costs nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from mixedres import autocast, data, models, optimizers, precision, step
from mixedres.autocast.keep import nearest
from mixedres.config import ConfigError, errors, validate
from mixedres.config_keys import duration_in_steps
from mixedres.devices import devices_and_batch
from mixedres.setup import Setup

# Platforms on which every benchmark in experiments/results has the step faster with fused norms. On the CPU it is the
# same within 6 %, and a GPU was not at hand; docs/performance.md has the numbers.
FUSED_IS_FASTER_ON: frozenset[str] = frozenset()


def build(config: ConfigDict) -> Setup:
    """Checks a config and builds what it names; writes nothing.

    Raises:
      ConfigError: at the first mistake.
    """
    validate(config)
    chosen, loss_scale = precision_of(config)
    mesh, batch_size = devices_and_batch(config)
    with errors("config.data"):
        source = data.load(**config.data, batch_size=batch_size)
    if source.train_examples < batch_size:
        raise ConfigError(
            f"config.batch_size is {batch_size}, but config.data.name={config.data.name} has only "
            f"{source.train_examples} training images; set config.batch_size to at most that"
        )
    policy, norm_policy = chosen.network_policies
    options = config.model.to_dict()
    fused = _fused(options.pop("fused"), config, chosen, mesh.devices.flat[0].platform)
    with errors("config.model"):
        model = models.create(
            **options,
            num_classes=source.num_classes,
            policy=policy,
            norm_policy=norm_policy,
            momentum=config.batch_norm.momentum,
            epsilon=config.batch_norm.epsilon,
            axis_name=step.AXIS if config.batch_norm.sync else None,
            precision=chosen.matmul_precision,
            keep_float32=chosen.keep_float32,
            fused=fused,
        )
    steps_per_epoch = source.train_examples // batch_size
    in_steps = partial(duration_in_steps, steps_per_epoch=steps_per_epoch)
    total_steps = config.steps or in_steps(config.epochs)
    learning_rate, tx = _optimizer(config, batch_size, total_steps, in_steps)
    setup = Setup(
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
        warmup_steps=in_steps(config.schedule.warmup),
        learning_rate=learning_rate,
        tx=precision.loss_scaled(tx, loss_scale),
    )
    _check_paths(setup)
    return setup


def _fused(given: str, config: ConfigDict, chosen: precision.Precision, platform: str) -> bool:
    """Whether batch norms are fused with what follows them; raises ConfigError where they cannot be and must."""
    obstacle = chosen.obstacle_to_fusing
    if config.batch_norm.frozen:
        obstacle = "batch_norm.frozen: it is about norms by the statistics of the batch; leave one of them out"
    if given == "true" and obstacle:
        raise ConfigError(f"config.model.fused=true does not go with {obstacle}")
    return not obstacle and (given == "true" or (given == "auto" and platform in FUSED_IS_FASTER_ON))


def _check_paths(setup: Setup) -> None:
    """Raises ConfigError where an expression that is searched in paths is found in none."""
    pattern, kept = setup.config.train_only, setup.precision.keep_float32
    params = setup.variable_shapes["params"] if pattern or kept else {}
    paths = models.module_paths(params)
    if kept and not any(re.search(kept, path) for path in paths):
        raise ConfigError(
            f"config.precision.keep_float32={kept} is found in no module path; they look like {nearest(kept, paths)}"
        )
    if pattern and not any(jax.tree.leaves(optimizers.path_mask(pattern)(params))):
        raise ConfigError(
            f"config.train_only={pattern} is found in no parameter path; they look like /head/kernel and "
            "/block_layer1_1/conv1/kernel"
        )


def precision_of(config: ConfigDict) -> tuple[precision.Precision, precision.LossScale]:
    """The precision of a config and its loss scale, new; raises ConfigError for a mistake in their keys."""
    with errors("config.autocast"):
        rewrite = _rewrite_options(config)
    with errors("config.precision"):
        chosen = precision.get(**config.precision, **rewrite)
        for policy in (chosen.policy, chosen.norm_policy):
            if jnp.dtype(policy.param_dtype) != jnp.float32:
                raise ValueError(
                    f"policy '{policy}' must keep parameters in float32; write such as "
                    "params=float32,compute=float16,output=float32"
                )
        if jnp.dtype(chosen.norm_policy.output_dtype) != jnp.dtype(chosen.policy.compute_dtype):
            raise ValueError(
                f"norm_policy '{chosen.norm_policy}' must return the compute dtype of policy '{chosen.policy}'; "
                f"write output={jnp.dtype(chosen.policy.compute_dtype).name}"
            )
    options = config.loss_scale
    with errors("config.loss_scale"):
        scale = chosen.make_loss_scale(
            loss_scale=options.initial,
            period=options.period,
            factor=options.factor,
            min_loss_scale=options.min,
            max_loss_scale=options.max,
        )
    return chosen, scale


def _rewrite_options(config: ConfigDict) -> dict[str, Any]:
    """Lists and level of the graph rewrite, with the lists from their texts, 'tanh,exp'."""
    options = config.autocast.to_dict()
    level = options.pop("level")
    moves = {key: {name.strip() for name in text.split(",")} for key, text in options.items() if text.strip()}
    if moves:
        autocast.Lists().moved(moves)  # here, so that the message names config.autocast
    return {"lists": moves or None, "level": level}


def _optimizer(
    config: ConfigDict, batch_size: int, total_steps: int, in_steps: Callable[[Any], int]
) -> tuple[optax.Schedule, optax.GradientTransformation]:
    """The schedule, its peak scaled with the batch, and the optimizer that follows it."""
    options = config.optimizer.to_dict()
    reference, layer_decay = options.pop("lr_batch_size"), options.pop("layer_decay")
    peak = options.pop("learning_rate") * (batch_size / reference if reference else 1.0)
    with errors("config.schedule"):
        learning_rate = optimizers.schedule(
            config.schedule.name,
            peak=peak,
            total_steps=total_steps,
            warmup_steps=in_steps(config.schedule.warmup),
            end_factor=config.schedule.end_factor,
            boundaries=[in_steps(boundary) for boundary in config.schedule.boundaries],
            factors=config.schedule.factors,
            power=config.schedule.power,
        )
    with errors("config.optimizer"):
        tx = optimizers.create(options.pop("name"), learning_rate, **options)
    if layer_decay < 1:
        tx = optimizers.with_layer_decay(tx, layer_decay)
    if config.train_only:
        with errors("config.train_only"):
            tx = optimizers.restricted(tx, config.train_only)
    return learning_rate, tx
