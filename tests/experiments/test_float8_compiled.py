"""Float8 products in programs compiled for GPUs: what is read off a program, and the compiler where it is installed."""

import argparse
import importlib.util

import pytest

from experiments.in_float8 import compiled
from experiments.lib import hlo
from mixedres._internal.errors import ConfigError

HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%gemm_computation (a: f8e5m2[64,32], b: f8e4m3fn[32,16], c: s32[]) -> bf16[64,16] {
  %a = f8e5m2[64,32]{1,0} parameter(0)
  %b = f8e4m3fn[32,16]{1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %dot = bf16[64,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f8e5m2[64,32], w: f8e4m3fn[32,16], k: s32[], v: bf16[16,16]) -> bf16[64,16] {
  %x = f8e5m2[64,32]{1,0} parameter(0)
  %w = f8e4m3fn[32,16]{1,0} parameter(1)
  %k = s32[] parameter(2)
  %v = bf16[16,16]{1,0} parameter(3)
  %gemm.1 = bf16[64,16]{1,0} fusion(%x, %w, %k), kind=kCustom, calls=%gemm_computation
  %lt = (bf16[64,16]{1,0}, s8[4194304]{0}) custom-call(%x, %w, %k), custom_call_target="__cublas$lt$matmul$f8"
  %y = bf16[64,16]{1,0} get-tuple-element(%lt), index=0
  ROOT %plain = (bf16[64,16]{1,0}, s8[64]{0}) custom-call(%gemm.1, %v), custom_call_target="__cublas$lt$matmul"
}
"""


def test_products_by_their_operands():
    found = {kernel.name: kernel for kernel in hlo.kernels(PROGRAM)}
    products = {name: compiled.product_dtype(kernel) for name, kernel in found.items()}
    assert products == {"gemm.1": "float8", "lt": "float8", "plain": "bf16"}
    assert all(kernel.kind == "matmul" for kernel in found.values())
    # A byte an element, and no scratch memory.
    assert found["lt"].bytes == found["gemm.1"].bytes == 64 * 32 + 32 * 16 + 4 + 2 * 64 * 16
    assert found["plain"].bytes == 2 * (64 * 16 + 16 * 16 + 64 * 16)


def test_the_table_names_what_does_not_compile():
    about = {"program": "two MLPs", "gpu": "h200", "backend": "cuBLASLt", "precision": "fp8"}
    counted = {"products": {"bf16": 3, "float8": 8}, "cublaslt_float8_calls": 8, "kernels": 70}
    *_, told, failed = compiled.table(
        [about | counted | {"megabytes": 2995.2, "temp_mb": 528.0}, about | {"failed": "XlaRuntimeError: no"}]
    )
    assert "| 3 bf16, 8 float8 | 8 | 70 | 2,995 MB | 528 MB |" in told and "XlaRuntimeError: no" in failed
    assert told.count("|") == failed.count("|")


def test_mistakes():
    with pytest.raises(ConfigError, match="--gpu=v100 is not known; use h200 or h100 or a100"):
        compiled.run(argparse.Namespace(gpu="v100", name=""))
    if not HAS_PLUGIN:
        with pytest.raises(ConfigError, match="plugin is not here"):
            compiled.run(argparse.Namespace(gpu="h200", name=""))


@pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin: pip install 'jax[cuda13]'")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float8 is emulated")
def test_what_xla_multiplies_in_float8():
    hopper = compiled.measure("two MLPs", "fp8", "h200", "cuBLASLt")
    # Two products of the first layer with two gradients each but for that of the input, and one of the second's with
    # both: its last is read in float32.
    assert hopper["cublaslt_float8_calls"] == hopper["products"]["float8"] == 8
    assert hopper["products"]["bf16"] == 3
    assert compiled.measure("two MLPs", "fp8", "h200", "Triton")["products"]["float8"] == 8
    # Ampere has no units for it.
    ampere = compiled.measure("two MLPs", "fp8", "a100", "cuBLASLt")
    assert ampere["cublaslt_float8_calls"] == 0 and ampere["products"] == {"bf16": 11}
