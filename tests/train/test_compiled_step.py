"""The programs of a run as XLA compiles them compute what their operations compute one by one."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import models, precision
from mixedres.train import start
from tests.train import run_cases


class Averaging(models.Network):
    """A product with a matrix of one constant before a mean, which XLA's fusions for CPUs compute wrong."""

    @nn.compact
    def __call__(self, images, train=False):
        width = self.num_classes
        rows = nn.Dense(width, dtype=self.policy.compute_dtype)(images.reshape(len(images), -1, 3))
        return jnp.square(rows - rows @ jnp.full((width, width), 1 / width, rows.dtype)).mean(1).astype(jnp.float32)


def differences(preset, name, batch_size, image_size=8):
    """Relative differences of gradients, and of losses in an evaluation, between compiled programs and operations."""
    flags = {"model__name": name, "batch_size": batch_size, "data__image_size": image_size}
    experiment = run_cases.build(run_cases.tiny(preset, **flags, num_devices=1, data__train_examples=1024))
    state, rng = start.new_state(experiment), np.random.default_rng(0)
    images = rng.integers(0, 256, experiment.batch_shapes()["image"].shape).astype(np.uint8)
    batch = {"image": images, "label": rng.integers(0, 10, batch_size).astype(np.int32)}
    masked = experiment.shard_batch(batch | {"mask": np.ones(batch_size, bool)}, has_mask=True)
    batch, options = experiment.shard_batch(batch), experiment.compiler_options
    training = experiment.loss_and_grads()
    of_training = training.lower(state, batch).compile(compiler_options=options)(state, batch)
    arguments = state.variables, masked, None, experiment.zero_sums()
    evaluation = experiment.eval_step()
    of_evaluation = evaluation(*arguments)[1]["loss"]
    with jax.disable_jit():
        expected = training(state, batch), evaluation(*arguments)[1]["loss"]
    found = [np.asarray(x, np.float64) for x in jax.tree.leaves((of_training, of_evaluation))]
    pairs = zip(found, (np.asarray(x, np.float64) for x in jax.tree.leaves(expected)), strict=True)
    return max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs)


@pytest.mark.parametrize("preset", ["fp32", "bf16"])
def test_product_with_a_constant_matrix_is_computed_as_written(monkeypatch, preset):
    monkeypatch.setitem(models.NETWORKS, "averaging", Averaging)
    assert differences(preset, "averaging", 8, 64) < (1e-4 if preset == "fp32" else 0.03)


# Outside of jit, JAX's shard_map does not take the custom rules of a bfloat16 rewrite.
@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [8, 1024])
@pytest.mark.parametrize("preset", sorted({*precision.PRESETS} - {"bf16_rewrite"}))
def test_compiled_step_of_a_resnet_equals_its_operations(monkeypatch, preset, batch_size):
    run_cases.shrink(monkeypatch)
    monkeypatch.setattr(models.onednn, "is_faster", lambda dtype, pixels: True)
    assert differences(preset, "cifar_resnet8", batch_size) < 0.05
