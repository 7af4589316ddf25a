"""Bytes and kinds of kernels, of a program written by hand."""

from experiments.lib import hlo

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
    assert found["sums"].bytes == image + 2 * 16 * 4
    assert found["out"].bytes == 2 * image
    assert found["conv"].operands[0] == ("f16", (8, 4, 4, 16))


SHARED = """\
%taken (p: f32[100], q: f32[10]) -> (f32[10], f32[2,5]) {
  %p = f32[100]{0} parameter(0)
  %q = f32[10]{0} parameter(1)
  %row = f32[1,100]{1,0} bitcast(%p)
  %half = f16[100]{0} convert(%p)
  %one = f16[10]{0} slice(%half), slice={[0:10]}
  %two = f32[1,10]{1,0} slice(%row), slice={[0:1], [10:20]}
  %sum = f32[10]{0} add(%one, %q)
  ROOT %both = (f32[10]{0}, f32[1,10]{1,0}) tuple(%sum, %two)
}

%copied (p: f32[100]) -> f32[10] {
  %p = f32[100]{0} parameter(0)
  ROOT %cut = f32[10]{0} slice(%p), slice={[90:100]}
}

%whole (p: f32[100], at: s32[]) -> (f32[10], f32[100]) {
  %p = f32[100]{0} parameter(0)
  %at = s32[] parameter(1)
  %cut = f32[10]{0} dynamic-slice(%p, %at), dynamic_slice_sizes={10}
  %twice = f32[100]{0} add(%p, %p)
  ROOT %both = (f32[10]{0}, f32[100]{0}) tuple(%cut, %twice)
}

ENTRY %main (x: f32[100], y: bf16[5], z: bf16[5], v: f32[10], at: s32[]) -> f32[10] {
  %x = f32[100]{0} parameter(0)
  %y = bf16[5]{0} parameter(1)
  %z = bf16[5]{0} parameter(2)
  %v = f32[10]{0} parameter(3)
  %at = s32[] parameter(4)
  %all-reduce-start = ((f32[100]{0}), f32[100]{0}) all-reduce-start(%x), backend_config={"is_sync":false}
  %mid = (f32[10]{0}, f32[100]{0}) fusion(%x, %at), kind=kLoop, calls=%whole
  %all-reduce-done = f32[100]{0} all-reduce-done(%all-reduce-start), backend_config={"is_sync":false}
  %all-reduce-start.1 = ((bf16[5], bf16[5]), (bf16[5], bf16[5])) all-reduce-start(%y, %z), config={"is_sync":true}
  %all-reduce-done.1 = (bf16[5], bf16[5]) all-reduce-done(%all-reduce-start.1), backend_config={"is_sync":true}
  %cut = f32[10]{0} fusion(%all-reduce-done), kind=kLoop, calls=%copied
  %dyn = f32[10]{0} dynamic-slice(%all-reduce-done, %at), dynamic_slice_sizes={10}
  ROOT %out = (f32[10]{0}, f32[1,10]{1,0}) fusion(%all-reduce-done, %v), kind=kLoop, calls=%taken
}
"""


def test_slice_counts_as_what_it_takes():
    found = {kernel.name: (kernel.kind, kernel.bytes) for kernel in hlo.kernels(SHARED)}
    assert found["cut"] == ("slice", 2 * 40)
    assert found["dyn"] == ("slice", 2 * 40 + 4)
    assert found["out"] == ("elementwise", 2 * 40 + 40 + 2 * 40)  # two slices and %v
    assert found["mid"] == ("elementwise", 400 + 4 + 40 + 400)  # the whole operand is read, too


def test_all_reduces_have_their_place_among_the_kernels():
    first, second = hlo.collectives(SHARED)
    total = 80 + 84 + 200 + 844
    assert first == hlo.Collective("all-reduce", ["f32"], 1, 400, True, 0.0, hidden=844)
    assert second == hlo.Collective("all-reduce", ["bf16"], 2, 20, False, 844 / total)
