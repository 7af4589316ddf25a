"""The report of compiled steps: what it counts and refuses; and the compiler itself, where JAX's CUDA plugin is
installed (Python 3.12 or newer, pip install 'jax[cuda13]')."""

import importlib.util
import json
import math

import pytest

from experiments import aot
from experiments.lib import hlo, runs
from experiments.programs import measure, steps

HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
needs_plugin = pytest.mark.skipif(not HAS_PLUGIN, reason="needs JAX's CUDA plugin: pip install 'jax[cuda13]'")


@needs_plugin
@pytest.mark.slow
def test_committed_limits_hold(capsys):
    assert aot.main(["--check"]) == 0 and "every figure is within its limits" in capsys.readouterr().out


# ---- without the plugin


def row(**figures):
    found = {"gpu": "h200", "devices": 8, "batch": 256, "preset": "bf16", "form": "fused", "kernels": 791}
    found |= {"mb_per_image": 345.7, "kernels_by_kind": {}, "all_reduces": [{"start": 0.8, "mb": 4, "async": True}]}
    return found | {"large": dict.fromkeys((*aot.WIDE, *aot.MOVING), 0)} | figures


def test_figures_are_compared_with_their_limits():
    most = {"mb_per_image": 346, "kernels": 791, "large f32": 0, "start of all-reduce 1": 0.8}
    assert aot.passed(row(), most) == []
    late = [{"start": 0.9, "mb": 4, "async": True}]
    told = aot.passed(row(mb_per_image=346.1, large=row()["large"] | {"f32": 2}, all_reduces=late), most)
    assert told == [
        "h200, 8 devices, batch 256, bf16, fused: mb_per_image is 346.1, and may be 346",
        "h200, 8 devices, batch 256, bf16, fused: large f32 is 2, and may be 0",
        "h200, 8 devices, batch 256, bf16, fused: start of all-reduce 1 is 0.9, and may be 0.8",
    ]
    assert aot.passed(row(mb_per_image=math.nan), most)


def kernel(kind, *results, target=""):
    return hlo.Kernel("k", kind, (), tuple(results), target)


def test_what_is_as_large_as_an_activation_is_counted_by_dtype_and_kind():
    image, weights = ("f16", (8, 4, 4, 16)), ("f16", (3, 3, 64, 64))
    found = aot.large(
        [
            kernel("convolution", image, ("u8", (10**6,)), target="__cudnn$convForward"),
            kernel("convolution", ("f16", (1, 1, 2, 16)), target="__cudnn$convBackwardFilter"),  # sets no measure
            kernel("elementwise", ("f32", (128, 16)), ("f32", (16,)), ("s32", (8, 4, 4, 17))),
            kernel("transpose", weights),
            kernel("transpose", ("pred", (8, 4, 4, 16))),
            kernel("copy", ("f16", (8, 4, 4, 15))),
            kernel("pooling", ("f16", (8, 8, 8, 16))),
        ],
        parameters={3 * 3 * 64 * 64},
    )
    assert found == {"f32": 1, "s32": 1, "pred": 1, "pooling": 1, "copy": 0, "transpose": 1}


# ---- bytes and kinds of kernels, of a program written by hand

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%region (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%fused_reduce (p: f16[8,4,4,16]) -> (f32[16], f32[16]) {
  %p = f16[8,4,4,16]{3,2,1,0} parameter(0)
  %wide = f32[8,4,4,16]{3,2,1,0} convert(%p)
  %zero = f32[] constant(0)
  %sum = f32[16]{0} reduce(%wide, %zero), dimensions={0,1,2}, to_apply=%region
  ROOT %both = (f32[16]{0}, f32[16]{0}) tuple(%sum, %sum)
}

%fused_relu (q: f16[8,4,4,16]) -> f16[8,4,4,16] {
  %q = f16[8,4,4,16]{3,2,1,0} parameter(0)
  ROOT %relu = f16[8,4,4,16]{3,2,1,0} maximum(%q, %q)
}

ENTRY %main (x: f16[8,4,4,16], w: f16[16,3,3,16]) -> f16[8,4,4,16] {
  %x = f16[8,4,4,16]{3,2,1,0} parameter(0)
  %w = f16[16,3,3,16]{3,2,1,0} parameter(1)
  %conv = (f16[8,4,4,16]{3,2,1,0}, u8[4096]{0}) custom-call(%x, %w), custom_call_target="__cudnn$convForward"
  %y = f16[8,4,4,16]{3,2,1,0} get-tuple-element(%conv), index=0
  %sums = (f32[16]{0}, f32[16]{0}) fusion(%y), kind=kInput, calls=%fused_reduce
  ROOT %out = f16[8,4,4,16]{3,2,1,0} fusion(%y), kind=kLoop, calls=%fused_relu
}
"""


def test_kernels_of_a_program_written_by_hand():
    image, weights = 8 * 4 * 4 * 16 * 2, 16 * 3 * 3 * 16 * 2
    found = {kernel.name: kernel for kernel in hlo.kernels(PROGRAM)}
    assert {name: kernel.kind for name, kernel in found.items()} == {
        "conv": "convolution",
        "sums": "reduction",
        "out": "elementwise",
    }
    assert found["conv"].bytes == 2 * image + weights  # without the scratch memory of 4096 bytes
    assert found["sums"].bytes == image + 2 * 16 * 4 and found["out"].bytes == 2 * image
    assert found["conv"].operands[0] == ("f16", (8, 4, 4, 16))


LOOP = """
%step (p: (s32[], f32[4,8], bf16[3,4,8])) -> (s32[], f32[4,8], bf16[3,4,8]) {
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %all = bf16[3,4,8]{2,1,0} get-tuple-element(%p), index=2
  %part = bf16[3,4,8]{2,1,0} fusion(%all, %x, %i), kind=kLoop, calls=%saved
  %next = f32[4,8]{1,0} fusion(%x), kind=kLoop, calls=%doubled
}
%saved (all: bf16[3,4,8], x: f32[4,8], i: s32[]) -> bf16[3,4,8] {
  %all.1 = bf16[3,4,8]{2,1,0} parameter(0)
  %x.1 = f32[4,8]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %half = bf16[4,8]{1,0} convert(%x.1)
  %row = bf16[1,4,8]{2,1,0} bitcast(%half)
  ROOT %saved.1 = bf16[3,4,8]{2,1,0} dynamic-update-slice(%all.1, %row, %i.1)
}
%doubled (x: f32[4,8]) -> f32[4,8] {
  %x.2 = f32[4,8]{1,0} parameter(0)
  ROOT %y = f32[4,8]{1,0} add(%x.2, %x.2)
}
ENTRY %main (p: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8], bf16[3,4,8]) while(%t), body=%step, backend_config={"known_trip_count":{"n":"3"}}
}
"""


def test_kernels_of_a_loop_count_for_every_step_and_only_what_they_write_in_place():
    found = hlo.kernels(LOOP)
    assert [kernel.name for kernel in found] == 3 * ["part", "next"]
    assert [kernel.bytes for kernel in found[:2]] == [4 * 32 + 2 * 32, 2 * 4 * 32]


def test_committed_programs_are_within_their_limits():
    rows = json.loads((runs.RESULTS / "aot_programs_h200.json").read_text())["rows"]
    assert {row["program"] for row in rows} == steps.PROGRAMS.keys() == measure.limits().keys()
    assert measure.passed(rows) == []
    assert measure.passed([{**rows[0], "ratios": {"gb": 9.0}}]) == [
        f"{rows[0]['program']}, {rows[0]['dtype']}: bytes, autocast / own, is 9.000, may be "
        f"{measure.limits()[rows[0]['program']]['gb']:g}"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B/16", "U-Net", "GAT"])
def test_gradients_of_a_program_err_no_more_than_those_of_its_own_mode(name):
    errors = measure.errors(name, "bfloat16")
    assert 1e-3 < errors["autocast"] <= min(1.0, measure.limits()[name]["error"]) * errors["own"]


def test_committed_results_are_within_the_limits():
    """The figures in experiments/results, by the limits that `python -m experiments.aot --check` holds others to."""
    keys = ("gpu", "devices", "preset", "batch", "form")
    files = runs.RESULTS / "aot_h200.json", runs.RESULTS / "aot_h100.json"
    old = {"devices": 1, "all_reduces": []}  # what rows of earlier files leave out
    rows = [old | row for file in files for row in json.loads(file.read_text())["rows"]]
    found = {tuple(row[key] for key in keys): row for row in rows}
    limits = {tuple(getattr(case, key) for key in keys): most for case, most in aot.limited(aot.LIMITS)}
    assert len(limits.keys() & found.keys()) >= 7
    assert [told for key in limits.keys() & found.keys() for told in aot.passed(found[key], limits[key])] == []
