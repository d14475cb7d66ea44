"""Tensor-core instructions of one warp. Products of codes are in `mma_int4.py`, `mma_bits.py` and `mma_int8.py`.

Lane (g, t), g = lane // 4 and t = lane % 4, has of `m16n8k16`:
- a: rows g and g + 8, inputs 2t and 2t + 1, then the same of inputs 8 further; two numbers to a register, four registers;
- b: column g, the same inputs; two registers;
- c and d: row g, columns 2t and 2t + 1, then row g + 8; four float32.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
MMA_F16 = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
MMA_F16_K8 = "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"
# unsigned times signed bytes, and unsigned times unsigned: inputs 4t to 4t + 3 in a register
MMA_U8_S8 = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"
MMA_U8_U8 = "mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32"
# transpose an 8 x 8 matrix of 16-bit numbers across the lanes of a warp
TRANSPOSE = "movmatrix.sync.aligned.m8n8.trans.b16"
MULTIPLY = gl.constexpr(f"{MMA} {{$0,$1,$2,$3}},{{$4,$5,$6,$7}},{{$8,$9}},{{$10,$11,$12,$13}};")


@gluon.jit
def mma_bf16(c, a, b0, b1):
    """Add the product of 16 rows and 8 columns over 16 inputs in bf16 to their sums."""
    args = [a[0], a[1], a[2], a[3], b0, b1, c[0], c[1], c[2], c[3]]
    REGS: gl.constexpr = "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f"
    return gl.inline_asm_elementwise(MULTIPLY, REGS, args, (gl.float32,) * 4, is_pure=True, pack=1)
