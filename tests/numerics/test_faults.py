"""Faults put into small networks: what `first_nonfinite` names as their origin."""

import functools
import linecache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from mixedres.numerics import first_nonfinite
from mixedres.train import losses
from tests.arrays import full
from tests.numerics import cases
from tests.numerics.cases import F16, F32

LARGEST = float(jnp.finfo(F16).max)


@functools.cache
def resnet():
    """(gradient program in float16, parameters, batch); one program for all faults."""
    case = cases.resnet(batch=8, stages=(1,))
    return jax.value_and_grad(case.loss(F16)), case.params, case.batch


def of_resnet(factor):
    """(what is found, the largest weight) with the kernel of one convolution multiplied."""
    fn, params, batch = resnet()
    params = jax.tree.map(np.array, params)
    kernel = params["block_layer1_1"]["conv2"]["kernel"]
    kernel *= np.float32(factor)
    return first_nonfinite(fn, params, batch, jnp.float32(1), names=("params", "batch", "scale")), np.abs(kernel).max()


def about(origin):
    """(path, direction, primitive) of an origin."""
    return origin.array.path, origin.array.direction, origin.array.primitive


def assert_written_in(origin, file, text):
    """The operation is on a line of this file that has this text."""
    found, _, rest = origin.array.source.rpartition(":")
    assert found.endswith(file) and text in linecache.getline(found, int(rest.split()[0]))


def gradients(model):
    """Of the mean cross-entropy of a network, times a scale, by its parameters."""

    def loss(params, batch, scale):
        x, labels = batch
        logits = model.apply({"params": params}, x).astype(F32)
        return losses.cross_entropy(logits, labels).mean() * scale

    return jax.value_and_grad(loss)


def examples(number, features=8):
    """Half of them are of class 0."""
    rng = np.random.default_rng(0)
    labels = np.where(np.arange(number) % 2, rng.integers(1, 10, number), 0)
    return rng.standard_normal((number, features)).astype(np.float32), labels.astype(np.int32)


def test_healthy_network_raises_no_alarm():
    finding, _ = of_resnet(1)
    assert finding.origin is None and finding.nonfinite_results == ()
    assert all(row.finite for row in finding.arrays)


def test_large_weight_overflows_in_its_convolution():
    finding, largest = of_resnet(2e5)
    assert largest < LARGEST  # so it is not the kernel that overflows
    origin = finding.origin
    assert about(origin) == ("ResNet/block_layer1_1/conv2", "forward", "conv_general_dilated")
    assert origin.array.dtype == F16 and origin.array.shape == (8, 8, 8, 16) and origin.array.largest <= LARGEST
    before, kernel = origin.inputs
    assert before.path == "ResNet/block_layer1_1" and before.largest < 10
    assert kernel.largest == np.float16(largest)
    assert_written_in(origin, "mixedres/models/products.py", "conv_general_dilated(")


def test_weight_beyond_float16_overflows_at_the_cast():
    finding, largest = of_resnet(4e5)
    assert about(finding.origin) == ("ResNet/block_layer1_1/conv2", "forward", "convert_element_type")
    (kernel,) = finding.origin.inputs
    assert kernel.path == "params/block_layer1_1/conv2/kernel" and kernel.largest == largest > LARGEST


class Dense(nn.Module):
    """Two layers of flax, which adds the bias in float16."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(16, dtype=F16, name="body")(x))
        return nn.Dense(10, dtype=F16, name="head")(x)


def test_bias_gradient_overflows_before_the_cast():
    model, batch = Dense(), examples(32)
    logits, variables = jax.jit(model.init_with_output)(jax.random.key(0), batch[0])
    params = variables["params"]
    exponentials = np.exp(np.asarray(logits, np.float32))
    # Times scale / 32.
    each = exponentials / exponentials.sum(1, keepdims=True) - np.eye(10, dtype=np.float32)[batch[1]]
    scale = 1.5 * LARGEST / np.abs(each.mean(0)).max()
    assert np.abs(each).max() / 32 * scale < LARGEST / 4
    finding = first_nonfinite(gradients(model), params, batch, scale, names=("params", "batch", "scale"))
    assert about(finding.origin) == ("Dense/head", "backward", "reduce_sum")
    (summed,) = finding.origin.inputs
    assert (summed.dtype, summed.shape, finding.origin.array.shape) == (F16, (32, 10), (10,))
    np.testing.assert_allclose(summed.largest, np.abs(each).max() / 32 * scale, rtol=1e-3)
    assert "1/head/bias" in finding.nonfinite_results and "0" not in finding.nonfinite_results


def test_operations_of_jax_have_the_line_of_the_call():
    def fn(x):
        return jnp.linalg.norm(x)  # traced once for all its callers: no frame of the product in it is of this file

    origin = first_nonfinite(fn, full((2, 2), 300, F16)).origin
    assert about(origin) == ("", "forward", "mul") and origin.inputs[0].largest == 300
    assert_written_in(origin, __file__, "jnp.linalg.norm(x)")
