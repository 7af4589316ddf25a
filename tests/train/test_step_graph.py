"""What the compiled step consists of: dtypes of products, number and dtype of all-reduces."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from mixedres import precision
from mixedres._internal.jax_compat import equations
from mixedres._internal.mesh import AXIS, make_mesh
from mixedres.train import gradients
from tests import GOLDEN, arrays
from tests.train import step_cases as cases

STEP_DTYPES = GOLDEN / "step_dtypes.txt"


def products(preset, platform=None):
    """A line for each kind of product in the training step: count, primitive, dtypes, precision."""
    stages = (0, 1, 1) if platform == "cpu" else (0, 1)  # a map smaller than its kernel has a form of its own on a CPU
    train_step, state = cases.make(preset, stages=stages, ema=False)
    jaxpr = jax.make_jaxpr(train_step)(state, cases.batch(0, images=np.uint8)).jaxpr
    found = collections.Counter()
    for eqn in equations(jaxpr, platform):
        name = eqn.primitive.name
        if name in ("conv_general_dilated", "dot_general"):
            dtypes = ",".join(str(v.aval.dtype) for v in eqn.invars)
            exactness = eqn.params["precision"]
            exactness = exactness[0].name if isinstance(exactness, tuple) else getattr(exactness, "name", None)
            found[f"{name} {dtypes} -> {eqn.outvars[0].aval.dtype} {exactness}"] += 1
    name = f"{preset}, {platform}" if platform else preset
    return [f"{name}: {count} x {line}" for line, count in sorted(found.items())]


HALF = {"fp16": "float16", "fp16_static": "float16", "bf16": "bfloat16"}
HALF |= {"fp16_rewrite": "float16", "bf16_rewrite": "bfloat16"}


def test_dtypes_of_all_products_are_as_recorded():
    found = {preset: products(preset) for preset in precision.PRESETS}
    on_cpu = [line for preset in ("fp32", "fp16", "bf16_rewrite") for line in products(preset, "cpu")]
    lines = [line for lines in found.values() for line in lines] + on_cpu
    assert "".join(f"{line}\n" for line in lines) == STEP_DTYPES.read_text()
    for preset, half in HALF.items():
        assert found[preset] and all(f" {half},{half} -> " in line for line in found[preset])


def all_reduces(train_step, state, batch):
    """[(dtypes of the operands)] of the all-reduces as jax asks for them, before a backend widens any."""
    text = train_step.lower(state, batch).as_text()
    kinds = []
    for operation in re.finditer(r'"stablehlo\.all_reduce".*?\}\) : \(([^)]*)\)', text, re.DOTALL):
        kinds.append(re.findall(r"(?:x|<)(f16|f32|bf16|i32|i1)>", operation[1]))
    return kinds


@pytest.mark.parametrize("preset, half", [("fp16", "f16"), ("bf16", "bf16")])
def test_dtype_of_the_gradient_all_reduce(preset, half):
    leaves = len(jax.tree.leaves(cases.network(preset)[1]["params"]))
    for wanted in (None, jnp.dtype(precision.get(preset).policy.compute_dtype)):
        train_step, state = cases.make(preset, devices=8, allreduce_dtype=wanted)
        operands = all_reduces(train_step, state, cases.batch(0))
        counts = collections.Counter(dtype for dtypes in operands for dtype in dtypes)
        others = len(jax.tree.leaves(state.batch_stats)) + 2  # the statistics; loss and top-1
        assert counts == ({"f32": leaves + others} if wanted is None else {half: leaves, "f32": others})


@pytest.mark.parametrize("dtype", [None, jnp.float16])
def test_buckets_have_the_order_of_the_backward_pass(dtype, monkeypatch):
    monkeypatch.setattr(gradients, "LAST_BUCKET", 36 * jnp.dtype(dtype or jnp.float32).itemsize)
    rng = np.random.default_rng(0)
    sizes = {"stem_conv": 3, "block_layer1_1": 5, "block_layer1_2": 7, "head": 40}
    grads = {name: {"kernel": rng.random((8, 3, 3, n, 1), np.float32) - 0.5} for name, n in sizes.items()}
    grads["stem_conv"]["kernel"][:, 0, 0, 0] = -0.0
    grads["head"] = {"kernel": rng.random((8, 2, 19), np.float32), "bias": rng.random((8, 2), np.float32)}
    others = rng.random((8, 7), np.float32)

    def mean(function):
        each = lambda *trees: function(*jax.tree.map(lambda x: x[0], trees), dtype)  # noqa: E731
        mapped = jax.shard_map(each, mesh=make_mesh(jax.devices()), in_specs=P(AXIS), out_specs=P())
        return jax.jit(mapped).lower(grads, others)

    separate, in_buckets = mean(gradients._mean_of_each), mean(gradients._mean_in_buckets)
    found = re.findall(r"\}\) : \(tensor<(\d+)x(f\d\d)>\)", in_buckets.as_text())
    # Kernels of the head and the last block; of the first block; of the stem, with the vectors.
    half = [("7", "f32"), ("101", "f16"), ("45", "f16"), ("29", "f16")]
    assert found == ([("101", "f32"), ("45", "f32"), ("36", "f32")] if dtype is None else half)
    compiled = in_buckets.compile()
    # XLA joins all-reduces that do not wait for each other.
    assert len(re.findall(r" all-reduce\(", compiled.as_text())) == len(found)
    expected, found = separate.compile()(grads, others), compiled(grads, others)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    assert arrays.bits(jax.tree.map(jnp.float32, found)) == arrays.bits(jax.tree.map(jnp.float32, expected))


def test_eval_counts_every_example_once_on_eight_devices():
    model, variables = cases.network("fp32")
    mesh = make_mesh(jax.devices())
    eval_step = cases.step.jit_eval_step(mesh, apply_fn=model.apply, normalize=cases.NORMALIZE)
    sums, results = cases.step.zero_sums(), []
    full, part = cases.batch(0, 16), cases.batch(1, 16)
    masks = np.ones(16, bool), np.arange(16) < 5
    for data, mask in zip((full, part), masks, strict=True):
        sums, found = eval_step(variables, data | {"mask": mask}, None, sums)
        results.append(jax.tree.map(lambda x, mask=mask: np.asarray(x)[mask], found))

    apply = jax.jit(lambda images: model.apply(variables, cases.NORMALIZE(images), train=False))
    logits = [apply(data["image"]) for data in (full, part)]
    logits = np.concatenate([np.asarray(x)[mask] for x, mask in zip(logits, masks, strict=True)]).astype(np.float64)
    labels = np.concatenate([data["label"][mask] for data, mask in zip((full, part), masks, strict=True)])
    order = np.argsort(-logits, axis=1, kind="stable")
    log_probs = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert sums["examples"] == 21 and sums["changed"] == sums["nonfinite"] == 0
    results = jax.tree.map(lambda *parts: np.concatenate(parts), *results)
    np.testing.assert_array_equal(results["predicted"], order[:, 0])
    np.testing.assert_array_equal(results["top"], order[:, :5])
    probability = np.take_along_axis(np.exp(log_probs), order[:, :5], 1)
    np.testing.assert_allclose(results["probability"], probability, rtol=2e-6)
    np.testing.assert_allclose(results["loss"], -log_probs[np.arange(21), labels], rtol=1e-5, atol=2e-7)
    assert sums["top1"] == np.sum(order[:, 0] == labels)
    assert sums["top5"] == np.sum((order[:, :5] == labels[:, None]).any(1))
    np.testing.assert_allclose(sums["loss"], -log_probs[np.arange(21), labels].sum(), rtol=2e-6)
