"""Small programs with products in all the places that JAX has for them: `PROGRAMS`, name -> (function, arguments)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax, nn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mixedres.amp import autocast
from tests import arrays

PROGRAMS = {}


def draw(seed, *shape, scale=1.0):
    return arrays.normal(seed, shape, scale)


X, W = draw(0, 8, 8), draw(1, 8, 8, scale=0.3)
IMAGES, KERNEL = draw(2, 2, 6, 6, 3), draw(3, 3, 3, 3, 3, scale=0.3)
WIDE = draw(4, 16, 8)


def program(*args):
    def add(fn):
        PROGRAMS[fn.__name__] = (fn, args)
        return fn

    return add


def activated(function):
    return lambda x, w: function(x @ w) @ w


for _activation in (jnp.tanh, nn.gelu, nn.relu):
    PROGRAMS[getattr(_activation, "__name__", "activation")] = (activated(_activation), (X, W))


@program(X, W)
def switch(x, w):
    number = (x[0, 0] * 0).astype(int) + 2
    return lax.switch(number, [lambda a: a @ w, lambda a: a, lambda a: jnp.tanh(a @ w) @ w], x)


@program(X, W)
def remat_with_policy(x, w):
    return jax.checkpoint(lambda a: jnp.sin(a @ w) @ w, policy=jax.checkpoint_policies.dots_saveable)(x) @ w


@jax.custom_vjp
def _sine(x, w):
    return jnp.sin(x @ w)


def _sine_backward(saved, g):
    x, w = saved
    g = g * jnp.cos(x @ w)
    return g @ w.T, x.T @ g


_sine.defvjp(lambda x, w: (_sine(x, w), (x, w)), _sine_backward)


@jax.custom_vjp
def _row(x, i, w):
    return x[i] @ w, i + 1


def _row_backward(saved, g):
    x, i, w = saved
    return jnp.zeros_like(x).at[i].set(g[0] @ w.T), None, jnp.outer(x[i], g[0])


_row.defvjp(lambda x, i, w: (_row(x, i, w), (x, i, w)), _row_backward)


@program(X, W)
def custom_vjp_with_an_integer(x, w):
    row, following = _row(x, jnp.int32(1), w)
    return row @ w, following


@jax.custom_jvp
def _cosine(x, w):
    return jnp.cos(x @ w)


@_cosine.defjvp
def _cosine_jvp(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return _cosine(x, w), -jnp.sin(x @ w) * (dx @ w + x @ dw)


def convolve(x, kernel):
    return lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


@functools.cache
def mesh():
    return jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))


def _mean_over_devices(x, w):
    return lax.pmean(nn.silu(jnp.sin(x @ w)) @ w, "d")


def _mapped(function):
    return jax.shard_map(function, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P())


@program(WIDE, W)
def shardings(x, w):
    rows = NamedSharding(mesh(), P("d"))

    def inner(a):
        return lax.with_sharding_constraint(jnp.sin(a @ w), rows)

    return jax.jit(inner, in_shardings=rows, out_shardings=rows)(x) @ w


@program(X, W)
def attention(x, w):
    q = x @ w
    return nn.softmax(q @ q.T) @ q


@program(X, W)
def layer_norm(x, w):
    y = x @ w
    centered = y - y.mean(-1, keepdims=True)
    return jnp.tanh(centered * lax.rsqrt(jnp.square(centered).mean(-1, keepdims=True) + 1e-6)) @ w


def pool(x, start, combine):
    return lax.reduce_window(x, start, combine, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


# Programs of one expression.
_ON_MATRICES = {
    "scan": lambda x, w: lax.scan(lambda c, y: (jnp.tanh(c @ w + y), jnp.sin(c @ w) @ w), x, jnp.stack([x, x / 2])),
    "fori": lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x),
    "while_loop": lambda x, w: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1],
    "cond": lambda x, w: lax.cond(x[0, 0] > 0, lambda a: a @ w, lambda a: jnp.sin(a), x) @ w,
    "remat": lambda x, w: jax.checkpoint(lambda a: jnp.sin(a @ w) @ w)(x) @ w,
    "jit": lambda x, w: jax.jit(lambda a: jnp.sin(a @ w))(x) @ w,
    "custom_vjp": lambda x, w: jnp.sin(_sine(x, w)) @ w,
    "custom_vjp_in_scan": lambda x, w: lax.scan(lambda c, _: (_sine(c, w), None), x, None, length=3)[0],
    "custom_jvp": lambda x, w: jnp.sin(_cosine(x, w)) @ w,
    "embedding": lambda table, w: table[jnp.array([0, 1, 1, 5])] @ w,
    "dropout": lambda x, w: jnp.where(jax.random.bernoulli(jax.random.key(1), 0.5, x.shape), x @ w, 0) @ w,
    "sort": lambda x, w: jnp.sort(x @ w) @ w,
    "mapped_rows": lambda x, w: lax.map(lambda row: jnp.tanh(row @ w) @ w, x),
    "einsum": lambda x, w: jnp.einsum("ij,jk,lk->il", x, w, w),
}
_ON_IMAGES = {
    "convolution": lambda x, kernel: convolve(jnp.tanh(convolve(x, kernel)), kernel),
    "max_pool": lambda x, kernel: convolve(pool(convolve(x, kernel), -jnp.inf, lax.max), kernel),
    "average_pool": lambda x, kernel: convolve(pool(convolve(x, kernel), 0.0, lax.add) / 4, kernel),
}
_ON_DEVICES = {
    "shard_map": lambda x, w: _mapped(_mean_over_devices)(x, w) @ w,
    "autocast_in_shard_map": lambda x, w: _mapped(autocast(_mean_over_devices))(x, w),
}
PROGRAMS |= {"associative_scan": (lambda w: lax.associative_scan(lambda a, b: a @ b, jnp.stack([w, w, w])), (W,))}
PROGRAMS |= {name: (fn, (X, W)) for name, fn in _ON_MATRICES.items()}
PROGRAMS |= {name: (fn, (IMAGES, KERNEL)) for name, fn in _ON_IMAGES.items()}
PROGRAMS |= {name: (fn, (WIDE, W)) for name, fn in _ON_DEVICES.items()}
