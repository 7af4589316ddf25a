"""Float8 products in programs compiled for GPUs: what is read off a program, and the compiler where it is installed."""

import importlib.util

import pytest

from experiments import float8
from experiments.in_float8 import compiled, tables
from experiments.lib import hlo

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
    *_, told, failed = tables.compiled(
        [about | counted | {"megabytes": 2995.2, "temp_mb": 528.0}, about | {"failed": "XlaRuntimeError: no"}]
    )
    assert "| 3 bf16, 8 float8 | 8 | 70 | 2,995 MB | 528 MB |" in told and "XlaRuntimeError: no" in failed
    assert told.count("|") == failed.count("|")


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "--part= must be one of gradients, training, compiled"),
        (["--part=speed"], "--part=speed must be one of gradients, training, compiled"),
        (["--part=gradients", "--steps=3"], "--steps=3 is for --part=training"),
        (["--part=training", "--seeds=0"], "--seeds=0 must be at least 1"),
        (["--part=training", "--steps=-1"], "--steps=-1 must be at least 1"),
        (["--part=training", "--gpu=h200"], "--gpu=h200 is for --part=compiled"),
        (["--part=compiled", "--seeds=2"], "--seeds=2 is for gradients and training"),
        (["--part=compiled", "--gpu=v100"], "--gpu=v100 is not known; use h200 or h100 or a100"),
        (["--part=gradients", "--name=a/b"], "--name=a/b must be part of a file name"),
    ],
)
def test_wrong_options_are_one_line(arguments, said, capsys):
    assert float8.main(arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith(f"float8: {said}") and told.count("\n") == 1


@pytest.mark.skipif(HAS_PLUGIN, reason="JAX's CUDA plugin is here")
def test_without_the_plugin(capsys):
    assert float8.main(["--part=compiled"]) == 2
    assert capsys.readouterr().err.startswith("float8: JAX's CUDA plugin is not here; with Python 3.12 or newer")


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
