"""What the traced networks compute in which dtype."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import jmp
import pytest

from mixedres._internal.jax_compat import equations as all_equations
from mixedres.models import create
from tests.models.networks import small

POLICIES = {
    dtype: jmp.get_policy(f"params=float32,compute={dtype},output=float32")
    for dtype in ("float32", "bfloat16", "float16")
}
BATCH, CLASSES = 2, 1001


# A ResNet-50 of one block in the first stage and two in the second: a stem, 3 convolutions a block, 2 projections.
CONVS = 1 + 3 * 3 + 2


def _model(name, version, dtype, **options):
    return small(name, version, POLICIES[dtype], filters=16 if "cifar" in name else 64, num_classes=CLASSES, **options)


def _traced(model):
    """(shapes of the variables, shape of the images)."""
    images = jax.ShapeDtypeStruct((BATCH, 224, 224, 3), jnp.float32)
    return jax.eval_shape(model.init, jax.random.key(0), images), images


def _named(equations, *names):
    return [equation for equation in equations if equation.primitive.name in names]


def _dtypes(variables):
    return {variable.aval.dtype for variable in variables}


def test_policy_sets_the_dtype_of_the_logits():
    policy = jmp.get_policy("params=float32,compute=float16,output=bfloat16")
    model = create("cifar_resnet8", num_classes=CLASSES, policy=policy)
    logits = jax.eval_shape(model.apply, *_traced(model))
    assert (logits.shape, logits.dtype) == ((BATCH, CLASSES), jnp.bfloat16)


# The arithmetic of the two versions differs, that of the two dtypes only in its name.
@pytest.mark.parametrize(("version", "dtype", "norms"), [("1.5", "float16", CONVS), ("2", "bfloat16", CONVS - 2)])
def test_sums_over_examples_and_pixels_are_float32(version, dtype, norms):
    """Of a ResNet-50 in training, and of the gradient of every parameter."""
    model = _model("resnet50", version, dtype)
    variables, images = _traced(model)

    def loss(params, others, images):
        logits, updates = model.apply({**others, "params": params}, images, True, mutable=["batch_stats"])
        return jnp.square(logits).sum(), updates

    grad = jax.make_jaxpr(jax.grad(loss, has_aux=True))
    equations = list(all_equations(grad(variables["params"], variables, images)))
    sums = [
        equation
        for equation in _named(equations, "reduce_sum")
        if equation.invars[0].aval.ndim == 4 and {0, 1, 2} <= set(equation.params["axes"])
    ]
    # Forward two moments for each norm; backward at least the gradients of scale and bias.
    assert len(sums) >= 4 * norms
    assert _dtypes(equation.invars[0] for equation in sums) == {jnp.dtype("float32")}
    squares = [equation for equation in _named(equations, "square", "integer_pow") if equation.invars[0].aval.ndim == 4]
    assert len(squares) == norms
    assert _dtypes(equation.invars[0] for equation in squares) == {jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_norm_policy_reaches_every_norm(dtype):
    norm_policy = jmp.get_policy(f"params=float32,compute={dtype},output=float16")
    model = _model("resnet50", "1.5", "float16", norm_policy=norm_policy)
    apply = functools.partial(model.apply, train=True, mutable=["batch_stats"])
    equations = list(all_equations(jax.make_jaxpr(apply)(*_traced(model))))
    # Evidence of the arithmetic: one (x - mean) in every norm.
    differences = [eqn for eqn in _named(equations, "sub") if eqn.outvars[0].aval.ndim == 4]
    assert Counter(eqn.outvars[0].aval.dtype.name for eqn in differences) == {dtype: CONVS}
    # The statistics do not follow it.
    roots = _named(equations, "rsqrt")
    assert Counter(eqn.outvars[0].aval.dtype.name for eqn in roots) == {"float32": CONVS}
