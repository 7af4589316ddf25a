"""Networks as other converters see them: one platform's form, and the same numbers in ONNX files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mixedres import models, precision
from mixedres._internal import jax_compat


def network(name, preset, **options):
    """A network with fixed random weights, as a function of images; logits are float32."""
    chosen = precision.get(preset)
    model = models.create(name, num_classes=10, head_init="he_normal", **chosen.network_options | options)
    variables = jax.jit(model.init)(jax.random.key(0), jnp.zeros((1, 32, 32, 3)))
    rewritten = chosen.rewrite(model.apply)
    return lambda images: rewritten(variables, images, train=False).astype(jnp.float32)


@pytest.mark.parametrize("preset", ["fp32", "fp16", "fp16_rewrite"])
def test_function_on_a_platform_has_no_branches_and_the_same_bits(preset):
    function = network("cifar_resnet8", preset)
    images = np.random.default_rng(0).standard_normal((2, 32, 32, 3), np.float32)
    names = [
        {eqn.primitive.name for eqn in jax_compat.equations(jax.make_jaxpr(one)(images))}
        for one in (function, models.on_platform(function, "cpu"), models.on_platform(function, "cuda"))
    ]
    assert "platform_index" in names[0] and not {"platform_index", "cond"} & (names[1] | names[2])
    expected, found = (jax.jit(one)(images) for one in (function, models.on_platform(function, "cpu")))
    np.testing.assert_array_equal(found, expected)


def test_loops_and_trees_on_a_platform():
    def choose(x):
        return jax.lax.platform_dependent(x, cpu=lambda x: x + 1, tpu=lambda x: x + 2, default=lambda x: x + 4)

    def function(tree):
        total, rows = jax.lax.scan(lambda sum, x: (choose(sum), choose(x)), tree["a"], tree["b"])
        return {"sum": jax.lax.cond(total > 0, choose, jnp.negative, total), "rows": rows}

    given = {"a": np.float32(0), "b": np.zeros(3, np.float32)}
    for platform, one in (("cpu", 1), ("tpu", 2), ("cuda", 4)):
        found = jax.jit(models.on_platform(function, platform))(given)
        assert found["sum"] == 4 * one and found["rows"].tolist() == [one] * 3


@pytest.mark.interop
@pytest.mark.parametrize(
    ("name", "preset", "version"),
    [
        ("resnet14", "fp32", "1.5"),
        ("resnet18", "fp16", "2"),
        ("cifar_resnet8", "fp32", "1"),
        ("cifar_resnet8", "fp16_rewrite", "1"),
    ],
)
def test_jax2onnx_converts_what_onnxruntime_computes_the_same(name, preset, version):
    """Without bfloat16, for which onnxruntime has no convolutions on CPUs."""
    jax2onnx = pytest.importorskip("jax2onnx", reason="needs jax2onnx: see .ci/run")
    onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime: pip install -e '.[interop]'")
    function = network(name, preset, version=version)
    images = np.random.default_rng(0).standard_normal((2, 33, 33, 3), np.float32)
    expected = np.asarray(jax.jit(function)(images))
    # jax2onnx 0.17.1 writes float16 heads that onnxruntime refuses if JAX has traced the same functions before.
    jax.clear_caches()
    converted = jax2onnx.to_onnx(models.on_platform(function, "cpu"), [images.shape])
    jax.clear_caches()  # jax2onnx leaves primitives of its own in programs that JAX keeps
    session = onnxruntime.InferenceSession(converted.SerializeToString(), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: images})
    error = np.linalg.norm(found - expected) / np.linalg.norm(expected)
    assert error < (1e-5 if preset == "fp32" else 5e-3) and expected.std() > 0.1
