"""Convolutions in the forms for oneDNN, against float64, and when the commands use them."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import autocast, models
from mixedres._internal import jax_compat
from mixedres.config import parse_flags
from mixedres.models import compiler_options, create, for_platform, operations
from mixedres.precision import get
from tests.train import run_cases
from tests.train.run_cases import build

needs_bfloat16 = pytest.mark.skipif(
    not (models.onednn.is_faster(jnp.bfloat16, 2**24) and models.onednn.multiplies(jnp.bfloat16)),
    reason="needs JAX 0.11 and a processor that multiplies bfloat16",
)
# (map, size and filters, stride, padding): odd and even maps, TensorFlow's padding, maps smaller than the kernel,
# images of three colors.
CASES = [
    ((2, 7, 6, 16), (3, 5), 1, ((1, 1), (1, 1))),
    ((2, 7, 6, 16), (3, 5), 2, ((1, 1), (1, 1))),
    ((2, 8, 8, 16), (3, 5), 2, ((0, 1), (0, 1))),
    ((3, 2, 2, 32), (3, 16), 1, ((1, 1), (1, 1))),
    ((3, 4, 3, 32), (3, 16), 2, ((1, 1), (1, 1))),
    ((2, 13, 12, 3), (7, 8), 2, ((3, 3), (3, 3))),
]


def xla_convolution(x, kernel, stride, around, precision):
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (stride,) * 2, around, dimension_numbers=layout, precision=precision)


def operands(x_shape, kernel, stride, around, dtype):
    """Map, kernel and cotangent, of numbers that bfloat16 holds."""
    rng = np.random.default_rng(0)
    size, filters = kernel
    x, k = (rng.normal(size=shape) for shape in (x_shape, (size, size, x_shape[3], filters)))
    y = jax.eval_shape(lambda: xla_convolution(x, k, stride, around, None))
    return [each.astype(jnp.bfloat16).astype(dtype) for each in (x, k, rng.normal(size=y.shape))]


@partial(jax.jit, static_argnums=(0, 4, 5))
def results(convolution, x, k, dy, stride, around):
    y, pull = jax.vjp(lambda x, k: convolution(x, k, stride, around, None), x, k)
    return y, *pull(dy)


with_options = jax.jit(results.__wrapped__, static_argnums=(0, 4, 5), compiler_options=models.onednn.COMPILER_OPTIONS)


@cache
def exact(case):
    """Results and gradients of XLA's convolution in float64."""
    with jax.enable_x64(True):
        return [np.asarray(each) for each in results(xla_convolution, *operands(*case, np.float64), *case[2:])]


@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_equal_those_of_xla_in_float64(case):
    with jax.enable_x64(True):
        found = results(models.onednn.convolution, *operands(*case, np.float64), *case[2:])
        for own, xla in zip(found, exact(case), strict=True):
            np.testing.assert_allclose(own, xla, rtol=0, atol=1e-12 * np.abs(xla).max())


@pytest.mark.parametrize("case", CASES[1:5:3])
def test_gradients_of_gradients_equal_those_of_xla(case):
    def second(convolution, x, k, dy):
        def norm(x, k):
            first = results.__wrapped__(lambda *args: jnp.sin(convolution(*args)), x, k, dy, *case[2:])
            return sum(jnp.sum(jnp.square(each)) for each in first)

        return jax.jit(jax.grad(norm, (0, 1)))(x, k)

    with jax.enable_x64(True):
        given = operands(*case, jnp.float64)
        for own, xla in zip(second(models.onednn.convolution, *given), second(xla_convolution, *given), strict=True):
            np.testing.assert_allclose(own, xla, rtol=0, atol=1e-11 * np.abs(xla).max())


def test_gradient_of_a_small_map_is_a_product():
    """XLA's convolution of so few pixels would take 50 times as long."""
    x, k, dy = operands(*CASES[3], np.float32)
    backward = jax.vjp(lambda x: models.onednn.convolution(x, k, *CASES[3][2:], None), x)[1]
    assert "conv_general_dilated" not in str(jax.make_jaxpr(backward)(dy))


def rewritten(x, kernel, stride, around, precision):
    """A float32 convolution that a graph rewrite computes in bfloat16."""
    return autocast(lambda x, kernel: models.onednn.convolution(x, kernel, stride, around, precision), jnp.bfloat16)(
        x, kernel
    )


@needs_bfloat16
@pytest.mark.parametrize(
    ("convolution", "dtype", "case"),
    [
        *((models.onednn.convolution, jnp.bfloat16, case) for case in CASES),
        *((rewritten, np.float32, case) for case in CASES[1:4:2]),
    ],
)
def test_bfloat16_results_and_gradients_are_rounded_once(convolution, dtype, case):
    found = with_options(convolution, *operands(*case, dtype), *case[2:])
    for own, wide in zip(found, exact(case), strict=True):
        # One rounding is 0.4 to 0.46 of this on average.
        assert np.linalg.norm(np.asarray(own, np.float64) - wide) < 0.6 * 2**-8 * np.linalg.norm(wide)


@needs_bfloat16
def test_onednn_computes_every_convolution_of_a_step():
    x = jax.ShapeDtypeStruct((64, 8, 8, 16), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((3, 3, 16, 16), jnp.bfloat16)

    def text(convolution):
        return with_options.lower(convolution, x, k, x, 1, ((1, 1), (1, 1))).compile().as_text()

    own = text(models.onednn.convolution)
    assert (own.count("__onednn$convolution"), own.count("__onednn$matmul")) == (2, 1)
    assert " convolution(" not in own and " dot(" not in own
    assert "f32[64,8,8,16]" in text(xla_convolution)  # the reason for forms of our own


@needs_bfloat16
def test_onednn_computes_the_gradient_of_a_rewritten_convolution():
    x, k = jax.ShapeDtypeStruct((32, 8, 8, 16), np.float32), jax.ShapeDtypeStruct((3, 3, 16, 16), np.float32)

    def text(product_dtype):
        form = partial(operations.convolution, stride=1, use_onednn=True, product_dtype=product_dtype)
        gradient = jax.grad(lambda x, k: jnp.square(autocast(form, jnp.bfloat16)(x, k)).sum(), (0, 1))
        return jax.jit(gradient, compiler_options=models.onednn.COMPILER_OPTIONS).lower(x, k).compile().as_text()

    assert " convolution(" not in text(jnp.bfloat16)
    # The gradient of the kernel is a product only if the dtype is named.
    assert [text(dtype).count("__onednn$convolution") for dtype in (jnp.bfloat16, None)] == [2, 3]


@pytest.mark.skipif(not models.onednn.is_faster(jnp.float32, 2**24), reason="needs JAX 0.11 and oneDNN")
@pytest.mark.parametrize("preset, dtype", [("fp16", jnp.float16), ("bf16", jnp.bfloat16)])
def test_halves_are_computed_in_float32_by_onednn_and_rounded(preset, dtype, monkeypatch):
    monkeypatch.setattr(models.onednn, "_instructions", lambda: frozenset({"avx2"}))
    model = create("cifar_resnet8", num_classes=2, **get(preset).network_options).clone(use_onednn=True)
    rng = np.random.default_rng(0)
    x, k = (jnp.asarray(rng.normal(size=shape), dtype) for shape in ((32, 8, 8, 16), (3, 3, 16, 16)))

    def two(x, k, use_onednn):
        y = operations.convolution(jnp.tanh(operations.convolution(x, k, 1, use_onednn=use_onednn)), k, 1)
        return y.astype(jnp.float32)

    compiled = (
        jax.jit(two, static_argnums=2, compiler_options=compiler_options(model, "cpu")).lower(x, k, True).compile()
    )
    assert compiled.as_text().count("__onednn$convolution") >= 1
    found, plain = np.asarray(compiled(x, k)), np.asarray(jax.jit(two, static_argnums=2)(x, k, False))
    np.testing.assert_array_equal(found, found.astype(dtype).astype(np.float32))  # XLA leaves no rounding out
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(found, plain, rtol=tolerance, atol=tolerance)


@pytest.mark.skipif(not models.onednn.is_faster(jnp.float32, 2**24), reason="needs JAX 0.11 and oneDNN")
def test_gradient_of_a_strided_float32_map_is_no_dilated_convolution():
    """XLA computes a dilated one in a loop of its own."""
    x, k = jax.ShapeDtypeStruct((2, 8, 8, 16), np.float32), jax.ShapeDtypeStruct((3, 3, 16, 16), np.float32)

    def text(use_onednn):
        gradient = jax.grad(lambda x, k: jnp.square(operations.convolution(x, k, 2, use_onednn=use_onednn)).sum())
        return jax.jit(gradient, compiler_options=models.onednn.COMPILER_OPTIONS).lower(x, k).compile().as_text()

    assert "lhs_dilate" in text(False) and "lhs_dilate" not in text(True)


NATIVE, WITH_AVX512, PLAIN = ({"avx2", "avx512f", "avx512_bf16"}, {"avx2", "avx512f"}, {"avx2"})


@pytest.mark.parametrize(
    "instructions, with_onednn, rounded",
    [
        (NATIVE, {"fp32", "bf16", "fp16", "bf16_rewrite"}, {"fp16"}),
        (WITH_AVX512, {"fp32", "bf16", "fp16"}, {"fp32", "bf16", "fp16"}),
        (PLAIN, {"fp32", "bf16", "fp16", "bf16_rewrite", "fp16_rewrite"}, {"fp32", "bf16", "fp16"}),
    ],
)
def test_commands_use_onednn_where_it_was_measured_to_be_faster(instructions, with_onednn, rounded, monkeypatch):
    monkeypatch.setattr(models.onednn, "_instructions", lambda: frozenset(instructions))
    monkeypatch.setattr(models.onednn, "knows_options", lambda *options: True)
    monkeypatch.setattr(models.onednn.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(models.onednn, "_FIRST_JAX", (0, 1))
    presets = {name: get(name) for name in ("fp32", "bf16", "fp16", "bf16_rewrite", "fp16_rewrite")}
    networks = {name: create("resnet18", num_classes=2, **preset.network_options) for name, preset in presets.items()}
    dtypes = {name: preset.policy.compute_dtype for name, preset in presets.items()}
    found = {name: for_platform(networks[name], "cpu", dtypes[name], 2**24) for name in presets}
    assert {name for name, model in found.items() if model.use_onednn} == with_onednn
    rewritten_to = {name: dtypes[name] for name in presets if "rewrite" in name}
    assert {name: model.product_dtype for name, model in found.items() if model.product_dtype} == rewritten_to
    for name in with_onednn:
        keeps = compiler_options(found[name], "cpu").get("xla_allow_excess_precision") is False
        # The network of a graph rewrite is one in float32.
        assert keeps == (("fp32" if "rewrite" in name else name) in rounded)
    assert models.onednn.COMPILER_OPTIONS.items() <= compiler_options(found["bf16"], "cpu").items()
    assert not for_platform(found["bf16"], "gpu", jnp.float32, 2**24).use_onednn  # a network that a CPU has built
    assert not compiler_options(found["bf16"], "gpu") and not compiler_options(networks["bf16"], "cpu")


def test_onednn_needs_many_pixels_a_dtype_it_knows_and_a_new_jax(monkeypatch):
    monkeypatch.setattr(models.onednn, "knows_options", lambda *options: True)
    monkeypatch.setattr(models.onednn.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(models.onednn, "_FIRST_JAX", (0, 1))
    dtypes = {jnp.bfloat16: True, jnp.float32: True, jnp.float16: True, jnp.float64: False}
    assert {dtype: models.onednn.is_faster(dtype, 2**24) for dtype in dtypes} == dtypes
    assert not models.onednn.is_faster(jnp.bfloat16, 2**24 - 1)
    monkeypatch.setattr(models.onednn, "_FIRST_JAX", (99,))
    assert not models.onednn.is_faster(jnp.float32, 2**24)


def test_option_that_xla_does_not_have_is_no_error(monkeypatch):
    monkeypatch.setattr(jax_compat, "_SOUND", {"xla_cpu_no_such_option": True})
    assert jax_compat.sound_options("cpu") == {}


def test_microbatches_are_computed_without_onednn(monkeypatch):
    """In a loop, a step with oneDNN takes ten times as long as without."""
    run_cases.shrink(monkeypatch)
    monkeypatch.setattr(models.onednn, "is_faster", lambda dtype, pixels: pixels > 0)
    for parts in (1, 2):
        flags = ["--config=configs/digits.py:fp32", "--config.num_devices=1", f"--config.microbatches={parts}"]
        experiment = build(parse_flags(flags).config)
        assert experiment.model.use_onednn == (parts == 1)
        assert experiment.in_precision(get("bf16")).model.use_onednn == (parts == 1)
