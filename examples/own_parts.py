"""A config whose network, optimizer, schedule, augmentation and tracker are its own.

    python -m mixedres.main --config=examples/own_parts.py:fp16 --workdir=runs/own
    python -m mixedres.predict --import=examples/own_parts.py --from=runs/own digit.png

Training runs this file. Other commands that read the run ask for it: they import nothing because a run names it.
"""

import json

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import optax

from mixedres import config, models, registry


class Mixer(models.Network):
    """One block of an MLP-Mixer, arXiv 2105.01601: mixes the 4x4 patches of an image, then the channels of each."""

    @nn.compact
    def __call__(self, images, train=False):
        dtype = self.policy.compute_dtype
        x = nn.Conv(32, (4, 4), strides=(4, 4), dtype=dtype, name="patches")(images)
        x = x.reshape(x.shape[0], -1, 32)
        y = nn.LayerNorm(dtype=jnp.float32, name="norm1")(x).astype(dtype).mT
        x += nn.Dense(x.shape[1], dtype=dtype, name="tokens")(nn.gelu(y)).mT
        y = nn.LayerNorm(dtype=jnp.float32, name="norm2")(x).astype(dtype)
        x += nn.Dense(32, dtype=dtype, name="channels")(nn.gelu(y))
        dtype = models.policy_of(self, "head").compute_dtype  # keep_float32=^/head$ makes it float32
        head = nn.Dense(self.num_classes, dtype=dtype, name="head")
        return head(x.astype(jnp.float32).mean(1)).astype(self.policy.output_dtype)


def lion(parts, *, momentum, beta2):
    """Lion, arXiv 2302.06675, with decoupled weight decay; the options are keys of config.optimizer."""
    return optax.scale_by_lion(momentum, beta2), parts.decay, parts.descend


def shift(image, rng):
    """Moves an image by up to a pixel, around its edges."""
    return np.roll(image, rng.integers(-1, 2, 2), (0, 1))


class Lines:
    """Prints the top-1 of each evaluation into a file beside the run."""

    def __init__(self, directory, config, first_step):
        self.file = (directory / "evaluations.txt").open("a")

    def write(self, step, kind, values):
        if kind == "eval":
            print(json.dumps({"step": step, "top1": values["top1"]}), file=self.file)

    def close(self, failed):
        self.file.close()


registry.NETWORKS["mixer"] = Mixer
registry.OPTIMIZERS["lion"] = lion
registry.SCHEDULES["sqrt"] = lambda progress: 1 - jnp.sqrt(progress)
registry.AUGMENTATIONS["shift"] = shift
registry.TRACKERS["lines"] = Lines


def get_config(preset="fp16"):
    """Returns the digits recipe with these parts."""
    made = config.load_config(f"digits:{preset}")
    made.model.name = "mixer"
    made.model.version = None
    made.optimizer.name = "lion"
    made.optimizer.learning_rate, made.optimizer.lr_reference_batch = 3e-3, 0
    made.optimizer.weight_decay = 1e-3
    made.schedule.name = "sqrt"
    made.data.augment = "shift"
    return made
