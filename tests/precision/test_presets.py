"""The presets, literally; what can be replaced in them; what is refused and with which words."""

import dataclasses

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import pytest

from mixedres import amp
from mixedres.precision import PRESETS, DynamicLossScale, NoOpLossScale, StaticLossScale, get, parse_policy, preset_of

# policy (parameters, arithmetic, output), policy of normalization, loss scale, float32 products.
EXPECTED = {
    "fp32": ("f32 f32 f32", "f32 f32 f32", "none", "highest"),
    "tf32": ("f32 f32 f32", "f32 f32 f32", "none", "tensorfloat32"),
    "bf16": ("f32 bf16 f32", "f32 f32 bf16", "none", "default"),
    "fp16": ("f32 f16 f32", "f32 f32 f16", "dynamic", "default"),
    "fp16_static": ("f32 f16 f32", "f32 f32 f16", 128.0, "default"),
    "fp16_rewrite": ("f32 f16 f32", "f32 f32 f16", "dynamic", "default"),
    "bf16_rewrite": ("f32 bf16 f32", "f32 f32 bf16", "none", "default"),
}
DTYPES = {"f16": jnp.float16, "bf16": jnp.bfloat16, "f32": jnp.float32, "f64": jnp.float64}


def policy(names):
    return jmp.Policy(*(DTYPES[name] for name in names.split()))


@pytest.mark.parametrize("name", EXPECTED)
def test_presets_have_the_recorded_dtypes(name):
    network, norms, loss_scale, matmul = EXPECTED[name]
    preset = get(name)
    assert dataclasses.asdict(preset) == {
        "name": name,
        "policy": dataclasses.asdict(policy(network)),
        "norm_policy": dataclasses.asdict(policy(norms)),
        "loss_scale": loss_scale,
        "implementation": "graph_rewrite" if name.endswith("_rewrite") else "casting",
        "matmul_precision": matmul,
        "lists": None,
        "level": "default",
        "keep_float32": "",
    }


def test_presets_make_loss_scales():
    assert list(PRESETS) == list(EXPECTED)
    kinds = {"bf16": NoOpLossScale, "fp16": DynamicLossScale, "fp16_static": StaticLossScale}
    assert {name: type(get(name).make_loss_scale()) for name in kinds} == kinds
    made = get("fp16").make_loss_scale(loss_scale=4.0, period=7, factor=4.0, max_loss_scale=8.0)
    assert (made.loss_scale, made.period, made.factor, made.max_loss_scale) == (4, 7, 4, 8)


@pytest.mark.parametrize(
    ("part", "given", "changed"),
    [
        ("policy", "p=f32,c=bf16,o=f32", {"policy": "f32 bf16 f32", "norm_policy": "f32 f32 bf16"}),
        ("policy", "c=bf16", {"policy": "f32 bf16 bf16", "norm_policy": "f32 f32 bf16"}),
        ("policy", "half", {"policy": "f16 f16 f16", "norm_policy": "f16 f32 f16"}),
        ("policy", policy("f32 f32 f16"), {"policy": "f32 f32 f16", "norm_policy": "f32 f32 f32"}),
        ("norm_policy", "c=f16", {"norm_policy": "f32 f16 f16"}),
        ("norm_policy", policy("f32 f32 f32"), {"norm_policy": "f32 f32 f32"}),
        ("loss_scale", "none", {"loss_scale": "none"}),
        ("loss_scale", 256, {"loss_scale": 256}),
        ("loss_scale", "64", {"loss_scale": "64"}),
        ("implementation", "casting", {}),
        ("matmul_precision", "highest", {"matmul_precision": "highest"}),
        ("keep_float32", "^/head$", {"keep_float32": "^/head$"}),
    ],
    ids=str,
)
def test_part_replaced(part, given, changed):
    changed = {k: policy(v) if k.endswith("policy") else v for k, v in changed.items()}
    assert get("fp16", **{part: given}) == dataclasses.replace(get("fp16"), **changed)


def test_float64_with_x64():
    with jax.enable_x64(True):
        full = get("fp32", policy="f64")
        assert full.policy == full.norm_policy == policy("f64 f64 f64")
        assert get("fp32", policy="p=f64,c=f32,o=f64").norm_policy == policy("f64 f32 f32")


OF_OBJECTS = jmp.Policy(*[np.dtype("float64")] * 3)  # which jmp cannot print


@pytest.mark.parametrize("given", ["f64", "p=f32,c=f32,o=f64", "c=float64,o=f32", OF_OBJECTS])
def test_float64_without_x64_is_refused(given):
    with pytest.raises(ValueError, match=r"float64.*JAX_ENABLE_X64=1"):
        parse_policy(given)
    with pytest.raises(ValueError, match=r"float64.*JAX_ENABLE_X64=1"):
        get("fp32", norm_policy=given)


def test_policy_object_is_returned_unchanged():
    given = policy("f32 bf16 f16")
    assert parse_policy(given) is given and parse_policy(str(given)) == given


def test_network_policies_of_presets():
    full = policy("f32 f32 f32")
    assert get("fp16_rewrite").network_policies == (full, full)
    assert get("fp16").network_policies == (get("fp16").policy, get("fp16").norm_policy)


def test_rewrite_of_a_function():
    def product(x):
        return x @ x

    x = jnp.full((2, 2), 1.0 + 2.0**-11)
    assert get("fp16").rewrite(product) is product
    # Operands are rounded to 1 in both; in float32 the result is above 2.
    assert float(get("fp16_rewrite").rewrite(product)(x)[0, 0]) == 2.0
    assert float(get("bf16_rewrite").rewrite(product)(x)[0, 0]) == 2.0
    kept = get("fp16_rewrite", lists={"unlisted": {"dot_general"}}).rewrite(product)
    assert float(kept(x)[0, 0]) == float(product(x)[0, 0]) != 2.0


def test_wider_preset_is_read_off_the_table():
    """A float16 policy in any preset has a wider one, of the same implementation; other dtypes have none."""
    wider = {"fp16": "bf16", "fp16_static": "bf16", "fp16_rewrite": "bf16_rewrite", "fp32": None, "bf16": None}
    assert {name: get(name).wider for name in wider} == wider
    assert get("bf16", policy="p=f32,c=f16,o=f32").wider == "bf16" and get("fp16", policy="c=f32").wider is None
    assert preset_of(jnp.float16, "graph_rewrite") == "fp16_rewrite"
    with pytest.raises(ValueError, match="no preset computes in float64 by casting"):
        preset_of("float64", "casting")


def test_autocast_takes_the_dtype_of_a_preset_by_name():
    assert {name: amp.half_dtype(name).name for name in ("fp16_static", "bf16_rewrite")} == {
        "fp16_static": "float16",
        "bf16_rewrite": "bfloat16",
    }
    with pytest.raises(ValueError, match="got float32"):
        amp.half_dtype("tf32")
