"""JAX alone: layers and transformations that programs write themselves; by hand, parameters and inputs are half."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.strangers.programs import by_hand, cross_entropy, images, matrices, normal, program, square

BATCH, TIME, SIZE, CLASSES = 4, 16, 32, 10
ROWS = BATCH * TIME


def sequences(model, params, size=SIZE):
    """A function (params, (BATCH, TIME, size)) -> the same shape, and a target of that shape."""
    return program(by_hand(model), square, params, normal(1, BATCH, TIME, size), normal(2, BATCH, TIME, size))


def layer_norm(x, epsilon=1e-6):
    """A norm over the last axis in float32, with a result of the input's dtype."""
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    return (wide * lax.rsqrt((wide**2).mean(-1, keepdims=True) + epsilon)).astype(x.dtype)


def experts_ragged():
    """A mixture of experts: the best two of four for each row, rows sorted by expert, ragged products."""
    params = matrices(0, router=(SIZE, 4), up=(4, SIZE, 2 * SIZE), down=(4, 2 * SIZE, SIZE))

    def model(params, x):
        weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), 2)
        order = jnp.argsort(chosen.ravel())
        sizes = jnp.bincount(chosen.ravel(), length=4)
        hidden = jax.nn.silu(lax.ragged_dot(x[order // 2], params["up"], sizes))
        out = lax.ragged_dot(hidden, params["down"], sizes) * weights.ravel()[order][:, None]
        return jnp.zeros_like(x).at[order // 2].add(out)

    return program(by_hand(model), square, params, normal(1, ROWS, SIZE), normal(2, ROWS, SIZE))


def experts_one_hot():
    """The same idea with one expert a row and a dispatch by einsum."""
    params = matrices(0, router=(SIZE, 4), up=(4, SIZE, 2 * SIZE), down=(4, 2 * SIZE, SIZE))

    def model(params, x):
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), 4, dtype=x.dtype) * gates
        hidden = jax.nn.silu(jnp.einsum("re,rd,edh->erh", chosen, x, params["up"]))
        return jnp.einsum("erh,ehd->rd", hidden, params["down"])

    return program(by_hand(model), square, params, normal(1, ROWS, SIZE), normal(2, ROWS, SIZE))


def fourier():
    """FNet: the real part of a transform over tokens and features, dense layers around it."""
    params = matrices(0, first=(SIZE, 2 * SIZE), second=(2 * SIZE, SIZE))

    def model(params, x):
        # There is no transform of halves.
        mixed = jnp.fft.fft2(layer_norm(x).astype(jnp.float32)).real / ROWS**0.5
        y = layer_norm(x + mixed.astype(x.dtype))
        return y + jax.nn.gelu(y @ params["first"]) @ params["second"]

    return sequences(model, params)


def selective_scan():
    """Mamba: a recurrence whose steps, inputs and outputs depend on the data, gated by silu."""
    state, inner = 4, 2 * SIZE
    params = matrices(0, inside=(SIZE, 2 * inner), steps=(inner, inner), ends=(inner, 2 * state), out=(inner, SIZE))
    params["decay"] = jnp.log(jnp.broadcast_to(jnp.arange(1.0, state + 1), (inner, state)))

    def model(params, x):
        u, gate = jnp.split(layer_norm(x) @ params["inside"], 2, -1)
        u = jax.nn.silu(u)
        steps = jax.nn.softplus(u @ params["steps"])
        into, out = jnp.split(u @ params["ends"], 2, -1)

        def step(hidden, now):
            u, steps, into, out = now
            decay = jnp.exp(-steps[..., None] * jnp.exp(params["decay"]))
            hidden = decay * hidden + (steps * u)[..., None] * into[:, None]
            return hidden, jnp.einsum("bis,bs->bi", hidden, out)

        rows = jax.tree.map(lambda a: a.swapaxes(0, 1), (u, steps, into, out))
        _, y = lax.scan(step, jnp.zeros((x.shape[0], inner, state), x.dtype), rows)
        return x + (y.swapaxes(0, 1) * jax.nn.silu(gate)) @ params["out"]

    return sequences(model, params)


def linear_recurrence():
    """LRU: a diagonal complex recurrence by an associative scan, in float32 by hand as well."""
    params = matrices(0, inside=(SIZE, 2 * SIZE), out=(2 * SIZE, SIZE), radius=(SIZE,), angle=(SIZE,))

    def model(params, x):
        real, imaginary = jnp.split((layer_norm(x) @ params["inside"]).astype(jnp.float32), 2, -1)
        radius, angle = params["radius"].astype(jnp.float32), params["angle"].astype(jnp.float32)
        decay = jnp.exp(lax.complex(-jnp.exp(radius), angle))
        pairs = jnp.broadcast_to(decay, real.shape), lax.complex(real, imaginary)
        _, y = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), pairs, axis=1)
        y = jnp.concatenate([y.real, y.imag], -1).astype(x.dtype)
        return x + jax.nn.gelu(y) @ params["out"]

    return sequences(model, params)


def feed_forward(policy):
    """Three pre-norm blocks under jax.checkpoint with a policy."""
    params = matrices(0, up=(3, SIZE, 2 * SIZE), down=(3, 2 * SIZE, SIZE))

    def model(params, x):
        @functools.partial(jax.checkpoint, policy=policy)
        def block(x, up, down):
            return x + jax.nn.gelu(layer_norm(x) @ up) @ down

        for i in range(3):
            x = block(x, params["up"][i], params["down"][i])
        return x

    return sequences(model, params)


def scanned_transformer():
    """Pre-norm blocks under scan, each recomputed in the backward pass."""
    shapes = {"qkv": (SIZE, 3 * SIZE), "out": (SIZE, SIZE), "up": (SIZE, 2 * SIZE), "down": (2 * SIZE, SIZE)}
    params = matrices(0, **{name: (2, *shape) for name, shape in shapes.items()})

    @jax.checkpoint
    def block(x, weights):
        q, k, v = (a.reshape(*x.shape[:2], 4, -1) for a in jnp.split(layer_norm(x) @ weights["qkv"], 3, -1))
        shares = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", shares, v).reshape(x.shape) @ weights["out"]
        return x + jax.nn.gelu(layer_norm(x) @ weights["up"]) @ weights["down"], None

    return sequences(lambda params, x: lax.scan(block, x, params)[0], params)


def fused_attention():
    """jax.nn.dot_product_attention, causal, two heads of keys for four of queries; it has no float16 form on a CPU."""
    params = matrices(0, q=(SIZE, SIZE), k=(SIZE, SIZE // 2), v=(SIZE, SIZE // 2), out=(SIZE, SIZE))

    def model(params, x):
        q, k, v = ((x @ params[name]).reshape(*x.shape[:2], -1, 8) for name in "qkv")
        return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ params["out"]

    inputs = normal(1, BATCH, TIME, SIZE), normal(2, BATCH, TIME, SIZE)
    return program(by_hand(model), square, params, *inputs, own=False)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def flash(q, k, v, size):
    """Attention (b, time, d) over blocks of `size` keys, with running maxima and sums in float32."""
    return _flash_forward(q, k, v, size)[0]


def _flash_forward(q, k, v, size):
    blocks = [a.reshape(a.shape[0], -1, size, a.shape[-1]).swapaxes(0, 1) for a in (k, v)]

    def step(state, block):
        top, total, out = state
        logits = jnp.einsum("bqd,bkd->bqk", q, block[0]).astype(jnp.float32) / q.shape[-1] ** 0.5
        new = jnp.maximum(top, logits.max(-1))
        shares, shrink = jnp.exp(logits - new[..., None]), jnp.exp(top - new)
        added = jnp.einsum("bqk,bkd->bqd", shares.astype(q.dtype), block[1]).astype(jnp.float32)
        return (new, total * shrink + shares.sum(-1), out * shrink[..., None] + added), None

    rows = jnp.zeros(q.shape[:-1], jnp.float32)
    (top, total, out), _ = lax.scan(step, (rows - 1e30, rows, jnp.zeros(q.shape, jnp.float32)), blocks)
    out = (out / total[..., None]).astype(q.dtype)
    return out, (q, k, v, out, top + jnp.log(total))


def _flash_backward(size, kept, g):
    q, k, v, out, log_total = kept
    scale = q.shape[-1] ** -0.5
    shares = jnp.exp((jnp.einsum("bqd,bkd->bqk", q, k).astype(jnp.float32) * scale) - log_total[..., None])
    inner = (g.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1, keepdims=True)
    slopes = shares * (jnp.einsum("bqd,bkd->bqk", g, v).astype(jnp.float32) - inner) * scale
    shares, slopes = shares.astype(q.dtype), slopes.astype(q.dtype)
    dq, dk = jnp.einsum("bqk,bkd->bqd", slopes, k), jnp.einsum("bqk,bqd->bkd", slopes, q)
    return dq, dk, jnp.einsum("bqk,bqd->bkd", shares, g)


flash.defvjp(_flash_forward, _flash_backward)


def flash_attention():
    """Attention as a custom_vjp that recomputes its weights."""
    params = matrices(0, q=(SIZE, SIZE), k=(SIZE, SIZE), v=(SIZE, SIZE), out=(SIZE, SIZE))

    def model(params, x):
        q, k, v = (x @ params[name] for name in "qkv")
        return x + flash(q, k, v, TIME // 4) @ params["out"]

    return sequences(model, params)


def gaussian_process():
    """The negative log likelihood of a Gaussian process over learned features: Cholesky of a Gram matrix."""
    params = matrices(0, first=(SIZE, SIZE), second=(SIZE, 16))

    def model(params, x, y):
        features = jnp.tanh(x @ params["first"]) @ params["second"]
        # A factorization needs float32 from the Gram matrix on.
        gram = jnp.matmul(features, features.T, preferred_element_type=jnp.float32) / 16
        lower = jnp.linalg.cholesky(gram + 0.1 * jnp.eye(len(gram)))
        white = jax.scipy.linalg.solve_triangular(lower, y.astype(jnp.float32), lower=True)
        return white @ white / 2 + jnp.log(jnp.diagonal(lower)).sum()

    inputs = normal(1, TIME, SIZE), normal(2, TIME), jnp.float32(0)
    return program(by_hand(model), lambda value, _: value / TIME, params, *inputs)


def pooled_convolutions():
    """Convolutions with softplus, max pooling, average pooling, a head."""
    params = matrices(0, first=(16, 3, 3, 3), second=(32, 16, 3, 3), head=(32, CLASSES))
    params = {name: x / 3 if x.ndim == 4 else x for name, x in params.items()}

    def model(params, x):
        window = (1, 1, 2, 2)
        x = jax.nn.softplus(lax.conv(x, params["first"], (1, 1), "SAME"))
        x = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
        x = jax.nn.softplus(lax.conv(x, params["second"], (1, 1), "SAME"))
        x = lax.reduce_window(x, 0.0, lax.add, window, window, "VALID") / 4
        return x.mean((2, 3)) @ params["head"]

    return program(by_hand(model), cross_entropy, params, *images(3, 16, 16))


POLICIES = jax.checkpoint_policies
PROGRAMS = {
    "experts, ragged_dot": experts_ragged,
    "experts, one-hot": experts_one_hot,
    "Fourier layer": fourier,
    "Mamba, selective scan": selective_scan,
    "LRU, associative_scan": linear_recurrence,
    "checkpoint, everything": lambda: feed_forward(None),
    "checkpoint, dots_saveable": lambda: feed_forward(POLICIES.dots_saveable),
    "checkpoint, no batch dims": lambda: feed_forward(POLICIES.dots_with_no_batch_dims_saveable),
    "transformer, scan and checkpoint": scanned_transformer,
    "dot_product_attention": fused_attention,
    "flash attention, custom_vjp": flash_attention,
    "Gaussian process, Cholesky": gaussian_process,
    "convolutions and pooling": pooled_convolutions,
}
