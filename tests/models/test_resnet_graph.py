"""What the traced networks compute in which dtype, with fused norms too."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import jmp
import pytest

from mixedres._internal.jax_compat import equations
from mixedres.models.resnet import Block
from tests.models.networks import shapes_of, small, training_program

IMAGES = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
# A ResNet-50 of one block in each of two stages: a stem, 3 convolutions a block, 2 projections.
STAGES, CONVS = (1, 1), 1 + 3 * 2 + 2


def policy(compute, output="float32"):
    return jmp.get_policy(f"params=float32,compute={compute},output={output}")


def operands(found):
    """How often each dtype is that of the first operand."""
    return Counter(eqn.invars[0].aval.dtype.name for eqn in found)


def test_policy_sets_the_dtype_of_the_logits():
    model = small("cifar_resnet8", "1", policy("float16", "bfloat16"))
    logits = jax.eval_shape(model.apply, shapes_of(model), IMAGES)
    assert (logits.shape, logits.dtype) == ((2, 10), jnp.bfloat16)


# The arithmetic of the two versions differs, that of the two dtypes only in its name.
@pytest.mark.parametrize(("version", "dtype", "norms"), [("1.5", "float16", CONVS), ("2", "bfloat16", CONVS - 2)])
def test_sums_over_examples_and_pixels_are_float32(version, dtype, norms):
    """Of a ResNet-50 in training, and of the gradient of every parameter."""
    model = small("resnet50", version, policy(dtype), STAGES)
    jaxpr = training_program(model.apply, shapes_of(model), IMAGES)
    on_maps = [eqn for eqn in equations(jaxpr) if eqn.invars and getattr(eqn.invars[0].aval, "ndim", 0) == 4]
    sums = [eqn for eqn in on_maps if eqn.primitive.name == "reduce_sum" and {0, 1, 2} <= set(eqn.params["axes"])]
    # Forward two moments for each norm; backward at least the gradients of scale and bias.
    assert len(sums) >= 4 * norms and operands(sums) == {"float32": len(sums)}
    assert operands(eqn for eqn in on_maps if eqn.primitive.name in ("square", "integer_pow")) == {"float32": norms}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_policy_reaches_every_norm(dtype):
    model = small("resnet50", "1.5", policy("float16"), STAGES, norm_policy=policy(dtype, "float16"))
    found = list(
        equations(jax.make_jaxpr(partial(model.apply, train=True, mutable=["batch_stats"]))(shapes_of(model), IMAGES))
    )
    # Evidence of the arithmetic: one (x - mean) in every norm.
    differences = [eqn for eqn in found if eqn.primitive.name == "sub" and eqn.outvars[0].aval.ndim == 4]
    assert operands(differences) == {dtype: CONVS}
    # The statistics do not follow it.
    assert operands(eqn for eqn in found if eqn.primitive.name == "rsqrt") == {"float32": CONVS}


# Fused norms: test_resnet has the numbers of the networks.
KEPT = ["^/stem_norm$|/norm[12]$", "^/block_layer1_1/norm2$|^/block_layer2_1/norm_proj$", "^/block_layer2_1$"]


@pytest.mark.parametrize("keep", KEPT)
def test_fused_network_keeps_float32_layers(keep):
    """Every block returns the dtype of the plain one, wherever a norm or a block is kept."""
    settings = {"policy": "p=f32,c=f16,o=f16", "keep_float32": keep}
    networks = [small("resnet18", "1.5", fused=fused, **settings) for fused in (False, True)]
    variables = shapes_of(networks[0])

    def dtypes(model):
        options = {"mutable": True, "capture_intermediates": lambda module, _: isinstance(module, Block)}
        _, found = jax.eval_shape(lambda *args: model.apply(*args, True, **options), variables, IMAGES)
        return jax.tree.map(lambda x: x.dtype, found["intermediates"])

    plain, fused = map(dtypes, networks)
    assert plain == fused
    assert fused["block_layer2_1"]["__call__"] == (jnp.float32 if keep == KEPT[-1] else jnp.float16,)


def test_fused_network_evaluates_like_the_plain_one():
    """Initialization needs no mesh, and makes the same variables."""
    plain, fused = (small("resnet18", "1.5", "float32", fused=fused, axis_name="data") for fused in (False, True))
    forms = [(model, train) for model in (plain, fused) for train in (False, True)]
    init = [jax.eval_shape(partial(model.init, train=train), jax.random.key(0), IMAGES) for model, train in forms]
    assert init[0] == init[1] == init[2] == init[3]
    programs = [str(jax.make_jaxpr(partial(model.apply, train=False))(init[0], IMAGES)) for model in (plain, fused)]
    assert programs[0] == programs[1]
