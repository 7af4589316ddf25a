"""Products that float32 operations alone read return their float32 sums, where that costs no memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from mixedres._internal.jax_compat import equations
from mixedres.amp import autocast, explain
from tests.amp.graphs import SHORT
from tests.amp.programs import convolve
from tests.arrays import eye, normal, ones

X, W, Y = normal(0, (24, 6)), normal(1, (6, 6), scale=6**-0.5), normal(2, (24,))
HALF = pytest.mark.parametrize("half", ["float16", "bfloat16"])


def written(function, *args):
    """The dtypes that the products of a program write, in order."""
    found = [eqn for eqn in equations(jax.make_jaxpr(function)(*args)) if eqn.primitive.name == "dot_general"]
    return " ".join(SHORT[str(eqn.outvars[0].aval.dtype)] for eqn in found)


def exact(left, right, half):
    """A product in float64 of operands that are rounded to half."""
    left, right = (np.asarray(array).astype(jnp.dtype(half)).astype(np.float64) for array in (left, right))
    return left @ right


def log_likelihood(x, noise=0.05):
    """A Gaussian process with a linear kernel: x and y to the logarithm of their probability, but for a constant."""
    factor = jnp.linalg.cholesky(x @ x.T + noise * eye(len(x)))
    return Y @ jax.scipy.linalg.cho_solve((factor, True), Y) / 2 + jnp.log(jnp.diag(factor)).sum()


@HALF
def test_result_is_the_float32_sum(half):
    found = jax.jit(autocast(lambda x: x @ W, half))(X)
    np.testing.assert_allclose(found, exact(X, W, half), rtol=1e-6, atol=1e-6)
    assert written(autocast(lambda x: x @ W, half), X) == "f32"
    (decision,) = explain(lambda x: x @ W, half)(X).decisions
    assert decision.in_dtypes == (jnp.dtype(half),) * 2 and decision.out_dtypes == (jnp.float32,)


def test_products_of_derivatives_are_half():
    """And there are no others: the gradient of one operand takes one product more."""
    half = "bfloat16"

    def loss(x, w):
        return jnp.sum(jnp.sin(x @ w))

    assert written(jax.grad(autocast(loss, half), 1), X, W) == "f32 bf16"

    for function in (autocast(loss, half), jax.checkpoint(autocast(loss, half)), autocast(jax.checkpoint(loss), half)):
        for eqn in equations(jax.make_jaxpr(jax.grad(function, (0, 1)))(X, W)):
            if eqn.primitive.name == "dot_general":
                assert {var.aval.dtype.name for var in eqn.invars} == {half}
    derivatives = (
        lambda f: jax.grad(f, (0, 1))(X, W),
        lambda f: jax.jvp(f, (X, W), (W[:1] + 0 * X, W)),
        lambda f: jax.hessian(f, 1)(X[:3], W),
        lambda f: jax.vmap(jax.grad(f, 1), (0, None))(X[:, None], W),
    )
    for derivative in derivatives:
        both = jax.jit(lambda f=derivative: (f(autocast(loss, half)), f(loss)))()
        for ours, theirs in zip(*map(jax.tree.leaves, both), strict=True):
            assert np.linalg.norm(ours - theirs) <= 0.05 * np.linalg.norm(theirs)


@pytest.mark.parametrize(("half", "limit"), [("float16", 2e-3), ("bfloat16", 2e-2)])
def test_cholesky_factor_of_a_gram_matrix_is_finite_and_right(half, limit):
    """Rounded to half, the matrix has negative eigenvalues; the float32 sums of half products have none."""
    smallest = np.linalg.eigvalsh(np.asarray(jnp.asarray(exact(X, X.T, half)).astype(half), np.float64))[0]
    noise = 0.9 * float(-smallest)
    assert noise > 0 and written(autocast(log_likelihood, half), X).split()[0] == "f32"
    found, gradient = jax.jit(jax.value_and_grad(autocast(log_likelihood, half)))(X, noise)
    expected = log_likelihood(X, noise)
    assert abs(found - expected) <= limit * abs(expected) and np.isfinite(gradient).all()
    found, expected = (jax.jit(jax.grad(f))(X, 1.0) for f in (autocast(log_likelihood, half), log_likelihood))
    assert np.linalg.norm(found - expected) <= 10 * limit * np.linalg.norm(expected)


# For these XLA's CPU backend has no kernel with bfloat16 operands and a float32 result: (function, on rounded float32
# or float64, shapes).
FORMS = {
    "convolution": (convolve, lambda x, k: convolve(jnp.float32(x), jnp.float32(k)), ((2, 5, 5, 3), (3, 3, 3, 2))),
    "gradient of a layer": (
        lambda x, g: jax.grad(lambda w: jnp.sum((x @ w) * g))(ones((6, 8))),
        lambda x, g: np.einsum("btv,btw->vw", x, g),
        ((4, 5, 6), (4, 5, 8)),
    ),
    "two axes that stay": (
        lambda x, y: jnp.einsum("av,abw->vbw", x, y),
        lambda x, y: np.einsum("av,abw->vbw", x, y),
        ((4, 6), (4, 5, 8)),
    ),
    "groups": (
        lambda x, w: lax.ragged_dot(x, w, jnp.array([3, 2])).T,
        lambda x, w: np.concatenate((x[:3] @ w[0], x[3:] @ w[1])).T,
        ((5, 6), (2, 6, 8)),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_every_form_runs_on_a_cpu(name):
    function, in_numpy, shapes = FORMS[name]
    args = [normal(seed, shape) for seed, shape in enumerate(shapes)]
    found = jax.jit(autocast(function, jnp.bfloat16))(*args)
    expected = in_numpy(*(np.asarray(x).astype(jnp.bfloat16).astype(np.float64) for x in args))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("platform", "half"), [("cuda", "float16"), ("tpu", "bfloat16")])
def test_accelerators_multiply_half_operands(platform, half):
    program = jax.jit(autocast(lambda x: x @ W, half)).trace(X).lower(lowering_platforms=(platform,)).as_text()
    (product,) = [line for line in program.splitlines() if "dot_general" in line]
    short = SHORT[half]
    assert f"(tensor<24x6x{short}>, tensor<6x6x{short}>) -> tensor<24x6xf32>" in product


def test_product_is_half_if_float32_needs_more_memory():
    vocabulary = normal(3, (6, 50))

    def cross_entropy(x, w):
        return -jax.nn.log_softmax(x @ w)[:, 0].mean()

    assert written(autocast(cross_entropy), X, W) == "f32"  # as small as X
    assert written(autocast(cross_entropy), X, vocabulary) == "f16"  # larger than both operands
    assert written(autocast(lambda x: x @ vocabulary), X) == "f32"  # which the function returns in float32 anyway

    def normed(x):  # what a norm reads on the way to a product
        x = x @ W
        return jnp.sum((x - x.mean(-1, keepdims=True)) @ W)

    assert written(autocast(normed), X) == "f16 f32"

    attention = autocast(lambda x: jax.nn.softmax(x @ x.T) @ x)
    assert written(attention, X) == "f16 f32"  # 24 x 24 logits of 24 x 6
    assert written(attention, X[:4]) == "f32 f32"


def test_conversions_of_the_program_and_chosen_products_are_left():
    assert written(autocast(lambda x: (x @ W).astype("float16")), X) == "f16"
    policy = jax.checkpoint_policies.dots_saveable
    assert written(autocast(jax.checkpoint(lambda x: x @ W, policy=policy)), X) == "f16"
    assert written(autocast(jax.checkpoint(lambda x: x @ W)), X) == "f32"
