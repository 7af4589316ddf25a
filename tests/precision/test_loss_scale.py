"""The rule of the loss scales, their arithmetic, and what they refuse."""

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from mixedres.precision import DynamicLossScale, NoOpLossScale, StaticLossScale, make_loss_scale


@jax.jit
def scanned(loss_scale, verdicts):
    """The same history out of `adjust`, inside one compiled loop."""

    def body(x, finite):
        x = x.adjust(finite)
        return x, (x.loss_scale, x.counter, x.consecutive_skipped, x.total_skipped)

    return jax.lax.scan(body, loss_scale, verdicts)[1]


def test_defaults_equal_tensorflow_except_the_minimum():
    scale = DynamicLossScale()
    assert (scale.loss_scale, scale.period, scale.factor) == (32768, 2000, 2)
    assert (scale.min_loss_scale, scale.max_loss_scale) == (2.0**-14, 16777216)
    assert scale.counter == scale.consecutive_skipped == scale.total_skipped == 0


@pytest.mark.parametrize("make", [NoOpLossScale, lambda: StaticLossScale(96.0)], ids=["none", "static"])
def test_constant_scale_only_counts(make):
    scale = make()
    before = float(scale.loss_scale)
    history = []
    for finite in (True, False, jnp.asarray(False), np.bool_(True), False):
        scale = scale.adjust(finite)
        history.append((int(scale.consecutive_skipped), int(scale.total_skipped)))
    assert history == [(0, 0), (1, 1), (2, 2), (0, 2), (1, 3)] and float(scale.loss_scale) == before


@pytest.mark.parametrize("scale", [DynamicLossScale(), StaticLossScale(2.0**15)], ids=["dynamic", "static"])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_halves_come_back_in_float32(scale, dtype):
    loss = jnp.asarray(60000.0, dtype)
    scaled, unscaled = scale.scale(loss), scale.unscale(loss)
    assert scaled.dtype == unscaled.dtype == jnp.float32
    assert float(scaled) == float(loss) * 2.0**15  # in float16 this would be infinite
    assert float(unscaled) == float(loss) / 2.0**15
    # Without x64, a NumPy float64 is a float32 to jax.
    assert scale.scale(np.float64(3.0)).dtype == jnp.float32


@pytest.mark.parametrize(
    "scale", [DynamicLossScale(), StaticLossScale(24.0), NoOpLossScale()], ids=["dynamic", "static", "none"]
)
def test_integer_leaves_are_not_scaled(scale):
    key = jax.random.key(7)
    tree = {"n": jnp.arange(3), "b": np.array([True, False]), "i": 5, "none": None, "key": key}
    tree["u8"] = np.arange(4, dtype=np.uint8)
    for result in (scale.scale(tree), scale.unscale(tree)):
        assert all(result[name] is tree[name] for name in tree)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_negative_zero_keeps_the_sign(dtype):
    zeros = jnp.asarray([-0.0, 0.0], dtype)
    for scale in (DynamicLossScale(), StaticLossScale(3.0), NoOpLossScale()):
        for result in (scale.scale(zeros), scale.unscale(zeros)):
            assert np.signbit(result).tolist() == [True, False]


def test_noop_scale_widens_half_gradients():
    half = jnp.asarray([1.5, 6e-8], jnp.float16)
    tree = {"half": half, "single": jnp.ones(2)}
    assert NoOpLossScale().scale(tree) is tree
    unscaled = NoOpLossScale().unscale(tree)
    assert unscaled["half"].dtype == unscaled["single"].dtype == jnp.float32
    np.testing.assert_array_equal(unscaled["half"], np.float32(half))


def short(x):
    return repr(x)[:8]


BAD_NUMBERS = [0, -1, float("nan"), float("inf"), "abc", "128", True, None, 1e-60, 1e60, 10**400]


@pytest.mark.parametrize("bad", BAD_NUMBERS, ids=short)
def test_invalid_scale_is_refused(bad):
    for make in (StaticLossScale, lambda x: DynamicLossScale(loss_scale=x)):
        with pytest.raises(ValueError, match="loss_scale") as error:
            make(bad)
        assert repr(bad) in str(error.value)


# Above 1, but 1 as a float32, the factor would never move the scale.
OUT_OF_RANGE = {
    "factor": (1, 0.5, float("nan"), 1 + 1e-9),
    "period": (0, 1.5, -3, 2**31, 3e9, "3"),
    "min_loss_scale": (2.0**16, 0.0),
    "max_loss_scale": (2.0**14, float("inf")),
    "loss_scale": (2.0**-15,),
}


@pytest.mark.parametrize(("name", "bad"), [(name, bad) for name, values in OUT_OF_RANGE.items() for bad in values])
def test_dynamic_scale_out_of_range(name, bad):
    with pytest.raises(ValueError, match=name):
        DynamicLossScale(**{name: bad})


@pytest.mark.parametrize("spec", [128, 128.0, "128", np.float32(128), np.int64(128), "1.28e2"])
def test_number_makes_a_static_scale(spec):
    scale = make_loss_scale(spec)
    assert isinstance(scale, StaticLossScale) and scale.loss_scale == 128


def test_specs_by_name():
    """They are loss scales of jmp as well."""
    scale = make_loss_scale("dynamic", loss_scale=4.0, period=7, max_loss_scale=8.0)
    kinds = [(make_loss_scale("none"), NoOpLossScale), (make_loss_scale(2), StaticLossScale), (scale, DynamicLossScale)]
    for made, kind in kinds:
        assert isinstance(made, kind) and isinstance(made, getattr(jmp, kind.__name__))
    assert (scale.loss_scale, scale.period, scale.max_loss_scale) == (4, 7, 8)
    for made in (NoOpLossScale(), StaticLossScale(4.0), DynamicLossScale()):
        assert make_loss_scale(made) is made


OTHERS = ["Dynamic", "", [128], object, b"8"]


@pytest.mark.parametrize("spec", [x for x in BAD_NUMBERS if x != "128"] + OTHERS, ids=short)
def test_invalid_spec_is_refused(spec):
    with pytest.raises(ValueError, match="'none', 'dynamic' or a number > 0") as error:
        make_loss_scale(spec)
    assert repr(spec) in str(error.value)
