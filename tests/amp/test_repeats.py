"""Operations that repeat an operand: the gradient of the operand is summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import autocast
from mixedres._internal import jax_compat

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
