"""Faults put into small networks: what `first_nonfinite` names as their origin."""

import functools
import linecache

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres.numerics import first_nonfinite
from mixedres.train import losses
from tests.arrays import full, ones
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


class Attention(nn.Module):
    """Two layers; what comes later is masked by -inf, in a bias that is made ahead of them or given."""

    @nn.compact
    def __call__(self, x, bias=None):
        if bias is None:
            bias = jnp.where(jnp.tril(ones((x.shape[1],) * 2, bool)), 0, -jnp.inf).astype(F16)
        for index in range(2):
            q, k, v = (nn.Dense(x.shape[-1], dtype=F16, name=f"{name}{index}")(x) for name in "qkv")
            x = nn.softmax(q @ k.mT / F16(np.sqrt(x.shape[-1])) + bias[None]) @ v
        return x


def attention(given):
    """(gradient program, parameters, other arguments)."""
    model, x = Attention(), np.random.default_rng(0).standard_normal((2, 5, 8)).astype(np.float32)
    bias = np.where(np.tri(5, dtype=bool), np.float16(0), np.float16(-np.inf))
    params = model.init(jax.random.key(0), x)["params"]

    def loss(params, *args):
        return jnp.square(model.apply({"params": params}, *args).astype(F32)).sum()

    return jax.value_and_grad(loss), jax.tree.map(np.array, params), (x, bias) if given else (x,)


@pytest.mark.parametrize("given", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["made", "given"])
def test_mask_of_minus_infinity_raises_no_alarm(given):
    fn, params, args = attention(given)
    finding = first_nonfinite(fn, params, *args)
    assert finding.origin is None and finding.nonfinite_results == ()
    assert {row.direction for row in finding.arrays if not row.finite} == {"forward"}

    params["q1"]["kernel"][:] = 6e4
    origin = first_nonfinite(fn, params, *args).origin
    assert about(origin) == ("Attention/q1", "forward", "dot_general")


def test_fully_masked_row_is_named():
    fn, params, (x, bias) = attention(given=True)
    bias[2] = -np.inf
    origin = first_nonfinite(fn, params, x, bias, names=("params", "x", "bias")).origin
    assert origin.is_argument and origin.array.path == "bias"


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
    params = model.init(jax.random.key(0), batch[0])["params"]
    logits = model.apply({"params": params}, batch[0]).astype(F32)
    each = jax.nn.softmax(logits) - jax.nn.one_hot(batch[1], 10)  # times scale / 32
    scale = 1.5 * LARGEST / jnp.abs(each.mean(0)).max()
    assert jnp.abs(each).max() / 32 * scale < LARGEST / 4
    finding = first_nonfinite(gradients(model), params, batch, scale, names=("params", "batch", "scale"))
    assert about(finding.origin) == ("Dense/head", "backward", "reduce_sum")
    (summed,) = finding.origin.inputs
    assert (summed.dtype, summed.shape, finding.origin.array.shape) == (F16, (32, 10), (10,))
    np.testing.assert_allclose(summed.largest, jnp.abs(each).max() / 32 * scale, rtol=1e-3)
    assert "1/head/bias" in finding.nonfinite_results and "0" not in finding.nonfinite_results


@jax.custom_vjp
def poisoned(x):
    """Its cotangent has one element that is infinite."""
    return x


poisoned.defvjp(lambda x: (x, None), lambda _, g: (g.at[0, 1].set(jnp.inf),))


class Poisoned(nn.Module):
    """Three layers; the cotangent of the result of the second one is not finite."""

    @nn.compact
    def __call__(self, x):
        for index in range(3):
            x = nn.tanh(nn.Dense(10, dtype=F16, name=f"layer{index}")(x))
            if index == 1:
                with jax.named_scope("poison"):
                    x = poisoned(x)
        return x


def test_infinite_cotangent_names_the_custom_rule():
    model, batch = Poisoned(), examples(4)
    params = model.init(jax.random.key(0), batch[0])["params"]
    finding = first_nonfinite(gradients(model), params, batch, 1.0)
    assert about(finding.origin) == ("Poisoned/poison", "backward", "scatter")
    assert_written_in(finding.origin, __file__, "x = poisoned(x)")  # for JAX, where the function of a rule is called
    assert 0 < finding.origin.inputs[0].largest < 1
    # Behind it in the backward pass, that is, before it in the network.
    assert finding.nonfinite_results == tuple(f"1/layer{i}/{name}" for i in (0, 1) for name in ("bias", "kernel"))


class Layer(nn.Module):
    """A residual step of a scan over layers."""

    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(8, dtype=F16, use_bias=False, name="dense")(nn.tanh(x)), None


class Scanned(nn.Module):
    """Six layers, the weights stacked, every one computed again in the backward pass."""

    @nn.compact
    def __call__(self, x):
        stack = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=6)
        return nn.Dense(10, dtype=F16, name="head")(stack(name="layers")(x.astype(F16), None)[0])


@pytest.mark.slow
def test_overflow_in_a_scan_names_the_iteration():
    model, (x, labels) = Scanned(), examples(4)
    params = jax.tree.map(np.array, model.init(jax.random.key(0), x)["params"])
    finding = first_nonfinite(gradients(model), params, (x, labels), 1.0)
    assert finding.origin is None
    params["layers"]["dense"]["kernel"][3] = 6e4
    origin = first_nonfinite(gradients(model), params, (x, labels), 1.0).origin
    assert about(origin) == ("Scanned/layers/dense", "forward", "dot_general")
    assert origin.iterations == (3,)
    before, kernel = origin.inputs
    assert (before.primitive, kernel.largest) == ("tanh", 6e4) and before.largest <= 1
    assert_written_in(origin, __file__, 'name="dense"')


@pytest.mark.slow  # devices and iterations of small functions: test_first_nonfinite.py
def test_sharded_infinite_input_is_named():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model, (x, labels) = Dense(), examples(16)
    params = model.init(jax.random.key(0), x)["params"]
    x[6, 2] = np.inf
    batch = jax.device_put((x, labels), NamedSharding(mesh, P("data")))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    finding = first_nonfinite(jax.jit(gradients(model)), params, batch, 1.0, names=("params", "batch", "scale"))
    assert finding.origin.is_argument and finding.origin.array.path == "batch/0"
    assert finding.origin.array.shape == (16, 8) and finding.origin.array.largest == np.abs(x[np.isfinite(x)]).max()


def test_overflow_on_one_device_names_the_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    model, (x, labels) = Dense(), examples(16)
    params = model.init(jax.random.key(0), x)["params"]
    x[6:8] = 6e4  # two examples a device

    def fraction(params, batch, scale):
        loss, grads = gradients(model)(params, batch, scale)
        return jax.lax.pmean((loss, grads), "data")

    fn = jax.jit(jax.shard_map(fraction, mesh=mesh, in_specs=(P(), P("data"), P()), out_specs=P(), check_vma=False))
    finding = first_nonfinite(fn, params, (x, labels), np.float32(1))
    origin = finding.origin
    assert origin.devices == (3,)
    assert about(origin) == ("Dense/body", "forward", "dot_general")
    assert origin.array.shape == (2, 16) and origin.inputs[0].largest == np.float16(6e4)
    assert_written_in(origin, __file__, 'name="body"')


def test_operations_of_jax_have_the_line_of_the_call():
    def fn(x):
        return jnp.linalg.norm(x)  # traced once for all its callers: no frame of the product in it is of this file

    origin = first_nonfinite(fn, full((2, 2), 300, F16)).origin
    assert about(origin) == ("", "forward", "mul") and origin.inputs[0].largest == 300
    assert_written_in(origin, __file__, "jnp.linalg.norm(x)")
