"""Whole networks under autocast, against the same networks with casts written into their layers."""

import jax
import jax.numpy as jnp
import pytest

from mixedres import precision
from mixedres._internal import jax_compat
from mixedres.amp import autocast
from mixedres.amp._explain import casts
from mixedres.train import losses
from tests.amp.graphs import product_dtypes, products
from tests.models.networks import shapes_of, small
from tests.platforms import on

LOSS_SCALE = 2.0**10


def resnet_loss(name, version, preset):
    """(loss(params, stats, images, labels), model); the preset 'rewrite' is the float32 network under autocast."""
    chosen = precision.get("fp32" if preset == "rewrite" else preset)
    model = small(name, version, chosen.policy, filters=16, norm_policy=chosen.norm_policy, zero_init_last=False)

    def loss(params, stats, images, labels):
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
        return losses.cross_entropy(logits, labels).mean() * LOSS_SCALE, new["batch_stats"]

    return (autocast(loss) if preset == "rewrite" else loss), model


def resnet_avals(model):
    variables = shapes_of(model)
    images, labels = jax.ShapeDtypeStruct((2, 32, 32, 3), "float32"), jax.ShapeDtypeStruct((2,), "int32")
    return variables["params"], variables["batch_stats"], images, labels


def test_rewrite_has_no_more_casts_than_casting_layers():
    """In a ResNet-18 of two blocks; nothing is compiled."""

    def program(preset):
        loss, model = resnet_loss("resnet18", "1.5", preset)
        return jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(*resnet_avals(model))

    rewritten, casting = program("rewrite"), program("fp16")
    assert 0 < sum(casts(rewritten, jnp.float16)) <= sum(casts(casting, jnp.float16))
    # The same arithmetic: the rewrite adds and removes no product. 6 convolutions and their gradients, the head's.
    assert len(products(rewritten)) == len(products(casting)) == 3 * 6 - 1 + 3
    assert product_dtypes(rewritten) == {"f16"}


@pytest.mark.parametrize(("name", "version"), [("resnet18", "1.5"), ("resnet50", "2")])
def test_resnet_convolutions_read_half_activations(name, version):
    loss, model = resnet_loss(name, version, "rewrite")
    inner, _ = jax_compat.opened(jax.make_jaxpr(on(None, loss))(*resnet_avals(model)))
    made_by = {var: eqn for eqn in inner.eqns for var in eqn.outvars}
    convolutions = [eqn for eqn in inner.eqns if eqn.primitive.name == "conv_general_dilated"]
    makers = [made_by[eqn.invars[0]] for eqn in convolutions]
    # The images are cast for the stem; everything else comes from a relu, or its maxima, without a cast in between.
    assert makers[0].primitive.name == "convert_element_type"
    assert {eqn.primitive.name for eqn in makers[1:]} <= {"custom_jvp_call", "reduce_window_max"}
    assert all(var.aval.dtype == jnp.float16 for eqn in makers for var in eqn.outvars)
    assert len(convolutions) == {"resnet18": 6, "resnet50": 12}[name]
