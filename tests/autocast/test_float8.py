"""Products in float8: which, with what numbers, and that every transformation leaves them as they are."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from mixedres._internal.jax_compat import equations
from mixedres.autocast import Float8, PrecisionWarning, autocast, explain, transform
from mixedres.autocast.evaluation.float8_product import TOP, float8_product, quantize
from mixedres.autocast.float8 import GRADIENTS, VALUES

pytestmark = pytest.mark.filterwarnings("ignore:float8 is emulated")

EVERY = Float8(min_size=0)
BFLOAT16 = np.dtype(jnp.bfloat16)
KEYS = jax.random.split(jax.random.key(0), 6)
PARAMS = [
    jax.random.normal(KEYS[0], (16, 32)) / 4,
    jax.random.normal(KEYS[1], (32, 32)) / 5,
    jax.random.normal(KEYS[2], (32, 10)) / 5,
]
X, LABELS = jax.random.normal(KEYS[3], (24, 16)), jax.random.randint(KEYS[4], (24,), 0, 10)


def cross_entropy(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()


def loss(params, x, labels):
    for index, w in enumerate(params[:-1]):
        with jax.named_scope(f"layer{index}"):
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return cross_entropy(x @ params[-1], labels)


def reasons(fn, float8, *args):
    return [d.reason for d in explain(fn, float8)(*args).decisions if d.category == "allow"]


def formats(fn, *args):
    """The dtypes of the operands of all products."""
    found = [eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == "dot_general"]
    return [tuple(var.aval.dtype.name for var in eqn.invars) for eqn in found]


def error(found, exact):
    difference = sum(float(jnp.sum((a - b) ** 2)) for a, b in zip(found, exact, strict=True))
    return (difference / sum(float(jnp.sum(b**2)) for b in exact)) ** 0.5


def in_numpy(x, format):
    """(values, exponent of the scale), by the definition: the largest power of two that overflows nothing."""
    x = np.asarray(x, np.float64)
    largest, limit = np.abs(x).max(initial=0), float(ml_dtypes.finfo(format).max)
    shift = 0
    if 0 < largest < np.inf:
        shift = next(k for k in range(63, -64, -1) if largest * 2.0**k <= limit)
    return (x * 2.0**shift).astype(np.float32).astype(format).astype(np.float64) / 2.0**shift, shift


@pytest.mark.parametrize("format", TOP)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scale", [1e-15, 3e-4, 1.0, 7e3, 1e17])
def test_the_largest_power_of_two_that_overflows_nothing(format, dtype, scale):
    values = np.random.default_rng(0).standard_t(2, (37, 5)) * scale
    x = jnp.asarray(values, dtype)
    found = jax.jit(quantize, static_argnums=1)(x, format)
    expected, shift = in_numpy(x, format)
    assert int(found.log2_scale) == shift and found.array.dtype == jnp.dtype(format)
    np.testing.assert_array_equal(np.asarray(found.array, np.float64) / 2.0**shift, expected)
    np.testing.assert_array_equal(np.asarray(found.widened(BFLOAT16), np.float64), expected)


@pytest.mark.parametrize("format", TOP)
def test_every_edge_of_a_format(format):
    limit = float(ml_dtypes.finfo(format).max)
    for largest in (limit, np.nextafter(np.float32(limit), np.float32(np.inf)), limit * 0.999, 1.75, 1.7500001, 2.0):
        x = np.float32([largest, -largest / 3, 0.0])
        found, (expected, shift) = quantize(jnp.asarray(x), format), in_numpy(x, format)
        assert int(found.log2_scale) == shift
        np.testing.assert_array_equal(np.asarray(found.array, np.float64) / 2.0**shift, expected)
    for x in ([0.0, -0.0], [], [np.inf, 1.5], [np.nan, 1.5, -2.0], [1e-40, 0.0]):
        found = quantize(jnp.asarray(x, jnp.float32), format)
        assert int(found.log2_scale) in (0, 63)
        finite = np.isfinite(x)
        # What is not finite is not hidden; the rest is as it would be without a scale.
        np.testing.assert_array_equal(np.isfinite(np.asarray(found.array, np.float32)), finite)
        np.testing.assert_allclose(np.asarray(found.array, np.float32)[finite], np.float32(x)[finite], atol=1e-20)


SPECS = {
    "ij,jk->ik": ((6, 5), (5, 4)),
    "ji,jk->ik": ((5, 6), (5, 4)),
    "ij,kj->ik": ((6, 5), (4, 5)),
    "bij,bkj->bik": ((3, 6, 5), (3, 4, 5)),
    "bhqd,bkhd->bhqk": ((2, 3, 4, 5), (2, 6, 3, 5)),
    "xyz,zyw->xw": ((6, 5, 4), (4, 5, 7)),
    "xyz,yzw->wx": ((6, 5, 4), (5, 4, 7)),
    "abcd,cebd->aeb": ((2, 3, 4, 5), (4, 6, 3, 5)),
}


@pytest.mark.parametrize("spec", SPECS)
def test_a_product_and_its_gradients_are_those_of_the_rounded_values(spec):
    rng = np.random.default_rng(1)
    left, right = (jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in SPECS[spec])

    def product(left, right):
        return jnp.einsum(spec, left, right)

    (eqn,) = [eqn for eqn in equations(jax.make_jaxpr(product)(left, right)) if eqn.primitive.name == "dot_general"]
    operands = [left, right] if eqn.invars[0].aval.shape == left.shape else [right, left]

    @jax.jit
    def in_float8(*operands):
        quantized = [quantize(lax.stop_gradient(x), VALUES) for x in operands]
        return float8_product(eqn, BFLOAT16, BFLOAT16, operands, quantized)

    found, pullback = jax.vjp(in_float8, *operands)
    cotangent = jnp.asarray(rng.standard_normal(found.shape), jnp.bfloat16)
    exact = [in_numpy(x, VALUES)[0] for x in operands]
    with jax.enable_x64(True):
        params = {**eqn.params, "preferred_element_type": np.dtype(np.float64)}
        expected, exact_pullback = jax.vjp(
            lambda *xs: eqn.primitive.bind(*xs, **params), *(jnp.asarray(x) for x in exact)
        )
        expected_gradients = exact_pullback(jnp.asarray(in_numpy(cotangent, GRADIENTS)[0]))
        rounding = {"rtol": 2**-8, "atol": 1e-6}
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, **rounding)
        for gradient, wanted in zip(pullback(cotangent), expected_gradients, strict=True):
            assert gradient.dtype == jnp.float32
            np.testing.assert_allclose(np.asarray(gradient, np.float64), wanted, rtol=2**-7, atol=2e-2)


def test_which_products_a_network_has_in_float8():
    assert reasons(loss, EVERY, PARAMS, X, LABELS) == [
        "float8: e4m3 x e4m3",
        "float8: e4m3 x e4m3",
        "bfloat16: float32 ops read its float32 result",
    ]
    report = explain(loss, EVERY)(PARAMS, X, LABELS)
    assert report.summary().startswith("2 in float8 and 1 of 3 operations of the allow list")
    assert report.decisions[0].in_dtypes == (jnp.dtype(VALUES),) * 2 and report.decisions[0].out_dtypes == (BFLOAT16,)
    assert any("emulated on this device" in note for note in report.notes)
    assert report.to_json()["decisions"][0]["dtype"] == VALUES
    # By default these are too small.
    assert reasons(loss, "fp8", PARAMS, X, LABELS)[0] == (
        "bfloat16: 24 x 16 x 32 is too small to gain (size 7, below 350)"
    )
    assert formats(autocast(loss, "fp8"), PARAMS, X, LABELS) == formats(autocast(loss, "bf16"), PARAMS, X, LABELS)


def test_logits_and_routers_stay_bfloat16():
    def vocabulary(w, x, labels):
        # Larger than both operands: its float32 sums would cost memory.
        return cross_entropy(jnp.tanh(x @ w[:, :16]) @ w * 0.5 + 1.0, labels)

    w = jax.random.normal(KEYS[5], (16, 300))
    assert reasons(vocabulary, EVERY, w, X, LABELS) == [
        "float8: e4m3 x e4m3",
        "bfloat16: its result goes to a softmax or a logarithm",
    ]

    def routed(w, x):
        gate = jax.nn.softmax(x @ w[0][:, :3])
        experts = jnp.einsum("nd,edf->nef", x, jnp.stack([w[0]] * 3))
        return jnp.sum(jnp.tanh(jnp.einsum("ne,nef->nf", gate, experts) @ w[1]) ** 2)

    found = reasons(routed, EVERY, PARAMS, X)
    assert not found[0].startswith("float8") and found[1].startswith("float8")


def test_what_float32_reads_is_in_float8_between_products_alone():
    def regression(params, x):
        return jnp.mean((jax.nn.elu(x @ params[0]) @ params[1]) ** 2)  # of elu's exponential, in float32

    assert reasons(regression, EVERY, PARAMS, X) == [
        "float8: e4m3 x e4m3",
        "bfloat16: float32 ops read its float32 result",
    ]
    exact = jax.grad(regression)(PARAMS[:2], X)
    assert error(jax.jit(jax.grad(autocast(regression, EVERY)))(PARAMS[:2], X), exact) < 0.15


def test_gradients_have_the_format_with_more_range():
    assert formats(jax.grad(autocast(loss, EVERY)), PARAMS, X, LABELS) == [
        (VALUES, VALUES),
        (VALUES, VALUES),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        ("bfloat16", "bfloat16"),
        (GRADIENTS, VALUES),
        (GRADIENTS, VALUES),
        (GRADIENTS, VALUES),
        (GRADIENTS, VALUES),
    ]


TRANSFORMED = {
    "jit": lambda fn: jax.grad(jax.jit(fn)),
    "checkpoint": lambda fn: jax.grad(jax.checkpoint(fn)),
    "inside checkpoint": lambda fn: jax.grad(fn),
    "vmap": lambda fn: jax.grad(lambda p, x, y: jax.vmap(fn, (None, 0, 0))(p, x[:, None], y[:, None]).mean()),
    "scan": lambda fn: jax.grad(lambda p, x, y: lax.scan(lambda c, _: (c, fn(p, x, y)), 0, None, length=2)[1].mean()),
    "cond": lambda fn: jax.grad(lambda p, x, y: lax.cond(y[0] >= 0, lambda: fn(p, x, y), lambda: 0.0)),
}


@pytest.mark.parametrize("name", TRANSFORMED)
def test_transformations_compute_the_same(name):
    plain = jax.jit(jax.grad(autocast(loss, EVERY)))(PARAMS, X, LABELS)
    fn = autocast(jax.checkpoint(loss) if name == "inside checkpoint" else loss, EVERY)
    found = jax.jit(TRANSFORMED[name](fn))(PARAMS, X, LABELS)
    # The sums of the rows of a batch may be in another order.
    assert error(found, plain) < (2e-2 if name == "vmap" else 1e-5)
    assert 1e-3 < error(found, jax.grad(loss)(PARAMS, X, LABELS)) < 0.15


def test_second_derivatives_are_refused():
    def penalty(params):
        grads = jax.grad(autocast(loss, EVERY))(params, X, LABELS)
        return sum(jnp.sum(g**2) for g in grads)

    with pytest.raises(NotImplementedError, match="first derivatives alone; for second ones use bf16"):
        jax.grad(penalty)(PARAMS)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda p: autocast(loss, EVERY)(p, X, LABELS), (PARAMS,), (PARAMS,))


def test_a_scale_is_of_the_whole_batch_under_vmap():
    loud = X.at[0].multiply(100.0)

    def first(x):
        return jnp.tanh(jnp.tanh(x @ PARAMS[0]) @ PARAMS[1])

    together = jax.jit(autocast(first, EVERY))(loud)
    each = jax.jit(jax.vmap(autocast(first, EVERY)))(loud[:, None])[:, 0]
    np.testing.assert_array_equal(each, together)
    scalars = [
        eqn
        for eqn in equations(jax.make_jaxpr(jax.vmap(autocast(first, EVERY)))(loud[:, None]))
        if eqn.primitive.name == "bitcast_convert_type"
    ]
    assert scalars and all(eqn.outvars[0].aval.shape == () for eqn in scalars)


def test_a_sharded_step_has_a_scale_for_each_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"mesh": mesh, "in_specs": (P(), P("data"), P("data")), "out_specs": P()}

    def mean(params, x, labels):
        return lax.pmean(loss(params, x, labels), "data")

    outside = jax.grad(autocast(jax.shard_map(mean, **specs), EVERY))
    inside = jax.grad(jax.shard_map(lambda *args: lax.pmean(autocast(loss, EVERY)(*args), "data"), **specs))
    exact = jax.grad(loss)(PARAMS, X, LABELS)
    found = jax.jit(outside)(PARAMS, X, LABELS)
    assert error(found, jax.jit(inside)(PARAMS, X, LABELS)) < 1e-5
    assert 1e-3 < error(found, exact) < 0.15


def scanned(params, x, labels):
    @jax.checkpoint
    def block(h, w):
        with jax.named_scope("block"):
            return h + jnp.tanh(h @ w), None

    h, _ = lax.scan(block, x, params[0])
    return cross_entropy(h @ params[1], labels)


SCANNED = [jax.random.normal(KEYS[5], (3, 16, 16)) / 4, PARAMS[0][:, :10]]


@pytest.mark.parametrize("fn, params", [(loss, PARAMS), (jax.checkpoint(loss), PARAMS), (scanned, SCANNED)])
def test_a_program_that_differentiates_itself_has_the_same_products(fn, params):
    outside = jax.jit(jax.grad(autocast(fn, EVERY)))(params, X, LABELS)
    inside = jax.jit(autocast(jax.grad(fn), EVERY))(params, X, LABELS)
    # A gradient that is rounded elsewhere before may be rounded to the next of e5m2's numbers, which are far apart.
    assert error(inside, outside) < 0.05
    found = reasons(jax.grad(fn), EVERY, params, X, LABELS)
    assert "float8: e5m2 x e4m3" in found and "bfloat16: as the product whose gradient it is" in found
    assert not any("both operands" in reason for reason in found)


@jax.custom_vjp
def dense(x, w):
    return jnp.tanh(x @ w)


def _dense_fwd(x, w):
    y = dense(x, w)
    return y, (x, w, y)


def _dense_bwd(saved, g):
    x, w, y = saved
    g = g * (1 - y**2)
    return g @ w.T, x.T @ g


dense.defvjp(_dense_fwd, _dense_bwd)


@jax.custom_jvp
def dense_jvp(x, w):
    return jnp.tanh(x @ w)


@dense_jvp.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    y = dense_jvp(x, w)
    return y, (1 - y**2) * (dx @ w + x @ dw)


def test_functions_with_a_derivative_of_their_own():
    def by_vjp(params, x, labels):
        return cross_entropy(dense(dense(x, params[0]), params[1]) @ params[2], labels)

    def by_jvp(params, x, labels):
        return cross_entropy(dense_jvp(dense_jvp(x, params[0]), params[1]) @ params[2], labels)

    plain = jax.jit(jax.grad(autocast(loss, EVERY)))(PARAMS, X, LABELS)
    assert error(jax.jit(jax.grad(autocast(by_vjp, EVERY)))(PARAMS, X, LABELS), plain) < 0.05
    found = reasons(by_vjp, EVERY, PARAMS, X, LABELS)
    assert found[:3] == ["float8: e4m3 x e4m3", "float8: e5m2 x e4m3", "float8: e4m3 x e5m2"]
    # Products that JAX transposes later would multiply gradients in the wrong format.
    half = jax.jit(jax.grad(autocast(by_jvp, "bf16")))(PARAMS, X, LABELS)
    assert error(jax.jit(jax.grad(autocast(by_jvp, EVERY)))(PARAMS, X, LABELS), half) == 0
    assert "derivative rule of its own" in reasons(by_jvp, EVERY, PARAMS, X, LABELS)[0]


def test_the_backward_pass_keeps_a_byte_an_element():
    def saved(half):
        fn = autocast(loss, half)
        _, pullback = jax.eval_shape(lambda *args: jax.vjp(lambda p, x: fn(p, x, LABELS), *args), PARAMS, X)
        return {leaf.shape: leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback)}

    assert saved(EVERY)[16, 32] == saved(EVERY)[24, 16] == 1
    assert saved("bf16")[16, 32] == saved("bf16")[24, 16] == 2


def test_a_value_that_several_products_read_is_quantized_once():
    def attention(x):
        query, key, value = (jnp.tanh(x @ (PARAMS[0] * scale)) for scale in (1.0, 2.0, 3.0))
        return jnp.sum(jnp.tanh((query + key + value) @ PARAMS[1]) @ PARAMS[2] ** 2)

    quantized = [
        eqn
        for eqn in equations(jax.make_jaxpr(autocast(attention, EVERY))(X))
        if eqn.primitive.name == "convert_element_type" and eqn.outvars[0].aval.dtype == jnp.dtype(VALUES)
    ]
    assert [eqn.outvars[0].aval.shape for eqn in quantized].count(X.shape) == 1


def test_products_that_stay_bfloat16_by_their_path():
    kept = Float8(min_size=0, keep_bfloat16="^/layer1$")
    for fn in (loss, jax.grad(loss)):
        found = {d.path: d.dtype.name for d in explain(fn, kept)(PARAMS, X, LABELS).decisions if d.category == "allow"}
        assert {dtype for path, dtype in found.items() if "layer1" in path} == {"bfloat16"}
        assert {dtype for path, dtype in found.items() if "layer0" in path} <= {VALUES, GRADIENTS}
    with pytest.raises(ValueError, match=r"keep_bfloat16='decoder' matches the path of no product; .*layer1"):
        autocast(loss, Float8(keep_bfloat16="decoder"))(PARAMS, X, LABELS)
    # What stays in float32 is not in float8 either.
    assert reasons(loss, EVERY, PARAMS, X, LABELS) != []
    report = explain(loss, EVERY, keep_float32="^/layer0$")(PARAMS, X, LABELS)
    assert [d.dtype.name for d in report.decisions if d.primitive == "dot_general"] == ["float32", VALUES, "bfloat16"]


@pytest.mark.parametrize(
    "options", [{"level": "allow_only"}, {"level": "infer_as_deny"}, {"lists": {"deny": {"tanh"}}}]
)
def test_levels_and_lists_are_those_of_bfloat16(options):
    float8, half = (explain(loss, dtype, **options)(PARAMS, X, LABELS).decisions for dtype in (EVERY, "bf16"))
    assert [d.dtype.name for d in float8 if d.category == "allow"] == [VALUES, VALUES, "bfloat16"]
    others = [[d for d in decisions if d.category != "allow"] for decisions in (float8, half)]
    assert others[0] == others[1]
    exact = jax.grad(loss)(PARAMS, X, LABELS)
    assert error(jax.jit(jax.grad(autocast(loss, EVERY, **options)))(PARAMS, X, LABELS), exact) < 0.15
    # A product that is taken off the list is in neither.
    report = explain(loss, EVERY, {"deny": {"dot_general"}})(PARAMS, X, LABELS)
    assert {d.dtype.name for d in report.decisions if d.primitive == "dot_general"} == {"float32"}


def convolved(w, x):
    for kernel in w:
        x = jnp.tanh(lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))
    return jnp.sum(x @ PARAMS[0])


def test_convolutions_are_in_float8_where_asked():
    w = [jax.random.normal(key, (3, 3, 16, 16)) / 12 for key in KEYS[:2]]
    x = jax.random.normal(KEYS[3], (2, 5, 5, 16))
    assert reasons(convolved, EVERY, w, x)[0] == "bfloat16: a convolution; Float8(convolutions=True) takes those, too"
    both = Float8(min_size=0, convolutions=True)
    assert reasons(convolved, both, w, x)[:2] == ["float8: e4m3 x e4m3"] * 2
    exact = jax.grad(convolved)(w, x)
    half = error(jax.jit(jax.grad(autocast(convolved, "bf16")))(w, x), exact)
    found = jax.jit(jax.grad(autocast(convolved, both)))(w, x)
    assert half < error(found, exact) < 0.15
    # A program that differentiates itself has them in the forward pass alone.
    inside = reasons(jax.grad(convolved), both, w, x)
    assert "bfloat16: a convolution with a gradient" in inside
    assert error(jax.jit(autocast(jax.grad(convolved), both))(w, x), exact) < 0.15


def test_what_float8_leaves_alone():
    x = X.astype(VALUES)

    def given(x, y):
        return lax.dot_general(x, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32) + y

    y = jnp.ones((24, 24))
    found = autocast(given, EVERY)(x, y)
    np.testing.assert_array_equal(found, given(x, y))
    assert "left as they are" in reasons(given, EVERY, x, y)[0]
    assert autocast(lambda x: x + 1, EVERY)(X).dtype == jnp.float32
    # Not finite before, not finite after.
    infinite = jax.jit(autocast(loss, EVERY))(PARAMS, X.at[0, 0].set(jnp.inf), LABELS)
    assert not jnp.isfinite(infinite)


def test_symbolic_shapes():
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct(p.shape, p.dtype) for p in PARAMS], jax.ShapeDtypeStruct((batch, 16), jnp.float32)

    def network(params, x):
        return jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) @ params[2]

    exported = jax.export.export(jax.jit(autocast(network, EVERY)))(*shapes)
    np.testing.assert_allclose(exported.call(PARAMS, X), jax.jit(autocast(network, EVERY))(PARAMS, X), rtol=1e-5)
    assert "float8" in reasons(network, Float8(min_size=10), *shapes)[1]


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Float8(min_size=-1), "min_size must be a number >= 0"),
        (lambda: Float8(min_size=float("nan")), "min_size must be a number >= 0"),
        (lambda: Float8(min_size="large"), "min_size must be a number >= 0"),
        (lambda: Float8(keep_bfloat16="("), "keep_bfloat16='\\(' is not a regular expression"),
        (lambda: autocast(loss, jnp.float8_e4m3fn), 'float8_e4m3fn; for products in float8 write "fp8"'),
        (lambda: autocast(loss, "float8"), "'float8'; for products in float8 write"),
        (lambda: autocast(loss, "fp8", {"allow": {"tanh"}}), "lists allow 'tanh', and float8 is for products"),
    ],
)
def test_mistakes(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_jax_without_the_formats(monkeypatch):
    monkeypatch.delattr(jnp, GRADIENTS)
    with pytest.raises(NotImplementedError, match=r"lacks jnp\.float8_e5m2; upgrade jax and jaxlib, or use bf16"):
        autocast(loss, "fp8")


@pytest.mark.filterwarnings("default:float8 is emulated")
def test_a_device_without_float8_units_is_told_of_once(monkeypatch):
    monkeypatch.setattr(transform, "_told", set())
    with pytest.warns(PrecisionWarning, match="emulated on this device") as told:
        for _ in range(2):
            autocast(loss, EVERY)(PARAMS, X, LABELS)
    assert len(told) == 1
    # Nothing is said where nothing is in float8.
    monkeypatch.setattr(transform, "_told", set())
    autocast(loss, "fp8")(PARAMS, X, LABELS)
    assert not transform._told


@pytest.mark.parametrize(
    "capability, told", [("8.9", False), ("9.0", False), ("10.0", False), ("8.0", True), ("gfx942", True), (None, True)]
)
def test_which_devices_emulate(monkeypatch, capability, told):
    class Device:
        device_kind = "made up"

    if capability is not None:
        Device.compute_capability = capability
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    notes = explain(loss, EVERY)(PARAMS, X, LABELS).notes
    assert any("emulated on this device (made up)" in note for note in notes) == told


def test_a_training_step_keeps_float32_weights():
    import optax

    from mixedres import precision

    fn, tx = precision.enable_rewrite(loss, optax.adam(1e-2), EVERY)
    params, state = PARAMS, tx.init(PARAMS)
    assert not hasattr(state.loss_scale, "period")

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(fn)(params, X, LABELS)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    values = []
    for _ in range(60):
        params, state, value = step(params, state)
        values.append(float(value))
    assert all(p.dtype == jnp.float32 for p in params)
    assert values[-1] < 0.2 * values[0]


@pytest.mark.parametrize("loss_scale", ["dynamic", 128.0])
def test_a_loss_scale_is_needless(loss_scale):
    import optax

    from mixedres import precision

    with pytest.warns(PrecisionWarning, match="is needless in float8"):
        precision.enable_rewrite(loss, optax.sgd(0.1), "fp8", loss_scale=loss_scale)
    # Names of presets are dtypes here, too.
    assert precision.enable_rewrite(loss, optax.sgd(0.1), "fp16").tx.init(PARAMS).loss_scale.loss_scale > 1
