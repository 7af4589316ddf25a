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
