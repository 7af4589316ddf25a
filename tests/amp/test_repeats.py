"""Operations that repeat an operand: the gradient of the operand is summed in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import autocast

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
