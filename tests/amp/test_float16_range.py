"""What breaks in naive half precision and must not under autocast: large sums, small constants, long counts and loops.

Every function has a product before the critical part, and mostly one after it, so that half spreads as far as it ever
does. Where the numbers allow it the products are exact in half; what is left is the rounding of a few operands.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax.losses import softmax_cross_entropy_with_integer_labels as cross_entropy

from mixedres.amp import autocast
from tests.amp.graphs import error, product_dtypes
from tests.amp.programs import convolve
from tests.arrays import eye, full, ones, zeros

RNG = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(RNG.normal(size=shape) * scale, jnp.float32)


def rounding(steps=4):
    """The relative error of `steps` roundings: operand, weight, result and cotangent, if nothing else is."""
    return steps * 2.0**-11


def check(fn, args, bound=2.0**-9):
    """Value and gradients with respect to every argument, of fn and of its rewrite."""
    rewritten, argnums = autocast(fn), tuple(range(len(args)))

    def scalar(f):
        # Weights instead of a plain sum: the sum of a softmax has no gradient. Their mean square is about 1.
        def weighted(*a):
            out = f(*a)
            return jnp.sum(out * jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)), out

        return jax.value_and_grad(weighted, argnums, has_aux=True)

    assert product_dtypes(jax.make_jaxpr(scalar(rewritten))(*args)) == {"f16"}
    both = jax.jit(lambda *a: (scalar(rewritten)(*a), scalar(fn)(*a)))
    ((_, got), got_grads), ((_, want), want_grads) = both(*args)
    assert error(got, want) <= bound
    assert error(got_grads, want_grads) <= bound


def large_logits():
    """Multiples of 256 up to 3e4, exact in float16 and in bfloat16; times the identity they are exact logits."""
    multiples = np.array([[117, -117, 0, 116], [-117, -116, -117, -115], [1, 2, 3, 4], [117, 117, 117, 117]])
    return jnp.asarray(multiples * 256, jnp.float32), eye(4)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, v: jax.nn.softmax(x @ w) @ v,
        lambda x, w, v: jax.nn.log_softmax(x @ w) / 2**15 @ v,  # down to -6e4: scaled to be an operand of a product
        lambda x, w, v: jax.nn.logsumexp(x @ w, axis=1) + v[:, 0],
        # Confident and wrong: a loss of 6e4.
        lambda x, w, v: cross_entropy(x @ w, jnp.array([1, 0, 0, 2])) + v[:, 0],
    ],
    ids=["softmax", "log_softmax", "logsumexp", "cross_entropy"],
)
def test_softmax_of_large_logits(fn):
    check(fn, (*large_logits(), normal(4, 3)))


def test_mask_of_minus_1e30_with_a_fully_masked_row():
    allowed = jnp.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], bool)

    def attention(q, k, v):
        return jax.nn.softmax(jnp.where(allowed, q @ k.T, -1e30)) @ v

    q, k, v = normal(3, 8), normal(4, 8), normal(4, 5)
    # A score of about 3 that is off by u moves a probability by 3u: 12 roundings.
    check(attention, (q, k, v), rounding(12))
    # -inf instead of -1e30 would make this row NaN; it is the mean of the values.
    assert error(jax.jit(autocast(attention))(q, k, v)[1], v.mean(0)) <= rounding()


def test_small_constant_in_a_denominator():
    def normalize(x, w, v):
        h = x @ w
        return (h / (jnp.abs(h).max(axis=1, keepdims=True) + 1e-8)) @ v

    x = normal(4, 8)
    check(normalize, (x, eye(8), normal(8, 3)))
    # 0 / (0 + 1e-8) is 0; with 1e-8 rounded to 0 it is NaN.
    assert np.all(np.asarray(jax.jit(autocast(normalize))(x.at[1].set(0.0), eye(8), normal(8, 3)))[1] == 0)


def test_small_epsilon_inside_rsqrt():
    def normalize(x, w, v):
        h = x @ w
        centered = h - h.mean(axis=1, keepdims=True)
        return (centered * jax.lax.rsqrt((centered * centered).mean(axis=1, keepdims=True) + 1e-8)) @ v

    # Without variance the factor is 1e4, as is the gradient; in float16 1e-8 is 0 and the factor infinite. One at a
    # time, because the gradients of the other rows would vanish beside it. 12 roundings: of the cotangent before and
    # after its mean, which is as large, is taken off.
    for x in (normal(4, 8), full((4, 8), 3.0)):
        check(lambda x, w, v: normalize(x, w, v) / 16, (x, eye(8), normal(8, 3)), rounding(12))


# {name: (function, shapes of rows and weights, value of the weights)}; the losses are scaled.
SUMS = {
    # The sum is 210,000, and the cotangent of an element, 1 / 70,000, has few digits in float16.
    "mean of products": (lambda x, w, v: (x @ w).mean(0).reshape(1, 1) @ v * 1024, (70_000, 2), (2, 1), 1.5),
    "mean of a convolution": (lambda x, w, v: convolve(x, w).mean((1, 2)) @ v * 1024, (1, 280, 250, 1), (1,) * 4, 3.0),
    "cumsum": (lambda x, w, v: jnp.cumsum(x @ w, axis=0)[-4:] / 2**15 @ v, (40_000, 1), (1, 1), 3.0),
}


@pytest.mark.parametrize(("fn", "rows", "weights", "value"), SUMS.values(), ids=SUMS)
def test_sums_beyond_65504(fn, rows, weights, value):
    check(fn, (ones(rows), full(weights, value), ones((1, 2))))


@pytest.mark.parametrize("scale", [12.0, 32.0])
def test_gate_gradient_summed_over_positions_under_a_loss_scale(scale):
    def loss(w, images, kernel, pooled):
        gate = jax.nn.sigmoid(pooled @ w)[:, None, None, :]
        return convolve(convolve(images, kernel) * gate, kernel).sum() * scale

    # 4096 positions with a cotangent of `scale` each: a float16 sum of 12s stops early, one of 32s leaves the range.
    args = zeros((4, 3)), ones((2, 64, 64, 3)), eye(3)[None, None], full((2, 4), 1 / 8)
    assert error(jax.jit(jax.grad(autocast(loss)))(*args), jax.jit(jax.grad(loss))(*args)) <= rounding()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_gradient_of_a_maximum_with_3000_ties(dtype):
    def largest(y, x, w, v):
        return ((x @ w + y).max(axis=0, keepdims=True) @ v).sum() * 1024  # 1 / 3000 has few digits in float16

    args = ones((3000, 1)), ones((3000, 2)), ones((2, 1)), ones((1, 1))
    got = jax.jit(jax.grad(autocast(largest, dtype)))(*args)
    bound = 2 * float(jnp.finfo(dtype).eps)
    assert error(got, full((3000, 1), 1024 / 3000)) <= bound
    assert float(got.sum()) == pytest.approx(1024, rel=bound)


@pytest.mark.parametrize("loop", ["scan", "while_loop"])
def test_loop_state_adds_up_exactly(loop):
    """5000 times 2**-12, the result of an exact product, to 1: in half the first of them would be lost."""

    def count(start, x, w):
        if loop == "scan":
            return jax.lax.scan(lambda c, _: (c + x @ w, None), start, length=5000)[0]
        return jax.lax.while_loop(lambda s: s[0] < 5000, lambda s: (s[0] + 1, s[1] + x @ w), (0, start))[1]

    args = ones((2, 2)), eye(2), full((2, 2), 2.0**-12)
    got = jax.jit(autocast(count))(*args)
    np.testing.assert_array_equal(got, jax.jit(count)(*args))
    np.testing.assert_array_equal(got, 1 + 5000 * 2.0**-12)


@pytest.mark.parametrize(("form", "uses"), [("scan", 3000), pytest.param("unrolled", 600, marks=pytest.mark.slow)])
def test_gradient_of_a_weight_with_3000_uses(form, uses):
    # All contributions are 1.203125, exact in bfloat16: summed in half, they would be rounded to 1 from 512 on.
    x = full((1, 2), 1.203125)

    def total(w):
        if form == "scan":
            return jax.lax.scan(lambda c, _: (c + (x @ w).sum(), None), 0.0, length=uses)[0]
        return sum((x @ w).sum() for _ in range(uses))

    np.testing.assert_allclose(jax.jit(jax.grad(autocast(total)))(ones((2, 2))), 1.203125 * uses, rtol=1e-3)


def test_positions_beyond_2048_are_not_rounded():
    position = jnp.arange(4096, dtype=jnp.float32)

    def add(x, w):
        return (x @ w)[:, 0] + position

    args = zeros((4096, 2)), ones((2, 1))
    np.testing.assert_array_equal(jax.jit(autocast(add))(*args), position)
    three, one = jax.jit(autocast(lambda x, w: (jax.lax.top_k(add(x, w), 3)[1], jnp.argmax(add(x, w)))))(*args)
    assert three.tolist() == [4095, 4094, 4093] and one == 4095
