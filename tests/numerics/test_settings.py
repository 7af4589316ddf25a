"""Every tool under settings of JAX that people use, and on programs with unusual operations."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from mixedres import autocast, explain, numerics, precision
from mixedres.amp import PrecisionWarning

X, W, V = (
    np.random.default_rng(i).standard_normal(shape).astype(np.float32) / 4
    for i, shape in enumerate(((16, 8), (8, 8), (8, 1)))
)


SETTINGS = {
    "strict promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "x64": lambda: jax.enable_x64(True),
    "no rank promotion": lambda: jax.numpy_rank_promotion("raise"),
    "debug_nans": lambda: jax.debug_nans(True),
    "debug_infs": lambda: jax.debug_infs(True),
    "leaks are checked": jax.checking_leaks,
    "products in float32": lambda: jax.default_matmul_precision("float32"),
    "products in bfloat16": lambda: jax.default_matmul_precision("bfloat16"),
    "another device": lambda: jax.default_device(jax.devices()[1]),
}


def loss(params, x):
    return jnp.square(jnp.tanh(x @ params["w"]) @ params["v"]).mean()


def pallas(params, x):
    def kernel(a, out):
        out[...] = jnp.tanh(a[...])

    h = x @ params["w"]
    return (pl.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(h.shape, h.dtype), interpret=True)(h) @ W).mean()


def float8(params, x):
    narrow = (array.astype(jnp.float8_e4m3fn) for array in (jnp.tanh(x @ params["w"]), params["w"]))
    return (jax.lax.dot(*narrow, preferred_element_type=jnp.float32) @ params["v"]).mean()


def composite(params, x):
    return (jax.lax.composite(jnp.tanh, "my.tanh")(x @ params["w"]) @ params["v"]).mean()


def callback(params, x):
    h = x @ params["w"]
    return (jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(h.shape, h.dtype), h) @ W).mean()


def mutable(params, x):
    total = jax.new_ref(jnp.zeros((16, 8)))
    total[...] = jnp.tanh(x @ params["w"])
    return (total[...] @ params["v"]).mean()


def foreign(params, x):
    return jnp.linalg.norm(jnp.linalg.qr(x @ params["w"])[1])  # LAPACK by jax.ffi


PARAMS = {"w": W, "v": V}


def gradient(fn):
    return float(jnp.linalg.norm(jax.jit(jax.grad(autocast(fn)))(PARAMS, X)["w"]))


def scaled_step(fn):
    tx = precision.loss_scaled(optax.sgd(0.1), precision.DynamicLossScale(jnp.float32(2.0**10)))
    state = tx.init(PARAMS)
    _, grads = precision.value_and_grad(autocast(fn))(state, PARAMS, X)
    updates, _ = tx.update(grads, state, PARAMS)
    return float(jnp.linalg.norm(updates["w"]))


TOOLS = {
    "gradient": gradient,
    "scaled_step": scaled_step,
    "explain": lambda fn: explain(fn)(PARAMS, X).summary(),
    "compare": lambda fn: numerics.compare(fn, PARAMS, X).error,
    "first_nonfinite": lambda fn: str(numerics.first_nonfinite(autocast(fn), PARAMS, X)),
    "found": lambda fn: numerics.first_nonfinite(fn, PARAMS, X * np.float32(1e38)).origin is None,
    "examine": lambda fn: numerics.examine(fn, PARAMS, X).recommended_log2_scale,
}


@pytest.fixture(scope="module")
def plain():
    """Returns what the tools return without a setting."""
    return {name: tool(loss) for name, tool in TOOLS.items()}


def about(value):
    return pytest.approx(value, rel=0.05) if isinstance(value, float) else value


@pytest.mark.parametrize("setting", SETTINGS)
def test_tools_return_the_same_under_every_setting(setting, plain):
    skipped = {"debug_nans": ("found",), "debug_infs": ("found",)}.get(setting, ())  # where JAX itself stops
    for name, tool in TOOLS.items():
        if name in skipped:
            continue
        with SETTINGS[setting](), warnings.catch_warnings():
            warnings.simplefilter("ignore", PrecisionWarning)  # all products ask for float32
            found = tool(loss)
        if setting == "products in float32" and name in ("explain", "compare"):
            continue
        assert found == about(plain[name]), name


def test_tools_return_the_same_with_explicit_sharding(plain, monkeypatch):
    """The axes of `jax.make_mesh` are explicit unless one asks for others; `auto_axes` has others inside."""

    def split(params, x):
        h = jax.sharding.auto_axes(jnp.tanh, out_sharding=P("data", "model"))(x @ params["w"])
        return jnp.square(jax.sharding.reshard(h, P("data")) @ params["v"]).mean()

    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)):
        shardings = {"w": P(None, "model"), "v": P()}
        monkeypatch.setitem(globals(), "PARAMS", jax.tree.map(jax.device_put, PARAMS, shardings))
        monkeypatch.setitem(globals(), "X", jax.device_put(X, P("data")))
        found = {name: tool(split) for name, tool in TOOLS.items() if name != "explain"}
    assert found == {name: about(plain[name]) for name in found}


@pytest.mark.parametrize(
    ("fn", "differentiable"),
    [(float8, True), (composite, False), (foreign, True), (mutable, True), (pallas, False), (callback, False)],
)
def test_tools_take_unusual_operations(fn, differentiable):
    for name, tool in TOOLS.items():
        if differentiable or name in ("explain", "compare", "first_nonfinite", "found"):
            tool(fn)


@pytest.mark.parametrize(("fn", "name"), [(mutable, "swap"), (pallas, "pallas_call"), (callback, "pure_callback")])
def test_operation_that_runs_on_half_numbers_alone_is_named(fn, name):
    report = numerics.compare(fn, PARAMS, X)
    assert report.error < 0.01 and not report.is_fine and not report.is_off and not report.mends
    assert {line.partition(" at ")[0] for line in report.unfollowed} == {name}
    assert "Not followed in float32" in report.verdict
    # Without half values before it, everything was compared.
    assert numerics.compare(fn, PARAMS, X, dtype=None).is_fine
