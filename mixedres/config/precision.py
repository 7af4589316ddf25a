"""Precision of a config."""

import jax.numpy as jnp
from ml_collections import ConfigDict

from mixedres import amp, precision
from mixedres._internal.errors import config_errors


def precision_of(config: ConfigDict) -> tuple[precision.Precision, precision.LossScale]:
    """Returns the precision of a config, and a new loss scale; raises ConfigError for a mistake in the keys."""
    with config_errors("config.autocast"):
        lists = config.autocast.to_dict()
        level = lists.pop("level")
        # The config has each list as a text, 'tanh,exp'.
        moves = {key: {name.strip() for name in text.split(",")} for key, text in lists.items() if text.strip()}
        if moves:
            amp.Lists().replace(moves)  # raises here, so that the message names config.autocast
    with config_errors("config.precision"):
        chosen = precision.get(**config.precision, lists=moves or None, level=level)
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
    with config_errors("config.loss_scale"):
        scale = chosen.make_loss_scale(
            loss_scale=options.initial,
            period=options.period,
            factor=options.factor,
            min_loss_scale=options.min,
            max_loss_scale=options.max,
        )
    return chosen, scale
