"""Half arrays and repeated operands: sums are computed in float32, and dtypes stay those of the function."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres._internal import jax_compat
from mixedres.amp import autocast, explain
from tests.amp.graphs import distance
from tests.arrays import normal

X = normal(0, (2, 30_000)).astype(jnp.float16)


def scan(x):
    return jax.lax.scan(
        lambda c, row: ((c + jnp.exp(row).sum() / 1e4).astype(c.dtype), None), jnp.zeros((), x.dtype), x
    )[0]


# Each with the error of the function as written, in float16.
FUNCTIONS = {
    "log_softmax": (lambda x: jax.nn.log_softmax(x).sum(-1) / 30_000, np.inf),
    "softmax": (jax.nn.softmax, 6e-4),
    "softmax by hand": (lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True), 8e-4),
    "root mean square": (lambda x: (300 * x) * jax.lax.rsqrt(jnp.mean((300 * x) ** 2, -1, keepdims=True)), 1.0),
    "norm": (lambda x: x / jnp.linalg.norm(100 * x, axis=-1, keepdims=True), 1.0),
    "running sum": (lambda x: jnp.cumsum(x, -1) / 1000, 1e-3),
    "scan": (scan, 5e-4),
    "checkpoint": (jax.checkpoint(lambda x: jnp.exp(x).sum() / 30_000), np.inf),
    "vmap": (jax.vmap(jax.nn.logsumexp), 3e-4),
    "sums into bins": (lambda x: jnp.zeros(10, x.dtype).at[jnp.arange(30_000) % 10].add(x[0]), 5e-3),
    "inverse": (lambda x: jax.lax.erf_inv(jnp.tanh(x)), np.inf),
}


@functools.cache
def results():
    """{name: (the function in float32, as written, under autocast)} of one program."""
    forms = {name: [f, f, autocast(f)] for name, (f, _) in FUNCTIONS.items()}
    every = jax.jit(lambda *xs: {name: [f(x) for f, x in zip(fs, xs, strict=True)] for name, fs in forms.items()})
    return every(np.asarray(X, np.float32), X, X)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sums_and_exponentials_of_half_arrays_are_float32(name):
    _, before = FUNCTIONS[name]
    want, as_written, got = results()[name]
    assert got.dtype == as_written.dtype and not distance(as_written, want) < 0.7 * before
    assert distance(got, want) < 4.9e-4  # the rounding of the result


@pytest.mark.parametrize("name", ["log_softmax", "norm"])
def test_gradients_of_half_arrays(name):
    function, _ = FUNCTIONS[name]
    weights = normal(1, jax.eval_shape(function, X).shape)

    def grad(function, x):
        gradient = jax.grad(lambda x: 1e3 * (function(x).astype(jnp.float32) * weights).sum())(x)
        assert gradient.dtype == x.dtype
        return gradient

    forms = ((function, np.asarray(X, np.float32)), (autocast(function), X))
    want, got = jax.jit(lambda: [grad(*form) for form in forms])()
    assert distance(got, want) < 6e-4
    assert distance(grad(function, X), want) > 2e-3  # in one program XLA would sum in float32


def test_casts_by_hand_stay():
    """A norm in float32 whose result the function casts, and an activation of the result."""

    def layer(x):
        wide = x.astype(jnp.float32)
        centered = wide - wide.mean(-1, keepdims=True)
        normalized = (centered * jax.lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)
        return jax.nn.silu(normalized) * 2

    found = {(d.primitive, str(d.dtype)) for d in explain(layer)(X).decisions}
    assert {("logistic", "float16"), ("mul", "float16")} <= found
    np.testing.assert_array_equal(jax.jit(autocast(layer))(X), jax.jit(layer)(X))


def test_sum_over_devices_keeps_the_dtype_that_the_function_asks_for():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(lambda x: jax.lax.psum(x, "d"), mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P())
    program = jax.jit(autocast(mapped)).lower(normal(2, (8, 4)).astype(jnp.bfloat16)).as_text()
    assert "bf16" in program and "f32" not in program


@pytest.mark.parametrize("after", [lambda y: y, jnp.tanh], ids=["result", "activation"])
def test_product_of_a_softmax_of_half_arrays_and_float32_weights(after):
    w = normal(2, (8, 3))

    def function(x, w):
        y = jax.lax.dot_general(jax.nn.softmax(x), w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
        return after(y) @ w.T

    x = X[:, :8]
    got, want = jax.jit(lambda *args: [f(*args) for f in (autocast(function), function)])(x, w)
    assert got.dtype == want.dtype and distance(got, want) < 2e-3


WIDTH, MANY, SOME = 16, 20_000, 300
W = np.random.default_rng(0).standard_normal((WIDTH, WIDTH)).astype(np.float32) / 4
B = np.random.default_rng(1).standard_normal(WIDTH).astype(np.float32)
# {name: (number of rows, function of a row b and the number n to n rows)}; joins of single rows are slow to compile.
FORMS = {
    "broadcast_to": (MANY, lambda b, n: jnp.broadcast_to(b, (n, WIDTH))),
    "tile": (MANY, lambda b, n: jnp.tile(b[None], (n, 1))),
    "repeat": (MANY, lambda b, n: jnp.repeat(b[None], n, 0)),
    "gather": (MANY, lambda b, n: b[None][jnp.zeros(n, int)]),
    "pad wrap": (MANY // 40, lambda b, n: jnp.pad(b[None], ((0, n - 1), (0, 0)), mode="wrap")),
    "pad edge": (MANY, lambda b, n: jnp.pad(b[None], ((0, n - 1), (0, 0)), mode="edge")),
    "product": (MANY, lambda b, n: jnp.ones((n, 1)) * b[None]),
    "kron": (MANY, lambda b, n: jnp.kron(jnp.ones((n, 1)), b[None])),
    "concatenate": (SOME, lambda b, n: jnp.concatenate([b[None]] * n)),
    "stack": (SOME, lambda b, n: jnp.stack([b] * n)),
    "stack of a half value": (SOME, lambda b, n: jnp.stack([b.reshape(4, 4).T] * n).reshape(n, WIDTH)),
}


@pytest.mark.parametrize(
    ("form", "dtype"), [(form, [jnp.float16, jnp.bfloat16][i % 2]) for i, form in enumerate(FORMS)]
)
def test_gradient_of_repeated_operand_is_rounded_for_each_row_and_summed_exactly(form, dtype):
    count, repeated = FORMS[form]
    rows = np.random.default_rng(2).standard_normal((count, WIDTH)).astype(np.float32)

    def loss(b, x):
        return ((repeated(b, count) @ W) * x).sum()

    def half(array):
        return array.astype(dtype).astype(np.float64)

    found = np.asarray(jax.jit(jax.grad(autocast(loss, dtype)))(B, rows), np.float64)
    if form == "stack of a half value":
        found = found.reshape(4, 4).T.reshape(-1)
    exact = rows.sum(0, dtype=np.float64) @ W.T.astype(np.float64)
    rounded = half((half(rows) @ half(W).T).astype(np.float32)).sum(0)
    # 1.25: a half value rounds its gradient once more.
    assert np.linalg.norm(found - exact) <= 1.25 * np.linalg.norm(rounded - exact)


ROWS = {
    "look-up": lambda table: table[jnp.zeros(4000, jnp.int32)].astype(jnp.float32).sum(),
    "look-up before a product": lambda t: (t[jnp.zeros(4000, jnp.int32)] @ jnp.ones((4, 1), t.dtype)).sum(),
    "slices": lambda t: jax.vmap(lambda i: jax.lax.dynamic_slice(t[0], (i,), (4,)))(jnp.zeros(4000, jnp.int32)).sum(),
    "constant of a scan": lambda t: jax.lax.scan(
        lambda total, _: (total + t[0].astype(jnp.float32), None), jnp.zeros(4), None, length=4000
    )[0].sum(),
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_of_rows_of_a_half_table_are_summed_in_float32(name, dtype):
    """JAX adds them in half: the sum stops at 2048 (float16) or 256 (bfloat16)."""
    table = jnp.ones((2, 4), dtype)
    loss = lambda table: ROWS[name](table).astype(jnp.float32)  # noqa: E731
    found = jax.jit(jax.grad(autocast(loss, dtype.__name__)))(table)
    assert found.dtype == dtype
    np.testing.assert_allclose(np.asarray(found, np.float64)[0], 4000, rtol=float(jnp.finfo(dtype).eps))


def test_gradient_of_a_choice_per_row_stays_half():
    """At most one cotangent comes to an element: a float32 array of this size would be twice as large for nothing."""
    logits, labels = jnp.ones((64, 10), jnp.bfloat16), jnp.zeros((64, 1), jnp.int32)
    loss = lambda x: (jnp.take_along_axis(x, labels, 1).T @ jnp.ones((64, 1), x.dtype)).sum()  # noqa: E731
    jaxpr = jax.make_jaxpr(jax.grad(autocast(loss, "bf16")))(logits)
    assert not any(
        atom.aval.shape == logits.shape and atom.aval.dtype == jnp.float32
        for eqn in jax_compat.equations(jaxpr)
        for atom in eqn.outvars
    )
