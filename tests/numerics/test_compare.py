"""`compare` on small functions: its errors against numpy, and the operations and changes that it names."""

import contextlib
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mixedres import autocast
from mixedres.numerics import compare, first_nonfinite
from mixedres.numerics._compare import running
from mixedres.numerics._compare.exact import evaluate
from tests.amp.graphs import distance, line_of
from tests.arrays import normal

F16 = jnp.float16


def row(report, primitive, path=None):
    """The one row of a primitive."""
    rows = [r for r in report.rows if r.primitive == primitive and path in (None, r.path)]
    assert len(rows) == 1, rows
    return rows[0]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_operations_of_a_cpu_are_float32_operations_rounded(dtype):
    numbers = np.arange(2**16, dtype=np.uint16).view(dtype)
    others = np.random.default_rng(0).permutation(numbers)

    @partial(jax.jit, compiler_options={"xla_allow_excess_precision": False})
    def results(x, y):
        unary = {"abs", "erf", "exp", "log", "neg", "sign", "sin", "cos", "sqrt", "tanh", "square"}
        operands = {name: (x,) if name in unary else (x, y) for name in running.PairRecorder.elementwise}
        return {name: getattr(jax.lax, name)(*given) for name, given in operands.items()}

    half, wide = results(numbers, others), results(numbers.astype(np.float32), others.astype(np.float32))
    with np.errstate(all="ignore"):
        for name, found in half.items():
            np.testing.assert_array_equal(np.float32(found), np.float32(np.asarray(wide[name]).astype(dtype)), name)


@pytest.mark.parametrize("shape", [(16, 16), (80, 80)])  # measured together with others, and alone
def test_errors_agree_with_numpy(shape):
    x, y = (np.array(normal(seed, shape)) for seed in (0, 1))
    y[3, :4] = 1e-7, 1e-9, 70000.0, -1e6

    def fn(x, y):
        a, b = x.astype(F16), y.astype(F16)
        with jax.named_scope("ratio"):
            return a / b

    report = compare(fn, x, y, dtype=None)
    found = row(report, "div")
    with np.errstate(all="ignore"):
        a, b = x.astype(np.float16), y.astype(np.float16)
        half, alone = a / b, a.astype(np.float32) / b.astype(np.float32)
    assert report.errors[""] == found.accumulated == np.inf  # 1e-9 became 0
    assert found.infinite == (~np.isfinite(half)).sum() == 2
    assert found.zeros == ((half == 0) & (alone != 0)).sum()
    cast = [r for r in report.rows if r.primitive == "convert_element_type"][1]
    assert (cast.zeros, cast.infinite, cast.cast_of) == (1, 2, "")

    kept = np.ones(shape, bool)
    kept[3, :4] = False
    y[~kept] = 1.5
    found = row(compare(fn, x, y, dtype=None), "div")
    a, b = x.astype(np.float16), y.astype(np.float16)
    alone, exact = a.astype(np.float64) / b, x.astype(np.float64) / y
    np.testing.assert_allclose(found.own, np.linalg.norm(a / b - alone) / np.linalg.norm(exact), rtol=1e-3)
    np.testing.assert_allclose(found.accumulated, distance(a / b, exact), rtol=1e-3)
    assert report.jump is not None


def test_hidden_infinity_of_a_divisor_is_named():
    """A sum above 65504 that only divides: 1 / inf = 0."""

    def fn(x):
        return (x.astype(F16) / jnp.full(1000, 100, F16).sum()).astype(jnp.float32)

    report = compare(fn, normal(0, (4,)), dtype=None)
    ((array, by),) = report.hidden
    assert (array.cast_of, by.primitive) == ("reduce_sum", "div") and not report.is_fine
    assert "forward: div, float16[4], at" in report.verdict and report.contributors[0].row.primitive == "reduce_sum"
    assert "compute it in float32" in report.advice[0]
    text = str(first_nonfinite(fn, normal(0, (4,))))
    assert text.startswith("all results are finite, but infinities in 1 array were hidden by: div at ") and "fn" in text


def test_advice_on_a_selection_is_about_what_it_compares():
    """Half rounds all numbers to 0.5; two selections of one line have one line of advice."""

    def fn(x):
        return [jnp.where(limited > 0.5, 1.0, -1.0) for limited in (x.astype(F16), 2 * x.astype(F16) - F16(0.5))]

    (advice,) = compare(fn, 0.5 + 1e-5 * normal(0, (100,)), dtype=None).advice
    assert re.fullmatch(r"select_n at .*: roundings change what it selects; compute what it compares .*", advice)


def half(x):
    return x.astype(F16)


def test_casts_of_a_helper_have_the_line_of_their_caller():
    def fn(x, w):
        a = half(x + 100).astype(x.dtype) - 100
        return a + half(w).astype(x.dtype)

    report = compare(fn, normal(0, (8, 8)), normal(1, (8, 8)), dtype=None)
    worst, other = report.contributors
    assert worst.row.source.endswith(line_of(fn)) and worst.share > 0.99
    assert other.row.source.endswith(line_of(fn, 2))


def nearest(codes, x):
    return codes[jnp.argmin(half(jnp.square(codes).sum(-1))[None] - half(2 * x @ codes.T), -1)]


def slots(codes, x):
    slot = jnp.cumsum(half(jnp.ones_like(x)), 0, dtype=F16)[:, 0]
    return jnp.zeros((len(x), 1)).at[slot.astype(jnp.int32) - 1].set(x[:, :1])


def window(codes, x):
    return jax.lax.dynamic_slice(jnp.sin(jnp.arange(3e4)), (half(x[:, 0]).sum().astype(jnp.int32),), (1,))


@pytest.mark.parametrize(("fn", "primitive"), [(nearest, "sub"), (slots, "cumsum"), (window, "reduce_sum")])
def test_operation_before_integers_that_choose_is_named(fn, primitive):
    """The gather, the scatter and the slice round nothing."""
    codes, x = normal(0, (32, 8)) * 0.2 + 6, normal(1, (3000, 8)) * 0.2 + 6
    report = compare(fn, codes, x, dtype=None)
    worst = report.contributors[0]
    assert not report.is_fine and worst.share > 0.9 and worst.selected > 0.9 and worst.row.primitive == primitive
    assert line_of(fn) in worst.row.source
    assert report.advice[0].endswith("roundings change what its numbers select; compute them in float32")


def fake_quantized(x):
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=3)


@pytest.mark.parametrize("fn", [jnp.round, jnp.floor, jnp.ceil, jnp.sign, fake_quantized])
def test_rounding_to_a_grid_is_a_selection(fn):
    x = normal(0, (64, 64))
    report = compare(lambda x: fn(half(x * 50).astype(x.dtype)), x, dtype=None)
    off = np.asarray(fn(half(x * 50)), np.float64) - np.asarray(fn(x * 50), np.float64)
    assert report.error == pytest.approx(np.linalg.norm(off) / np.linalg.norm(fn(x * 50)), rel=1e-3)
    assert report.is_fine and (not report.error or report.contributors[0].selected > 0.9)


def distances(a, b, precision=None, scope=None):
    with scope or jax.named_scope("product"):
        products = jnp.matmul(a, b.T, precision=precision)
    return jnp.sqrt((a * a).sum(1)[:, None] + (b * b).sum(1)[None] - 2 * products + 1e-4)


def test_mend_of_pairwise_distances_is_the_product():
    a = 3 * normal(0, (40, 64))
    b = a + 1e-2 * normal(1, (40, 64))
    report = compare(distances, a, b)
    assert report.error == np.inf and report.jump.primitive == "sqrt"
    assert (report.contributors[0].row.primitive, report.contributors[0].row.path) == ("dot_general", "product")
    assert report.mends[0].change == "keep_float32='^/product(/|$)'" and report.mends[0].removes == 1
    assert "sqrt" in str(report) and report.mends[0].change in str(report)

    unnamed = compare(lambda a, b: distances(a, b, scope=contextlib.nullcontext()), a, b)
    assert "wrap it in a jax.named_scope" in unnamed.advice[0] and "Precision.HIGHEST" in unnamed.advice[0]
    with pytest.warns(UserWarning, match="casts nothing"):
        assert compare(lambda a, b: distances(a, b, jax.lax.Precision.HIGHEST), a, b).error == 0


@pytest.mark.parametrize(
    ("own", "first"),
    [
        (False, r"'^/eqx\\.nn\\.Linear(/|$)' (6 of 6 products; a jax.named_scope of your own takes fewer): "),
        (True, r"'^/mlp1(/|$)' (4 of 6 products): "),
    ],
)
def test_mend_counts_products_and_prefers_a_scope_of_the_user(own, first):
    """Equinox opens one scope, of the name of the class, for every linear layer."""

    def linear(x, w):
        with jax.named_scope("eqx.nn.Linear"):
            return x @ w

    def network(x, weights, gain):
        first, *rest = weights
        x = linear(x, first)
        with jax.named_scope("mlp1") if own else contextlib.nullcontext():
            for w in rest:
                x = x + gain * linear(jax.nn.relu(x), w)
        return x

    x, weights = normal(0, (8, 16)), [normal(seed, (16, 16), scale) for seed, scale in enumerate((0.1, 0.5, 0.5), 1)]
    report = compare(lambda x, weights: network(x, weights, 1.001) - network(x, weights, 1), x, weights)
    assert f"  try keep_float32={first}" in str(report)


def test_activations_beyond_the_range_of_float16_are_named():
    """As in the feed-forward layers of T5."""

    def fn(x, wi, gate, wo):
        with jax.named_scope("wi"):
            h = jax.nn.relu(x @ wi)
        with jax.named_scope("gate"):
            g = x @ gate
        with jax.named_scope("wo"):
            return (h * g) @ wo

    sizes = ((16, 64), 30.0), ((64, 128), 3.0), ((64, 128), 3.0), ((128, 64), 0.1)
    report = compare(fn, *(scale * normal(seed, size) for seed, (size, scale) in enumerate(sizes)))
    assert report.jump.path == report.contributors[0].row.path == "wo" and report.error == np.inf
    assert [mend.change for mend in report.mends] == ["keep_float32='^/wo(/|$)'", "dtype='bfloat16'"]
    assert all(mend.error < 0.01 and mend.removes == 1 for mend in report.mends)


def test_half_logits_and_long_sums_are_named():
    def attention(q, k, v):
        with jax.named_scope("logits"):
            logits = q @ k.T
        with jax.named_scope("softmax"):
            weights = jax.nn.softmax(logits)
        return weights @ v

    q, k, v = (scale * normal(seed, (64, 64)).astype(F16) for seed, scale in enumerate((8, 1, 1)))
    report = compare(attention, q, k, v, dtype=None)
    assert report.is_fine and 0.001 < report.error < 0.01  # which 6 roundings explain
    assert report.jump.primitive == "exp" and report.jump.path == "softmax"
    assert {one.row.path for one in report.contributors[:2]} == {"softmax", "logits"}

    report = compare(lambda x: jax.nn.log_softmax(x).sum(), normal(0, (30000,)).astype(F16))
    assert report.error == np.inf and report.contributors[0].row.name == "cast to float16"  # of the float32 sum


def test_gradient_says_when_the_loss_scale_is_too_small():
    def loss(params, x):
        with jax.named_scope("layer"):
            return (jnp.tanh(x @ params["w"]) @ params["v"]).mean() * 1e-6

    params = {"w": normal(0, (8, 8)), "v": normal(1, (8, 4)), "name": "net", "count": 3}
    report = compare(loss, params, normal(2, (4, 8)), of="grad")
    assert set(report.errors) == {"v", "w"} and not report.is_fine
    mend = next(mend for mend in report.mends if mend.change.startswith("scale=2**"))
    assert mend.error < 0.01 and mend.removes > 0.9
    assert compare(loss, params, normal(2, (4, 8)), of="grad", scale=2.0**15).is_fine


@pytest.mark.parametrize("kind", ["scan", "while", "cond"])
def test_loops_and_branches_have_errors(kind):
    w = normal(0, (8, 8)) / 3

    def layer(c, _=None):
        return jnp.tanh(c @ w), (c * 2).sum()

    fn = {
        "scan": lambda x: jax.lax.scan(layer, x, None, length=4)[0],
        "while": lambda x: jax.lax.while_loop(lambda s: s[0] < 4, lambda s: (s[0] + 1, layer(s[1])[0]), (0, x))[1],
        "cond": lambda x: jax.lax.cond(x[0, 0] > -99, lambda x: layer(x)[0], lambda x: x, x),
    }[kind]
    x = normal(1, (4, 8))
    report = compare(fn, x)
    assert 1e-5 < report.error < 1e-2 and report.is_fine
    if kind == "scan":
        assert [at for at, _, _ in row(report, "tanh").iterations] == [(0,), (1,), (2,), (3,)]
        assert row(report, "tanh").iterations[-1][2] == pytest.approx(report.error)


def test_keys_are_shared_and_callbacks_run_once():
    calls = []

    def fn(x, key, activation, width=8):
        y = activation(x @ jnp.ones((width, width)))
        y = y * jax.random.bernoulli(key, 0.5, y.shape)
        shape = jax.ShapeDtypeStruct(y.shape, y.dtype)
        return jax.pure_callback(lambda a: calls.append(1) or np.asarray(a), shape, y), jnp.argmax(y, 1), y.sum() * 1j

    report = compare(fn, normal(0, (4, 8)), jax.random.key(0), jnp.tanh)
    assert not report.is_off and len(report.unfollowed) == len(calls) == 1


def test_what_is_not_finite_in_float32_too_is_no_error():
    x = np.array(normal(0, (3, 8, 8)))
    x[:, 0, 0] = np.nan, np.inf, -np.inf
    assert compare(lambda x: jax.nn.softmax(jnp.where(x > 9, -jnp.inf, x @ x)), x).is_fine
    assert compare(lambda x: (x @ x.T, x[:, :0]), x[0, :0]).is_fine


def test_bodies_of_reductions_become_float32():
    def fn(x):
        h = (x @ x).astype(F16)
        return jax.lax.reduce(h, F16(0), lambda a, b: a + b * F16(1), (0,)), jnp.zeros(8, F16).at[:3].add(h[0, :3])

    report = compare(fn, normal(0, (8, 8)))
    assert report.is_fine and 0 < report.error < 0.01 and row(report, "reduce").own > 0


def test_float32_products_of_accelerators_are_not_tf32():
    for asked, found in ((None, "HIGHEST"), (jax.lax.Precision.HIGH, "HIGH")):
        (eqn,) = jax.make_jaxpr(lambda x: jax.lax.dot(x, x, precision=asked))(jnp.ones((4, 4))).eqns  # noqa: B023
        (wide,) = jax.make_jaxpr(lambda x: evaluate(eqn, [x, x], "cuda"))(jnp.ones((4, 4))).eqns  # noqa: B023
        assert [one.name for one in wide.params["precision"]] == [found, found]


def test_devices_are_summed():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = P("data")
    layer = lambda x: jnp.tanh(x.astype(F16))  # noqa: E731
    fn = jax.shard_map(lambda x: jax.lax.psum(layer(x).sum(), "data"), mesh=mesh, in_specs=spec, out_specs=P())
    x = normal(0, (64, 8))
    report = compare(fn, x, dtype=None)
    exact = np.tanh(np.asarray(x, np.float64)).sum()
    assert report.error == pytest.approx(abs(float(fn(x)) - exact) / abs(exact), rel=1e-2) and report.error > 0
    inside = row(report, "tanh")
    outside = row(compare(layer, x, dtype=None), "tanh")
    assert (inside.own, inside.accumulated) == pytest.approx((outside.own, outside.accumulated), rel=1e-5)


def test_page_escapes_names(tmp_path):
    compare(jax.named_call(jnp.dot, name="<b>"), X, X).to_html(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "&lt;b&gt;" in text and "<b>" not in text and "dot_general" in text


X = np.ones((4, 4), np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compare(lambda x: "a", X, dtype=None), "<lambda> returns a str; give a function that returns arrays"),
        (lambda: compare(3, X), "compare takes a function and its arguments, got 3"),
        (lambda: compare(jnp.dot, X, X, of="both"), "of must be 'value' or 'grad', got 'both'"),
        (lambda: compare(jnp.dot, X, X, of="grad"), r"a function that returns a float scalar, got \(4, 4\)"),
        (lambda: compare(lambda: X, of="grad"), "got no arguments"),
        (lambda: compare(lambda n, x: n * x.sum(), 3, X, of="grad"), "first argument has no floating-point array"),
        (lambda: compare(jnp.dot, X, X, scale=4.0), "scale=4.0 is the loss scale of gradients; leave it out"),
        (lambda: compare(jnp.dot, X, X, dtype=None, level="zzz"), "are options of autocast; leave them out"),
        (lambda: compare(jnp.dot, X, X, scale=0.0), "scale must be a positive number, got 0.0"),
        (lambda: compare(jnp.dot, X, X, dtype="fp8"), "dtype must be float16 or bfloat16, got 'fp8'"),
        (lambda: compare(jnp.dot, X, jax.ShapeDtypeStruct((4, 4), X.dtype)), "it takes arrays, got a jax.ShapeDtype"),
        (lambda: compare(lambda x: (x, "a"), X), r"returns a str at \[1\]"),
        (lambda: compare(jnp.dot, X, X, names=("a",)), "one name for each of the 2 arguments"),
        (lambda: compare(jnp.dot, X, X, keep_float32="^/no$"), "matches the path of no operation"),
    ],
)
def test_mistakes_are_one_line(call, message):
    with pytest.raises((TypeError, ValueError), match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), [("ResNet", "fp16"), ("transformer", "bf16")])
def test_gradients_of_healthy_networks_are_fine(name, dtype):
    cases = pytest.importorskip("tests.numerics.cases")
    case = cases.CASES[name]()
    loss = case.loss(cases.F32)
    fn, args = lambda params, batch: loss(params, batch, 1.0), (case.params, case.batch)
    report = compare(fn, *args, dtype=dtype, of="grad", scale=2.0**10)
    assert report.is_fine and not report.mends, str(report)
    assert first_nonfinite(autocast(fn), *args).hidden == ()


def test_long_comparison_is_announced(capsys, monkeypatch):
    monkeypatch.setattr(running, "_SHORT", 0.2)
    for shapes in (1, 1, 1), (1, 2, 2):  # a slice and a tanh for each shape
        compare(lambda x, shapes=shapes: [jnp.tanh(x[:n]) for n in shapes], F16([1, 2, 3]), dtype=None)
    assert capsys.readouterr().err == "compare: compiling 4 operations takes about 0 s of CPU time\n"


def test_long_comparison_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(running, "_BETWEEN", 0.0)
    compare(lambda x: x @ x @ x, 1000 * X)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" at most ")[0] for line in lines[:2]] == ["compare: 1 of", "compare: 2 of"]
    assert lines[-1] == "compare: trying dtype='bfloat16'"


def test_scope_of_an_overflow_reaches_to_where_values_fit():
    def direction(x, w):
        y = (x * 1e5) @ w  # the product reads 1e5 in half
        return y / jnp.sqrt(jnp.square(y).sum(-1, keepdims=True))

    report = compare(direction, X, jnp.eye(X.shape[1]))
    assert not report.is_fine and "mul at" in report.advice[-1]
    assert "wrap it, and what reads it until its values fit again, in a jax.named_scope" in report.advice[-1]


def test_flipped_comparisons_of_a_healthy_network_are_explained():
    """Small networks with ReLUs: a rounding changes the derivative of a few elements by 1."""
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(256, 32)).astype(np.float32), rng.integers(0, 8, 256)
    weights = [rng.normal(size=shape, scale=shape[0] ** -0.5).astype(np.float32) for shape in ((32, 64), (64, 8))]

    def loss(weights, x):
        for w in weights[:-1]:
            x = jax.nn.relu(x @ w)
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ weights[-1]), labels[:, None], 1).mean()

    report = compare(loss, weights, x, dtype="bf16", of="grad", scale=2.0**10)
    assert report.is_fine and not report.advice, str(report)
    # The part that does not begin at selections is one of independent roundings.
    assert report.error**2 - report.of_selections**2 <= report.explained**2


def test_recomputed_operations_have_the_path_of_their_scope():
    """Operations of `jax.checkpoint`, and activations that autocast computes again for the backward pass."""

    def loss(w, x):
        with jax.named_scope("mlp"):
            x = jax.checkpoint(lambda x: jnp.tanh(x @ w))(x)
            y = jax.nn.gelu(x @ w + 1)
            with jax.named_scope("out"):
                y = y @ w
        return jnp.square(y).mean()

    report = compare(loss, normal(0, (8, 8)), normal(1, (8, 8)), of="grad")
    assert {r.path for r in report.rows if r.primitive} == {"mlp", "mlp/out", ""}
