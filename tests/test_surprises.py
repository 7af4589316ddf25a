"""Every cell 'here' of docs/surprises.md is what mixedres does in the case of its row."""

import json
import re
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import safetensors.numpy
from flax import nnx
from optax import microbatching

from mixedres import autocast, numerics, precision
from mixedres.amp import PrecisionWarning
from mixedres.checkpoints import read_weights, write_weights
from mixedres.config import unflatten
from tests import ROOT

HALF = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
MANY = 8192
ROWS = jnp.ones((MANY, 4))
CHECKS = {}


def row(number):
    """Registers the check of a row, which takes a folder and returns the cell 'here'."""

    def register(check):
        CHECKS[number] = check
        return check

    return register


def right(*pairs):
    """'right' if every array is what float32 has, but for roundings of bfloat16."""
    for found, expected in pairs:
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=2.0**-8)
    return "right"


def named(text, *words):
    """'named' if a sentence has these words."""
    return "named" if all(word in text for word in words) else text


def refused(error, function, *args):
    """'refused' if the function raises an error of one line."""
    with pytest.raises(error) as raised:
        function(*args)
    assert "\n" not in str(raised.value)
    return "refused"


def under_autocast(function, x, expected):
    """Right on half and float32 arrays, and named by `compare` where the function computes in half itself."""
    for name, dtype in HALF.items():
        right((autocast(function, name)(x.astype(dtype)), expected), (autocast(function, name)(x), expected))
    wrong = [dtype for dtype in HALF.values() if not np.allclose(function(x.astype(dtype)), expected, rtol=0.02)]
    assert wrong and all(not numerics.compare(function, x.astype(dtype), dtype=None).is_fine for dtype in wrong)
    return "right"


@row(1)
def look_up(place):
    tokens = jnp.zeros(MANY, jnp.int32)
    loss = lambda table: table[tokens].astype(jnp.float32).sum()  # noqa: E731
    layer = nn.Embed(2, 4)
    of_layer = lambda params: layer.apply(params, tokens).sum()  # noqa: E731
    found = [jax.grad(autocast(of_layer, name))(layer.init(jax.random.key(0), tokens)) for name in HALF]
    tables = [jnp.ones((2, 4), dtype) for dtype in HALF.values()]
    halves = [jax.grad(autocast(loss, name))(x) for name, x in zip(HALF, tables, strict=True)]
    halves += [autocast(jax.grad(loss), name)(x) for name, x in zip(HALF, tables, strict=True)]
    return right(*((jax.tree.leaves(x)[0][0], MANY) for x in (*found, *halves)))


@row(2)
def scan(place):
    def loss(w):
        return jax.lax.scan(lambda total, _: (total + w.astype(jnp.float32), None), 0.0, None, length=MANY)[0]

    return right(*((jax.grad(autocast(loss, name))(jnp.ones((), dtype)), MANY) for name, dtype in HALF.items()))


@row(3)
def microbatches(place):
    loss = lambda w, x: (x @ w).mean()  # noqa: E731
    for name in HALF:
        grads = microbatching.microbatch(jax.grad(autocast(loss, name)), argnums=1, microbatch_size=4)
        right((grads(jnp.ones((4, 1)), jnp.ones((2048, 4))), 512))
    return "right"


@row(4)
def accumulation(place):
    params, tx = {"w": jnp.ones(4)}, optax.MultiSteps(optax.sgd(1.0), 2)
    wrapped = precision.loss_scaled(tx, precision.DynamicLossScale())
    state = wrapped.init(params)
    for value in (jnp.nan, 1.0, 1.0):
        grads = precision.scaled({"w": jnp.full(4, value) * state.loss_scale.loss_scale}, state)
        updates, state = wrapped.update(grads, state, params)
    return right((updates["w"], -1))


@row(5)
def softmax(place):
    return under_autocast(jax.nn.softmax, jnp.zeros(65_536), 2.0**-16)


@row(6)
def norms(place):
    v = jnp.array([300.0, 400.0])
    under_autocast(jnp.linalg.norm, v, 500)
    return under_autocast(lambda g: optax.clip_by_global_norm(1.0).update(g, None)[0], v, [0.6, 0.8])


@row(7)
def average_pool(place):
    return under_autocast(lambda x: nn.avg_pool(x, (32, 32)), jnp.ones((1, 32, 32, 1)), 1)


@row(8)
def segments(place):
    rows = jnp.zeros(MANY, jnp.int32)
    under_autocast(lambda x: jnp.zeros(1, x.dtype).at[rows].add(x), jnp.ones(MANY), MANY)
    return under_autocast(lambda x: jax.ops.segment_sum(x, rows, 1), jnp.ones(MANY), MANY)


@row(9)
def masked_row(place):
    def attention(q):
        return jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((4, 4), bool), -1), q @ q.T, -1e9))[0]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # NumPy's, of the cast to -inf
        assert not numerics.compare(attention, jnp.ones((4, 4), jnp.float16), dtype=None).is_fine
    return right((autocast(attention)(jnp.ones((4, 4))), 0.25))


@row(10)
def batch_norm_of_nnx(place):
    norm, x = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0)), jnp.full((2, 4), 1e4)
    norm.var[...] = jnp.full(4, 1e8)
    return right(*((autocast(lambda norm, x: norm(x), name)(norm, x), 1) for name in HALF))


@row(11)
def statistics_of_haiku(place):
    hk = pytest.importorskip("haiku")
    net = hk.transform_with_state(lambda x: hk.BatchNorm(True, True, 0.999)(x, is_training=True))
    x = 300 * jax.random.normal(jax.random.key(0), (64, 4))
    params, state = net.init(None, x)
    for name in HALF:
        found = autocast(lambda x: net.apply(params, state, None, x)[1], name)(x)
        right(*zip(jax.tree.leaves(found), jax.tree.leaves(net.apply(params, state, None, x)[1]), strict=True))
    return "right"


@row(12)
def decay(place):
    def average(x):
        kept, new = jnp.asarray(0.9995, x.dtype), jnp.asarray(0.0005, x.dtype)
        return jax.lax.fori_loop(0, 2000, lambda _, mean: kept * mean + new * x, x * 0)

    return named(numerics.compare(average, jnp.ones(4, jnp.bfloat16), dtype=None).verdict, "bfloat16 is not fine here")


@row(13)
def positions(place):
    table = lambda w: jnp.cos(jnp.arange(4096).astype(w.dtype)) * w  # noqa: E731
    return named(numerics.compare(table, jnp.ones(4096, jnp.bfloat16), dtype=None).verdict, "bfloat16 is not fine here")


@row(14)
def epsilon(place):
    unit = lambda x: x / (jnp.sqrt(x * x) + jnp.asarray(1e-8, x.dtype))  # noqa: E731
    verdict = numerics.compare(unit, jnp.zeros(4, jnp.float16), dtype=None).verdict
    return named(verdict, "as 1e-08 is in float16, and the result meets div")


@row(15)
def hyperparameters(place):
    tx = precision.loss_scaled(optax.inject_hyperparams(optax.adamw)(1e-3), precision.DynamicLossScale())
    with pytest.warns(PrecisionWarning) as told:
        tx.init({"w": jnp.ones(4, jnp.bfloat16)})
    return named(str(told[0].message), "in bfloat16", "float32 parameters")


@row(16)
def wrapper(place):
    params = {"w": jnp.ones(4, jnp.float16)}
    tx = precision.loss_scaled(optax.apply_if_finite(optax.adam(1e-3), 3), precision.DynamicLossScale())
    state = tx.init(params)
    return refused(TypeError, tx.update, precision.scaled(params, state), state, params)


@row(17)
def floor(place):
    for adjust in (lambda scale: scale.adjust(False), jax.jit(lambda scale: scale.adjust(False))):
        assert adjust(precision.DynamicLossScale(64.0, min_loss_scale=64.0)).loss_scale == 64
    return "right"


@row(18)
def zero(place):
    scale = precision.DynamicLossScale()
    for _ in range(200):
        scale = scale.adjust(jnp.bool_(False))
    assert scale.loss_scale > 0
    return "right"


@row(19)
def loss(place):
    tx, params = precision.loss_scaled(optax.sgd(0.1), precision.StaticLossScale(2.0**10)), {"w": jnp.full(4, 2.5)}
    state = tx.init(params)
    square = lambda params: jnp.square(params["w"] @ jnp.ones((4, 4))).mean()  # noqa: E731
    found, grads = precision.value_and_grad(autocast(square))(state, params)
    return right((found, 100), (grads.unscaled()["w"], 20))


@row(20)
def clipping(place):
    tx = precision.loss_scaled(optax.clip_by_global_norm(1.0), precision.DynamicLossScale())
    params = {"w": jnp.zeros(2)}
    state = tx.init(params)
    grads = precision.scaled({"w": jnp.array([0.3, 0.4]) * 2.0**15}, state)
    return right((tx.update(grads, state, params)[0]["w"], [0.3, 0.4]))


@row(21)
def tolerance(place):
    a = jnp.eye(4) + 0.1

    def solve(b):
        residual = lambda x: b - a @ x  # noqa: E731
        return jax.lax.while_loop(lambda x: jnp.abs(residual(x)).max() > 1e-5, lambda x: x + 0.5 * residual(x), b)

    found = jax.jit(autocast(solve, "bf16"))(jnp.ones(4))
    return right((found, jnp.linalg.solve(a, jnp.ones(4))))


@row(22)
def two_maxima(place):
    """In float32, under autocast, two layers and a residual block are right; `compare` names them in bfloat16."""
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in ((1024, 8), (8, 8)))
    relu, half = jax.nn.relu, [y.astype(jnp.bfloat16) for y in (x, w)]
    for loss in (lambda x, w: relu(relu(x) @ w + relu(x)).mean(), lambda x, w: (relu(relu(x @ w) @ w) @ w).mean()):
        (found, grads), (value, exact) = (
            jax.jit(jax.value_and_grad(fn, (0, 1)))(x, w) for fn in (autocast(loss, "bf16"), loss)
        )
        np.testing.assert_allclose(found, value, rtol=0.02)
        assert all(np.linalg.norm(a - b) < 0.05 * np.linalg.norm(b) for a, b in zip(grads, exact, strict=True))
        verdict = numerics.compare(loss, *half, dtype=None).verdict
        assert np.isfinite(jax.jit(loss)(*half)) or verdict.startswith("XLA's compiled program differs"), verdict
    return "right"


@row(23)
def constant_matrix(place):
    wrong = not np.allclose(jax.jit(lambda x: (x @ jnp.ones((4, 4))).sum(0))(ROWS), 4 * MANY)
    verdict = numerics.compare(lambda x: (x @ jnp.ones((4, 4))).sum(0), ROWS, dtype="bf16").verdict
    return named(verdict, "XLA's compiled program differs") if wrong else "named"


@row(24)
def wide_product(place):
    product = autocast(lambda x: x @ x.T, "bf16")
    gradient = jax.grad(lambda x: product(x).sum())
    return right((jax.jit(product)(jnp.ones((8, 64))), 64), (jax.jit(gradient)(jnp.ones((8, 64))), 16))


@row(25)
def sequences(place):
    h, w, y = jnp.ones((16, 256, 8)), jnp.ones((8, 8)), jnp.ones((16, 256, 8))
    loss = lambda w: ((h @ w) * y).sum()  # noqa: E731
    orders = jax.grad(autocast(loss, "bf16")), autocast(jax.grad(loss), "bf16")
    return right(*((jax.jit(gradient)(w), 4096) for gradient in orders))


@row(26)
def half_tensors(place):
    tensors = {"layer1.0.conv1.weight": np.ones((1, 1, 1, 1), jnp.bfloat16)}
    safetensors.numpy.save_file(tensors, place / "bf16.safetensors")
    return right((read_weights(place / "bf16.safetensors").tensors["layer1.0.conv1.weight"], 1))


@row(27)
def blur(place):
    write_weights(place / "model.safetensors", {"layer1.0.conv1.weight": np.zeros((1, 1, 1, 1), np.float32)})
    (place / "config.json").write_text(json.dumps({"architecture": "resnetblur50"}))
    return refused(Exception, read_weights, place / "model.safetensors")


@row(28)
def filters(place):
    write_weights(place / "model.safetensors", {"layer1.0.conv1.weight": np.zeros((1, 1, 1, 1), np.float32)})
    about = {"input_size": [3, 224, 224], "mean": [0.5] * 3, "std": [0.25] * 3, "interpolation": "bicubic"}
    (place / "config.json").write_text(json.dumps({"architecture": "resnet50", "pretrained_cfg": about}))
    return named(read_weights(place / "model.safetensors").note, "filter bicubic", "%")


@row(29)
def saved_scale(place):
    scale = precision.DynamicLossScale().adjust(jnp.bool_(False))
    with ocp.StandardCheckpointer() as saver:
        saver.save(place / "scale", scale)
    with ocp.StandardCheckpointer() as saver:
        back = saver.restore(place / "scale", precision.DynamicLossScale())
    return right((back.loss_scale, scale.loss_scale), (back.total_skipped, 1))


@row(30)
def numbers(place):
    config = unflatten({"batch_size": np.int64(16), "optimizer.learning_rate": jnp.float32(0.1)})
    return right((config.batch_size, 16), (config.optimizer.learning_rate, 0.1))


PAGE = (ROOT / "docs" / "surprises.md").read_text()
TABLE = [line.split("|") for line in PAGE.splitlines() if re.match(r"\| \d", line)]
CELLS = {int(cells[1]): cells[-2].strip() for cells in TABLE}


@pytest.mark.parametrize("number", CHECKS)
def test_cell_of_the_page_is_what_happens_here(number, tmp_path):
    assert CHECKS[number](tmp_path) == CELLS[number]


def test_every_row_has_a_check_and_a_word_of_three():
    assert sorted(CELLS) == sorted(CHECKS) == list(range(1, len(CHECKS) + 1))
    assert set(CELLS.values()) <= {"right", "named", "refused"}
