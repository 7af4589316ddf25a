"""What the tests of the step share: a small network, its batches, and comparisons by bits."""

import dataclasses
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from mixedres import models, precision
from mixedres._internal.mesh import AXIS, make_mesh
from mixedres.train import optimizers, step
from mixedres.train.gradients import StepOptions
from tests.models import networks

SIZE, CLASSES = 8, 10
NORMALIZE = models.normalization((127.0,), (60.0,))


@cache
def network(preset: str, sync: bool = False, fused: bool = False, stages: tuple[int, ...] = ()):
    """(model, variables as numpy) of a ResNet on SIZE x SIZE gray images: stem, `stages` and head.

    Without a block it has a convolution, a norm and a dense layer, and compiles in a fraction of the time.
    """
    chosen = precision.get(preset)
    policy, norm_policy = chosen.network_policies
    model = models.create(
        "cifar_resnet8",
        num_classes=CLASSES,
        policy=policy,
        norm_policy=norm_policy,
        axis_name=AXIS if sync else None,
        zero_init_last=False,
        precision=chosen.matmul_precision,
        fused=fused,
    ).clone(stage_sizes=stages)
    if (preset, sync, fused) != ("fp32", False, False):  # none of which changes the variables
        return model, network("fp32", False, False, stages)[1]
    return model, networks.random_variables(model, image_shape=(1, SIZE, SIZE, 1))


def optimizer(**options):
    """SGD with momentum, weight decay and a rate that changes every step."""
    rate = optimizers.schedule("cosine", peak=0.1, total_steps=20)
    return optimizers.create("sgd", rate, **({"weight_decay": 1e-3} | options))


@cache
def compiled(preset, devices, sync, ema, scale, tx, fused=False, stages=(), donate=None, ohwi=False, **options):
    """(jitted step, function that makes a first state); cached, because compiling is most of the time of a test.

    ohwi: kernels have the order of cuDNN, which other devices take as well.
    """
    model, variables = network(preset, sync, fused, stages)
    wrapped = precision.loss_scaled(tx or optimizer(), scale or precision.get(preset).make_loss_scale())
    mesh = make_mesh(jax.devices()[:devices])
    apply_fn = precision.get(preset).rewrite(model.apply)
    chosen = StepOptions(apply_fn, NORMALIZE, wrapped, ema_decay=0.9 if ema else 0.0, **options)

    def state():
        return step.init_state(jax.tree.map(jnp.asarray, variables), wrapped, ema=ema)

    placement = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    layout = models.kernel_layout.formats(jax.eval_shape(state), placement) if ohwi else None
    train_step = step.jit_train_step(mesh, chosen, donate=donate, state_format=layout)
    return train_step, lambda: jax.device_put(state(), layout or placement)


def make(preset="fp32", *, devices=1, loss_scale=None, sync=False, ema=True, tx=None, **options):
    """(jitted step, first state) of the small network; three skipped steps in a row end a run."""
    options = {"max_consecutive_skips": 3} | options
    # Loss scales hold arrays, which no cache can hash.
    make_step = compiled if loss_scale is None else compiled.__wrapped__
    train_step, first_state = make_step(preset, devices, sync, ema, loss_scale, tx, **options)
    return train_step, first_state()


def batch(seed: int, size: int = 16, images=np.float32):
    """A random batch; float images can carry a NaN."""
    rng = np.random.default_rng(seed)
    pixels = rng.integers(0, 256, (size, SIZE, SIZE, 1)).astype(images)
    return {"image": pixels, "label": rng.integers(0, CLASSES, size).astype(np.int32)}


def poisoned(seed: int, size: int = 16):
    """The same batch with one infinite pixel: loss and every gradient become NaN."""
    bad = batch(seed, size)
    bad["image"][3, 2, 2, 0] = np.inf
    return bad


def with_scale(state, **values):
    """The state with numbers of its loss scale changed."""
    scale = state.loss_scale
    scale = scale._replace(**{name: np.asarray(x, getattr(scale, name).dtype) for name, x in values.items()})
    return dataclasses.replace(state, opt_state=state.opt_state._replace(loss_scale=host(scale)))


def at_minimum(state, scale=1.0):
    """The state with a loss scale that is at its minimum."""
    return with_scale(state, loss_scale=scale, min_loss_scale=scale)


def but_for_the_latch(state):
    return dataclasses.replace(state, halted=None)


def host(tree):
    """A copy on the host, safe from donation."""
    return jax.tree.map(np.array, tree)


def close(a, b, tolerance):
    """Asserts that two trees agree to `tolerance` of the largest value of each leaf of `b`."""
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1e-3)
        assert error <= tolerance, f"{jax.tree_util.keystr(path)}: {error:.2e}"
