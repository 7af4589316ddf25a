"""Whole networks under autocast, against the same networks with casts written into their layers."""

import jax
import jax.numpy as jnp
import pytest

from mixedres import precision
from mixedres._internal import jax_compat
from mixedres.amp import autocast
from mixedres.amp._explain import casts
from mixedres.train import losses
from tests.amp.graphs import SHORT, product_dtypes, products, residual_bytes
from tests.models.networks import shapes_of, small
from tests.platforms import on
from tests.strangers.programs.plain import scanned_transformer

LOSS_SCALE = 2.0**10
# Which of two float16 gradients is closer to float32 is chance for one seed; less so for their mean.
SEEDS, MARGIN = 3, 1.1


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


def half_sums(jaxpr):
    sums = ("reduce_sum", "cumsum", "reduce_window_sum")
    return [
        e for e in jax_compat.equations(jaxpr) if e.primitive.name in sums and e.invars[0].aval.dtype != jnp.float32
    ]


@pytest.fixture(scope="module")
def bottlenecks():
    """{preset: (jaxpr of loss and gradient, residuals)} of a ResNet-50 of three blocks: nothing is compiled."""

    def program(preset):
        loss, model = resnet_loss("resnet50", "1.5", preset)
        args = resnet_avals(model)
        grad = jax.make_jaxpr(jax.value_and_grad(loss, has_aux=True))(*args)
        return grad, residual_bytes(on(None, lambda *args: loss(*args)[0]), args)

    return {preset: program(preset) for preset in ("fp16", "rewrite")}


def test_rewrite_has_no_more_casts_than_casting_layers(bottlenecks):
    rewritten, casting = bottlenecks["rewrite"][0], bottlenecks["fp16"][0]
    assert 0 < sum(casts(rewritten, jnp.float16)) <= sum(casts(casting, jnp.float16))
    # The same arithmetic: the rewrite adds and removes no product. 12 convolutions and their gradients, the head's.
    assert len(products(rewritten)) == len(products(casting)) == 3 * 12 - 1 + 3
    assert product_dtypes(rewritten) == {"f16"}


def test_no_more_float32_is_saved_for_the_backward_pass(bottlenecks):
    rewritten, casting = bottlenecks["rewrite"][1], bottlenecks["fp16"][1]
    assert rewritten["float32"] <= 1.05 * casting["float32"]
    assert rewritten["float16"] <= 1.05 * casting["float16"]


@pytest.mark.parametrize(("name", "version"), [("resnet18", "1.5"), ("resnet50", "1.5"), ("resnet50", "2")])
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


@pytest.mark.parametrize(
    ("name", "version", "half", "gradient"),
    [
        ("resnet18", "1.5", jnp.float16, "inside"),
        ("resnet18", "2", jnp.bfloat16, "outside"),
    ],
)
def test_resnet_products_are_half(name, version, half, gradient):
    """Of the gradient of a rewritten loss, and of a rewritten gradient."""
    loss, model = resnet_loss(name, version, "fp32")
    args = resnet_avals(model)
    grad = autocast(jax.grad(loss, has_aux=True), half)
    if gradient == "outside":
        grad = jax.grad(autocast(loss, half), has_aux=True)
    jaxpr, shapes = jax.make_jaxpr(grad, return_shape=True)(*args)
    assert product_dtypes(jaxpr) == {SHORT[half.dtype.name]}
    assert not half_sums(jaxpr)
    assert jax.tree.map(lambda s: (s.shape, s.dtype), shapes) == jax.tree.map(lambda s: (s.shape, s.dtype), args[:2])


def test_transformer_sums_and_exponentials_are_float32():
    made = scanned_transformer()
    rewritten, cast = (
        jax.make_jaxpr(jax.grad(f))(made.params, *made.args) for f in (autocast(made.loss), made.own(jnp.float16))
    )
    # What is left are derivatives of maxima, which count how many elements attain them: of 16, exact in half.
    sums = half_sums(rewritten)
    assert len(sums) < len(half_sums(cast))
    assert all(e.invars[0].aval.shape[-1] <= 16 and len(e.params["axes"]) == 1 for e in sums)
    unsafe = [e for e in jax_compat.equations(rewritten) if e.primitive.name in ("exp", "log", "rsqrt")]
    assert unsafe and all(e.invars[0].aval.dtype == jnp.float32 for e in unsafe)
