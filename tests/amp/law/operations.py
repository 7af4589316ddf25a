"""Operations of the random programs: what each computes, and how casts by hand would compute it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, nn

ROWS, NARROW = 128, 8
_RANDOM = np.random.default_rng(0)
LABELS = _RANDOM.integers(0, NARROW, ROWS)
ORDER = _RANDOM.permutation(ROWS)


def _balanced(x):
    """Returns an array whose sums over rows and over columns cancel, but for a hundredth."""
    return x - 0.99 * (x.mean(0) + x.mean(1, keepdims=True) - x.mean())


FIXED = {n: _balanced(_RANDOM.standard_normal((ROWS, n))) for n in (NARROW, ROWS)}
MASK = {n: _RANDOM.random((ROWS, n)) > 0.3 for n in (NARROW, ROWS)}


class Casts:
    """How a program casts the operands of products, and of operations that are `wide` (sums), `infer` or `clear`.

    Values are float32, so that cotangents are added in float32. Those that half holds are kept in `rounded`.
    """

    def __init__(self, half="", *, infer_in_half=False):
        self.half, self.infer_in_half = half, infer_in_half
        self.rounded = {}

    def product(self, function, *operands):
        return self._in_half(function, operands) if self.half else function(*operands)

    def wide(self, function, *operands):
        return function(*operands)

    def infer(self, function, *operands):
        half = self.infer_in_half and self._are_rounded(operands)
        return self._in_half(function, operands) if half else function(*operands)

    def clear(self, function, *operands):
        result = function(*operands)
        return self._marked(result) if self._are_rounded(operands) else result

    def structure(self, function, *operands):
        """For functions that cast inside."""
        return function(self, *operands)

    def _in_half(self, function, operands):
        return self._marked(function(*(x.astype(self.half) for x in operands)).astype("float32"))

    def _are_rounded(self, operands):
        return all(id(x) in self.rounded for x in operands)

    def _marked(self, result):
        self.rounded[id(result)] = result
        return result


def _spread(function):
    """Returns a function of an array: half of the array, plus a row, a column or a number made of the array."""
    return lambda x: x * 0.5 + function(x)


def _norm(axis, centered=True):
    def norm(x):
        y = x - x.mean(axis, keepdims=True) if centered else x
        return y * lax.rsqrt(jnp.square(y).mean(axis, keepdims=True) + 1e-5)

    return norm


def _label(x):
    return jnp.take_along_axis(x, jnp.asarray(LABELS)[:, None], 1)


def _dot(casts, x, w):
    return casts.product(jnp.dot, x, w)


def _scan(casts, x, w):
    def body(state, row):
        new = casts.infer(lambda s, r: 0.5 * s + jnp.tanh(r), state, _dot(casts, row[None], w)).astype(state.dtype)
        return new, casts.infer(lambda s, r: s * r[:, : s.shape[1]], new, row[None].repeat(8, 1))[0]

    return lax.scan(body, jnp.zeros((1, w.shape[1]), w.dtype), x)[1]


def _scan_of_losses(casts, x, w):
    def body(state, row):
        logits = _dot(casts, row[None], w)
        loss = casts.wide(nn.logsumexp, logits) - casts.wide(lambda x: x[0, 3], logits)
        return state, jnp.broadcast_to(loss, w.shape[1:])

    return lax.scan(body, jnp.zeros((), w.dtype), x)[1]


def _ruled(casts, x, w):
    """A function with a custom derivative that has products."""

    @jax.custom_vjp
    def function(x, w):
        return _dot(casts, x, w).astype(x.dtype)

    def backward(saved, g):
        x, w = saved
        return 2 * _dot(casts, g, w.T).astype(x.dtype), 2 * _dot(casts, x.T, g).astype(w.dtype)

    function.defvjp(lambda x, w: (function(x, w), (x, w)), backward)
    return function(x, w)


def _cond(casts, x, w):
    def branch(x, w):
        return casts.infer(jnp.tanh, _dot(casts, x, w)).astype(w.dtype)

    return lax.cond(w.shape[0] > 1, branch, lambda x, w: x[:, :1] + w[:1], x, w)


def _remat(casts, x, w):
    return jax.checkpoint(lambda x, w: casts.infer(jnp.sin, _dot(casts, x, w)))(x, w)


def _cholesky(casts, x):
    gram = casts.product(lambda x: x.T @ x, x[:, :NARROW])
    return x * 0.5 + casts.wide(
        lambda g: jnp.linalg.cholesky(g + NARROW * jnp.eye(NARROW, dtype=g.dtype))[-1:, :1], gram
    )


def _special(x):
    return lax.erf_inv(0.9 * x) + lax.lgamma(2 + x) + lax.bessel_i0e(x) + lax.bessel_i1e(x)


def _ragged(x, w):
    return lax.ragged_dot(x, jnp.stack([w, 2 * w]), jnp.asarray([ROWS // 3, ROWS - ROWS // 3], "int32"))


def _conv(x, w):
    return lax.conv_general_dilated(x[None], w[None], (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC"))[0]


def _heads(x, y):
    return jnp.einsum("ihd,jhd->hij", x.reshape(ROWS, 2, -1), y.reshape(ROWS, 2, -1))[1]


# {name: (kind of casts, function, number of operands)}. Operands are of one size, and so is the result.
SAME = {
    # clear
    "neg abs sign": ("clear", lambda x: jnp.sign(x) * jnp.abs(-x), 1),
    "floor": ("infer", lambda x: x + jnp.floor(x), 1),
    "ceil round": ("infer", lambda x: x - jnp.round(x) + jnp.ceil(0.5 * x), 1),
    "max": ("clear", jnp.maximum, 2),
    "min": ("clear", jnp.minimum, 2),
    "clamp": ("clear", lambda x: lax.clamp(jnp.full_like(x, -1.5), x, jnp.full_like(x, 1.25)), 1),
    "where": ("clear", lambda x, y: jnp.where(jnp.asarray(MASK[x.shape[1]]), x, y), 2),
    "where zero": ("clear", lambda x: jnp.where(jnp.asarray(MASK[x.shape[1]]), x, 0), 1),
    "broadcast row": ("clear", lambda x: jnp.broadcast_to(x[3:4], x.shape), 1),
    "broadcast column": ("clear", lambda x: jnp.broadcast_to(x[:, 3:4], x.shape), 1),
    "tile": ("clear", lambda x: jnp.tile(x[5:6], (ROWS, 1)), 1),
    "reshape": ("clear", lambda x: x.reshape(8, -1)[::-1].reshape(x.shape), 1),
    "transpose": ("clear", lambda x: x.T.reshape(x.shape), 1),
    "slice and pad": ("clear", lambda x: jnp.pad(x[2:, 1:], ((2, 0), (0, 1))), 1),
    "dynamic slice": ("clear", lambda x: lax.dynamic_update_slice(x, lax.dynamic_slice(x, (1, 2), (8, 4)), (3, 1)), 1),
    "concatenate": ("clear", lambda x, y: jnp.concatenate([x[:9], y[9:]]), 2),
    "concatenate one": ("clear", lambda x: jnp.concatenate([x[:2]] * (ROWS // 2)), 1),
    "stack": ("clear", lambda x: jnp.stack([x[0]] * ROWS), 1),
    "gather": ("clear", lambda x: x[jnp.asarray(ORDER // 32)], 1),
    "gather labels": ("infer", _spread(_label), 1),
    "reverse": ("clear", lambda x: x[::-1], 1),
    "add zero": ("clear", lambda x: lax.rev(lax.rev(x, (1,)), (1,)), 1),
    "split": ("clear", lambda x: jnp.concatenate(jnp.split(x, 2, 1)[::-1], 1), 1),
    "scatter": ("clear", lambda x, y: x.at[jnp.asarray(ORDER[:8])].set(y[:8]), 2),
    "scatter max": ("clear", lambda x, y: x.at[jnp.asarray(ORDER[:8] // 4)].max(y[:8]), 2),
    "reduce max": ("infer", _spread(lambda x: x.max(1, keepdims=True)), 1),
    "reduce min": ("infer", _spread(lambda x: x.min(0, keepdims=True)), 1),
    "window max": ("clear", lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (3, 1), (1, 1), "SAME"), 1),
    "cummax": ("clear", lambda x: lax.cummax(x, 0), 1),
    "window min": ("clear", lambda x: lax.reduce_window(x, jnp.inf, lax.min, (3, 1), (1, 1), "SAME"), 1),
    "cummin": ("clear", lambda x: lax.cummin(x, 1), 1),
    "scatter min": ("clear", lambda x, y: x.at[jnp.asarray(ORDER[:8] // 4)].min(y[:8]), 2),
    "copy": ("clear", jnp.copy, 1),
    "sort": ("clear", lambda x: jnp.sort(x, 1), 1),
    "top_k": ("infer", _spread(lambda x: lax.top_k(x, 2)[0][:, :1]), 1),
    "stop_gradient": ("infer", lambda x: x - lax.stop_gradient(x.max(1, keepdims=True)), 1),
    "optimization_barrier": ("clear", lambda x: lax.optimization_barrier(x), 1),
    # infer
    "add": ("infer", jnp.add, 2),
    "sub": ("infer", jnp.subtract, 2),
    "mul": ("infer", jnp.multiply, 2),
    "div": ("infer", lambda x, y: x / (jnp.abs(y) + 0.5), 2),
    "rem": ("infer", lambda x: lax.rem(x, jnp.full_like(x, 3.0)), 1),
    "add row": ("infer", lambda x, y: x + y[:1], 2),
    "mul column": ("infer", lambda x, y: x * y[:, :1], 2),
    "scale": ("infer", lambda x: 3 * x, 1),
    "small constant": ("infer", lambda x: x / (jnp.abs(x) + 1e-6), 1),
    "tanh": ("infer", jnp.tanh, 1),
    "logistic": ("infer", nn.sigmoid, 1),
    "erf erfc": ("infer", lambda x: lax.erf(x) - lax.erfc(0.5 * x), 1),
    "sin cos": ("infer", lambda x: jnp.sin(x) + jnp.cos(2 * x), 1),
    "atan": ("infer", lambda x, y: jnp.arctan(x) + lax.atan2(x, jnp.abs(y) + 0.5), 2),
    "relu": ("infer", nn.relu, 1),
    "silu": ("infer", nn.silu, 1),
    "gelu": ("infer", nn.gelu, 1),
    "remat": ("structure", lambda c, x: jax.checkpoint(lambda x: c.infer(lambda x: jnp.sin(x) * x, x))(x), 1),
    # deny for the range
    "exp": ("wide", lambda x: jnp.exp(0.25 * x), 1),
    "exp2": ("wide", lambda x: lax.exp2(0.25 * x), 1),
    "expm1 log1p": ("wide", lambda x: jnp.log1p(jnp.abs(jnp.expm1(0.25 * x))), 1),
    "log": ("wide", lambda x: jnp.log(jnp.abs(x) + 0.1) + jnp.log2(jnp.abs(x) + 2), 1),
    "scatter mul": ("wide", lambda x, y: x.at[jnp.asarray(ORDER[:8])].multiply(y[:8], unique_indices=True), 2),
    "pow": ("wide", lambda x: (jnp.abs(x) + 0.1) ** 1.7, 1),
    "asin acos": ("wide", lambda x: jnp.arcsin(jnp.tanh(0.5 * x)) - jnp.arccos(jnp.tanh(0.3 * x)), 1),
    "hyperbolic": (
        "wide",
        lambda x: jnp.arcsinh(x) + jnp.arccosh(2 + jnp.abs(x)) + jnp.cosh(0.2 * x) - jnp.sinh(0.2 * x),
        1,
    ),
    "atanh tan": ("wide", lambda x: jnp.arctanh(0.5 * jnp.tanh(x)) + jnp.tan(jnp.tanh(x)), 1),
    "special": ("wide", lambda x: _special(jnp.tanh(x)), 1),
    "cumprod": ("wide", lambda x: jnp.cumprod(1 + 0.1 * jnp.tanh(x), 1), 1),
    "cumlogsumexp": ("wide", lambda x: lax.cumlogsumexp(x, 0), 1),
    "reduce_prod": ("wide", _spread(lambda x: jnp.prod(1 + 0.1 * jnp.tanh(x), 1, keepdims=True)), 1),
    "softmax": ("wide", lambda x: nn.softmax(x, 1), 1),
    "sharp softmax": ("wide", lambda x: nn.softmax(10 * x, 1), 1),
    "log_softmax": ("wide", lambda x: nn.log_softmax(x, 1), 1),
    "logsumexp": ("wide", _spread(lambda x: nn.logsumexp(x, 1, keepdims=True)), 1),
    "fft": ("wide", lambda x: jnp.fft.fft(x).real / 4, 1),
    "cholesky": ("structure", _cholesky, 1),
    # deny as sums
    "mean": ("wide", _spread(lambda x: x.mean(1, keepdims=True)), 1),
    "sum": ("wide", _spread(lambda x: x.sum(0, keepdims=True) / 8), 1),
    "cumsum": ("wide", lambda x: jnp.cumsum(x, 1) / 4, 1),
    "window sum": ("wide", lambda x: lax.reduce_window(x, 0.0, lax.add, (3, 1), (1, 1), "SAME"), 1),
    "scatter add": ("wide", lambda x: jnp.zeros_like(x).at[jnp.asarray(ORDER // 4)].add(x), 1),
    "segment mean": ("wide", lambda x: jax.ops.segment_sum(x, jnp.asarray(ORDER // 4), ROWS) / 4, 1),
    "square": ("wide", lambda x: 0.5 * jnp.square(x), 1),
    "cube": ("wide", lambda x: 0.1 * x**3, 1),
    "roots": (
        "wide",
        lambda x: jnp.sqrt(jnp.abs(x) + 0.1) - lax.rsqrt(jnp.square(x) + 0.5) + jnp.cbrt(jnp.abs(x) + 0.1),
        1,
    ),
    "layer norm": ("wide", _norm(1), 1),
    "rms norm": ("wide", _norm(1, centered=False), 1),
    "batch norm": ("wide", _norm(0), 1),
    "unit rows": ("wide", lambda x: x / (jnp.linalg.norm(x, axis=1, keepdims=True) + 1e-6), 1),
    # unlisted
    "reduce_precision": ("wide", lambda x: lax.reduce_precision(x, 8, 20), 1),
}
# {name: (kind, function, sizes of the operands, size of the result)}. A size is n (ROWS, 8), w (ROWS, ROWS), or that of
# a matrix of parameters: N (8, 8), U (8, ROWS), D (ROWS, 8), W (ROWS, ROWS).
OTHERS = {
    "dot nn": ("product", jnp.dot, "nN", "n"),
    "dot nw": ("product", jnp.dot, "nU", "w"),
    "dot wn": ("product", jnp.dot, "wD", "n"),
    "dot ww": ("product", jnp.dot, "wW", "w"),
    "scores": ("product", lambda x, y: x @ y.T, "nn", "w"),
    "dot of values": ("product", lambda x, y: x.T @ y, "wn", "n"),
    "gram": ("product", lambda x, y: x @ y.T, "ww", "w"),
    "heads": ("product", _heads, "nn", "w"),
    "ragged_dot": ("product", _ragged, "nU", "w"),
    "conv": ("product", _conv, "nU", "w"),
    "scan": ("structure", _scan, "nN", "n"),
    "scan of losses": ("structure", _scan_of_losses, "nU", "w"),
    "custom_vjp": ("structure", _ruled, "nU", "w"),
    "cond": ("structure", _cond, "nU", "w"),
    "jit": ("structure", lambda c, x, w: jax.jit(functools.partial(_dot, c))(x, w), "nU", "w"),
    "remat dot": ("structure", _remat, "nU", "w"),
    "first columns": ("clear", lambda x: x[:, :NARROW], "w", "n"),
    "narrow mean": ("wide", lambda x: x.reshape(ROWS, NARROW, -1).mean(2), "w", "n"),
    "columns repeated": ("clear", lambda x: jnp.repeat(x, ROWS // NARROW, 1), "n", "w"),
}
# Compiled for each program, so that a program has one at most.
SLOW = ("scan", "scan of losses", "cond", "jit", "remat", "remat dot", "custom_vjp")
SHAPES = {
    "n": (ROWS, NARROW),
    "w": (ROWS, ROWS),
    "N": (NARROW, NARROW),
    "U": (NARROW, ROWS),
    "D": (ROWS, NARROW),
    "W": (ROWS, ROWS),
}
OPS = {
    name: (kind, function, size * arity, size)
    for size in "nw"
    for name, (kind, function, arity) in SAME.items()
    for name in [f"{name}, {size}"]
} | OTHERS

# What a loss makes of a value.
LOSSES = {
    "weighted": lambda x: (x * FIXED[x.shape[1]].astype(x.dtype)).mean(),
    "square": lambda x: jnp.square(x).mean(),
    "cross entropy": lambda x: (nn.logsumexp(x, 1) - _label(x)[:, 0]).mean(),
    "cross entropy by softmax": lambda x: -_label(nn.log_softmax(x, 1)).mean(),
    "margin": lambda x: nn.relu(1 - _label(x)[:, 0] + x.max(1)).mean(),
    "sum": lambda x: x.sum() / 64,
}
# Losses whose cotangents cancel, but for a hundredth: of a linear operation, and of one that only moves elements.
LINEAR = (
    *("where zero", "broadcast row", "broadcast column", "tile", "slice and pad", "dynamic slice", "concatenate one"),
    *("stack", "gather", "gather labels", "scale", "fft", "mean", "sum", "cumsum", "window sum", "scatter add"),
    *("segment mean", "reduce_precision"),
)
REPEATING = (
    *("broadcast row", "broadcast column", "tile", "concatenate one", "stack", "gather", "columns repeated"),
    *("add row", "mul column"),
)
MOVING = ("reshape", "transpose", "split", "reverse", "add zero")


def cancelling(casts, linear, moving, x):
    kind, function, _ = SAME[linear]
    weights = FIXED[x.shape[1]]
    with jax.ensure_compile_time_eval():  # cotangents of linear functions are constants
        zeros = jnp.zeros(x.shape, weights.dtype if jax.config.jax_enable_x64 else "float32")
        (cotangent,) = jax.vjp(function, zeros)[1](zeros + weights)
        moved = np.asarray(SAME[moving][1](0.99 * cotangent))
    term = getattr(casts, kind)(function, x)
    other = casts.clear(SAME[moving][1], x)
    return casts.wide(lambda a, b: (a * weights.astype(a.dtype)).sum() - (b * moved.astype(b.dtype)).sum(), term, other)
