"""Values that several operations read: their cotangents are added in float32, and rounded once, as with casts by hand.

The losses are of logits that are larger than the operands of their product, of a model that is sure: the gradient of
the label's logit is p - 1, of which a cotangent in half would leave nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax, nn
from jax.sharding import PartitionSpec as P

from mixedres._internal.jax_compat import equations
from mixedres.amp import autocast
from tests.amp.graphs import distance

ROWS, WIDTH, CLASSES = 64, 16, 96
RANDOM = np.random.default_rng(0)
LABELS = jnp.asarray(RANDOM.integers(0, WIDTH, ROWS))
SHOWN = nn.one_hot(LABELS, CLASSES)
WEIGHTS = jnp.linspace(-1, 1, ROWS)
X = (np.eye(WIDTH)[LABELS] + 0.02 * RANDOM.standard_normal((ROWS, WIDTH))).astype(np.float32)
W = (11 * np.eye(WIDTH, CLASSES) + 0.02 * RANDOM.standard_normal((WIDTH, CLASSES))).astype(np.float32)
SCALES = {"float16": 2.0**12, "bfloat16": 1.0}


def take(logits):
    return jnp.take_along_axis(logits, LABELS[:, None], 1)[:, 0]


def total(logits):
    return nn.logsumexp(logits, -1)


def moved_first(function):
    """The cross entropy of logits that `function` moves before both readers."""

    def loss(logits):
        moved = function(logits)
        return (total(moved) - take(moved)).mean()

    return loss


def chunks(logits):
    """The cross entropy as a scan over parts of the rows."""

    def step(found, part):
        logits, labels = part
        return found + (total(logits) - jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]).sum(), None

    return lax.scan(step, 0.0, (logits.reshape(4, -1, CLASSES), LABELS.reshape(4, -1)))[0] / ROWS


def sliced_rows(logits):
    rows = jax.vmap(lambda row, label: lax.dynamic_slice(row, (label,), (1,))[0])(logits, LABELS)
    return (total(logits) - rows).mean()


def on_devices(logits):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(total, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    return (mapped(logits) - take(logits)).mean()


@jax.custom_vjp
def _total(logits):
    return total(logits)


_total.defvjp(lambda logits: (total(logits), logits), lambda logits, g: (g[:, None] * nn.softmax(logits),))

LOSSES = {
    "gather": moved_first(lambda z: z),
    "masked": lambda z: jnp.where(LABELS % 3 > 0, total(z) - take(z), 0).sum() / ROWS,
    "max": lambda z: (total(z) - z.max(-1)).mean(),
    "top_k": lambda z: (total(z) - lax.top_k(z, 2)[0][:, 0]).mean(),
    "dynamic slice": sliced_rows,
    "split": lambda z: (total(z) - jnp.where(SHOWN[:, :48] > 0, jnp.split(z, 2, 1)[0], 0).sum(-1)).mean(),
    "sliced": moved_first(lambda z: z[:, :80]),
    "padded": moved_first(lambda z: jnp.pad(z, ((0, 0), (0, 8)), constant_values=-100.0)),
    "reshaped": lambda z: (total(z.reshape(2, -1, CLASSES)).ravel() - take(z)).mean(),
    "soft cap": moved_first(lambda z: 30 * jnp.tanh(z / 30)),
    "vmap": lambda z: jax.vmap(lambda row, label: nn.logsumexp(row) - row[label])(z, LABELS).mean(),
    "scan over rows": chunks,
    "scan and a reader outside": lambda z: (lax.scan(lambda s, row: (s, nn.logsumexp(row)), 0, z)[1] - take(z)).mean(),
    "remat and a reader outside": lambda z: (jax.checkpoint(total)(z) - take(z)).mean(),
    "remat of each reader": lambda z: (jax.checkpoint(total)(z) - jax.checkpoint(take)(z)).mean(),
    "jit of each reader": lambda z: (jax.jit(total)(z) - jax.jit(take)(z)).mean(),
    "cond": lambda z: lax.cond(z[0, 0] > -100, lambda z: (total(z) - take(z)).mean(), jnp.sum, z),
    "cond and a reader outside": lambda z: (lax.cond(z[0, 0] > -100, total, lambda z: z[:, 0], z) - take(z)).mean(),
    "custom_vjp": lambda z: (_total(z) - take(z)).mean(),
    "shard_map": on_devices,
}


def by_hand(dtype, x, w):
    return (x.astype(dtype) @ w.astype(dtype)).astype("float32")


def errors(program, dtype, *args):
    """Errors of the gradients of `program` in both orders, and of that with casts by hand; against float64.

    The program takes the function of its products as another argument, `product`.
    """

    def grad(function):
        return jax.grad(lambda *args: SCALES[dtype] * function(*args), tuple(range(len(args))))

    with jax.enable_x64(True):
        want = grad(program)(*(x.astype("float64") for x in args))
    with_casts = partial(program, product=partial(by_hand, dtype))
    gradients = grad(autocast(program, dtype)), autocast(grad(program), dtype), grad(with_casts)
    return [distance(found(*args), want) for found in gradients]


@pytest.mark.parametrize(("name", "dtype"), [(name, [*SCALES][i % 2]) for i, name in enumerate(LOSSES)])
def test_gradient_of_a_sure_model_is_as_right_as_with_casts_by_hand(name, dtype):
    loss = LOSSES[name]
    *found, bound = errors(lambda x, w, product=jnp.matmul: loss(product(x, w)), dtype, X, W)
    assert max(found) <= 1.1 * bound and bound < 0.1, (found, bound)


def halves(x, w):
    """The logits of a program that computes in half itself; in float64 for float64 operands."""
    return x @ w if x.dtype == "float64" else x.astype("bfloat16") @ w.astype("bfloat16")


def in_float32(logits):
    return logits if logits.dtype == "float64" else logits.astype("float32")


@pytest.mark.parametrize("name", ["masked", "max", "scan and a reader outside", "remat of each reader"])
def test_gradient_of_half_logits_of_the_program_is_as_right_as_of_float32_logits(name):
    loss = LOSSES[name]
    program = lambda x, w, product=halves: loss(product(x, w)).astype("float32")  # noqa: E731
    *found, bound = errors(program, "bfloat16", X, W)
    assert max(found) <= 1.1 * bound, (found, bound)


@pytest.mark.parametrize("map_rows", [False, True])
def test_half_logits_that_the_program_converts_for_each_reader_are_read_in_float32_once(map_rows):
    def row(logits, label):
        return nn.logsumexp(in_float32(logits)) - in_float32(logits[label])

    def loss(logits):
        return (
            lax.map(lambda each: row(*each), (logits, LABELS)) if map_rows else jax.vmap(row)(logits, LABELS)
        ).mean()

    *found, bound = errors(lambda x, w, product=halves: loss(product(x, w)), "bfloat16", X, W)
    assert max(found) <= 1.1 * bound, (found, bound)


def test_half_values_of_the_program_keep_their_rounding_and_their_dtype():
    """Compensated sums measure what a conversion to half loses."""

    def lost(x, w):
        return x - x.astype("bfloat16").astype("float32") + 0 * (x @ w).sum(), (
            x.astype("bfloat16") @ w.astype("bfloat16")
        )[0]

    (found, logits), (want, _) = autocast(lost, "bfloat16")(X, W), lost(X, W)
    np.testing.assert_array_equal(found, want)
    assert logits.dtype == "bfloat16" and np.abs(want).max() > 0


@pytest.mark.parametrize("call", [jax.checkpoint, lambda f: lambda x, w: lax.map(lambda row: f(row, w), x)])
def test_logits_that_a_call_reads_and_returns_are_returned_in_float32(call):
    def program(x, w, product=jnp.matmul):
        totals, logits = call(lambda x, w: (lambda z: (total(z), z))(product(x, w)))(x, w)
        return (totals - take(logits)).mean()

    *found, bound = errors(program, "bfloat16", X, W)
    assert max(found) <= 1.1 * bound, (found, bound)


def test_half_and_float32_cotangents_are_added_in_float32():
    def loss(x, w):
        logits = x @ w
        return (total(logits) - take(logits)).mean() + jnp.square(logits @ w.T).mean()

    graph = jax.make_jaxpr(jax.grad(autocast(loss, "bfloat16")))(X, W)
    sums = [eqn.outvars[0].aval for eqn in equations(graph) if eqn.primitive.name == "add_any"]
    assert {aval.dtype.name for aval in sums if aval.shape == (ROWS, CLASSES)} == {"float32"}


@pytest.mark.parametrize("dtype", SCALES)
def test_cotangents_of_many_products_are_added_in_float32(dtype):
    """A half value has a reader for each step of an unrolled loop. In half, the sum would be rounded at each step."""
    x, v, *ws = (RANDOM.standard_normal((WIDTH, WIDTH)).astype(np.float32) for _ in range(102))

    def loss(x, product=jnp.matmul):
        y = product(x, v)
        return sum(product(y, w).sum() for w in ws) / 4096

    *found, bound = errors(loss, dtype, x)
    assert max(found) <= 1.1 * bound, (found, bound)


def test_cotangents_of_a_converted_half_array_are_added_in_float32():
    def loss(z, product):
        z = z.astype("float32")
        return (total(z) - take(z)).mean() + 1e-6 * product(z, W.T).sum()

    z = jnp.asarray(X @ W, jnp.bfloat16)
    graph = jax.make_jaxpr(jax.grad(autocast(lambda z: loss(z, jnp.matmul), "bfloat16")))(z)
    assert {e.outvars[0].aval.dtype.name for e in equations(graph) if e.primitive.name == "add_any"} == {"float32"}
    found = jax.grad(autocast(lambda z: loss(z, jnp.matmul), "bfloat16"))(z)
    want = jax.grad(lambda z: loss(z, lambda *args: by_hand("bfloat16", *args)))(z)
    np.testing.assert_array_equal(found.astype("float32"), want.astype("float32"))


@pytest.mark.parametrize("dtype", SCALES)
def test_softmax_that_is_saved_in_half_keeps_the_gradient_of_what_is_sure(dtype):
    """The derivative is p (g - sum(p g)), which a p that was rounded to 1 made zero."""
    values, weights = RANDOM.standard_normal((2, 32, 32)).astype(np.float32)
    scores = (10 * np.eye(32) + 0.1 * RANDOM.standard_normal((32, 32))).astype(np.float32)

    def loss(scores, values, product=jnp.matmul):
        return (product(nn.softmax(scores), values) * weights).mean()

    found, _, bound = errors(loss, dtype, scores, values)
    assert found <= 1.5 * bound
