"""`keep_float32` with the name of a layer keeps exactly the products of the layer, for layers of three libraries."""

import os

import jax
import jax.numpy as jnp
import pytest

from mixedres.amp import autocast
from tests.amp.graphs import dtypes_by
from tests.arrays import normal

IMAGES, ROWS = normal(0, (2, 8, 8, 4)), normal(1, (2, 8, 4))
KEY = jax.random.key(0)


def check(layer, x):
    """Checks the products of `layer`, in the scope 'middle', and of the products before and after the layer."""

    def loss(x):
        y = jax.tree.leaves(layer(x @ normal(2, (4, 4))))[0]
        return (y @ normal(3, (y.shape[-1], 3))).sum()

    def dtypes(fn):
        return dtypes_by(lambda scope: "middle" if "middle" in scope else "outside", jax.make_jaxpr(fn)(x))

    keep = {"keep_float32": "^/(middle)$"}  # the expression that the doctor prints
    for half, kept in (
        (autocast(loss), autocast(loss, **keep)),
        (jax.grad(autocast(loss)), jax.grad(autocast(loss, **keep))),
    ):
        assert dtypes(half) == {"middle": {"f16"}, "outside": {"f16"}}
        assert dtypes(kept) == {"middle": {"f32"}, "outside": {"f16"}}


@pytest.mark.parametrize("name", ["Dense", "method", "Einsum", "Conv", "MultiHeadDotProductAttention", "LSTM", "scan"])
def test_layers_of_linen(name):
    nn = pytest.importorskip("flax.linen")

    class Step(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return nn.Dense(4)(x), None

    class Method(nn.Module):  # for which flax opens a scope of its own
        @nn.compact
        def __call__(self, x):
            return self.pooled(x)

        def pooled(self, x):
            return nn.Dense(4)(x)

    layers = {
        "method": lambda **name: Method(**name),
        "Dense": lambda **name: nn.Dense(4, **name),
        "Conv": lambda **name: nn.Conv(4, (3, 3), **name),
        "Einsum": lambda **name: nn.Einsum((4, 5), "...i,io->...o", **name),
        "MultiHeadDotProductAttention": lambda **name: nn.MultiHeadDotProductAttention(2, **name),
        "LSTM": lambda **name: nn.RNN(nn.LSTMCell(4), **name),
        # Each step recomputed in the backward pass.
        "scan": lambda **name: (
            lambda x: nn.scan(nn.remat(Step), length=2, variable_axes={"params": 0}, split_rngs={"params": True})(
                **name
            )(x, None)[0]
        ),
    }

    class Net(nn.Module):
        @nn.compact
        def __call__(self, x):
            return layers[name](name="middle")(x)

    x = IMAGES if "Conv" in name else ROWS
    variables = Net().init(KEY, x)
    check(lambda x: Net().apply(variables, x), x)


@pytest.mark.slow
def test_layers_of_haiku():
    hk = pytest.importorskip("haiku")

    def attention(x):
        return hk.MultiHeadAttention(2, 4, w_init=hk.initializers.VarianceScaling(1.0), name="middle")(x, x, x)

    for layer, x in (
        (lambda x: hk.SeparableDepthwiseConv2D(1, 3, name="middle")(x), IMAGES),
        (lambda x: hk.nets.MLP([4, 4], name="middle")(x), ROWS),
        (lambda x: hk.dynamic_unroll(hk.GRU(4, name="middle"), x, jnp.zeros((8, 4)))[0], ROWS),
        (attention, ROWS),
    ):
        net = hk.without_apply_rng(hk.transform(layer))
        params = net.init(KEY, x)
        check(lambda x, net=net, params=params: net.apply(params, x), x)


@pytest.mark.slow
@jax.numpy_rank_promotion("allow")
def test_layers_of_keras(monkeypatch):
    monkeypatch.setitem(os.environ, "KERAS_BACKEND", "jax")
    layers = pytest.importorskip("keras").layers
    name, rows = {"name": "middle"}, ROWS[0][None]
    several = (
        (layers.GroupQueryAttention(4, 2, 1, **name), lambda layer, x: layer(x, x)),
        (layers.Attention(**name), lambda layer, x: layer([x, x])),  # products alone
    )
    for layer, x in (
        (layers.EinsumDense("abx,xy->aby", output_shape=(8, 4), **name), ROWS),
        (layers.Bidirectional(layers.LSTM(4, return_sequences=True), **name), rows),
        (layers.SeparableConv2D(4, 3, padding="same", **name), IMAGES),
    ):
        layer(x)  # which makes the weights
        check(layer, x)
    for layer, call in several:
        call(layer, rows)
        check(lambda x, layer=layer, call=call: call(layer, x), rows)
