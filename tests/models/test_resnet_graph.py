"""What the traced networks compute in which dtype."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import jmp
import pytest

from mixedres._internal.jax_compat import equations
from tests.models.networks import shapes_of, small

IMAGES = jax.ShapeDtypeStruct((2, 64, 64, 3), jnp.float32)
# A ResNet-50 of one block in the first stage and two in the second: a stem, 3 convolutions a block, 2 projections.
CONVS = 1 + 3 * 3 + 2


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
    model = small("resnet50", version, policy(dtype))
    variables = shapes_of(model)

    def loss(params, others, images):
        logits, updates = model.apply({**others, "params": params}, images, True, mutable=["batch_stats"])
        return jnp.square(logits).sum(), updates

    jaxpr = jax.make_jaxpr(jax.grad(loss, has_aux=True))(variables["params"], variables, IMAGES)
    on_maps = [eqn for eqn in equations(jaxpr) if eqn.invars and getattr(eqn.invars[0].aval, "ndim", 0) == 4]
    sums = [eqn for eqn in on_maps if eqn.primitive.name == "reduce_sum" and {0, 1, 2} <= set(eqn.params["axes"])]
    # Forward two moments for each norm; backward at least the gradients of scale and bias.
    assert len(sums) >= 4 * norms and operands(sums) == {"float32": len(sums)}
    assert operands(eqn for eqn in on_maps if eqn.primitive.name in ("square", "integer_pow")) == {"float32": norms}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_policy_reaches_every_norm(dtype):
    model = small("resnet50", "1.5", policy("float16"), norm_policy=policy(dtype, "float16"))
    found = list(
        equations(jax.make_jaxpr(partial(model.apply, train=True, mutable=["batch_stats"]))(shapes_of(model), IMAGES))
    )
    # Evidence of the arithmetic: one (x - mean) in every norm.
    differences = [eqn for eqn in found if eqn.primitive.name == "sub" and eqn.outvars[0].aval.ndim == 4]
    assert operands(differences) == {dtype: CONVS}
    # The statistics do not follow it.
    assert operands(eqn for eqn in found if eqn.primitive.name == "rsqrt") == {"float32": CONVS}
