"""Stages of eight rows of four-bit codes that TMA brings: who has read one, and what a warp makes of it.

PTX for what a thread does; every tensor has one element per thread. Stages are of 8 rows, so that work comes in small equal
pieces. The tensor cores take 16: the other 8 are rows of a second weight, or the second half of the same rows. See
`int4_groups.py` for codes as numbers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.linear.cuda.int4_groups import GROUPS, GROUPS_REGISTERS, OF_CODES, OF_X, SUM, half_at


@gluon.jit
def await_stage(barrier, turn, there):
    """Wait until the bytes of a place's turn-th stage have come."""
    text: gl.constexpr = (
        "{.reg .pred p,q; setp.eq.b32 q,$3,0; @q bra DONE;"
        "AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p,[$1],$2; @!p bra AGAIN; DONE: mov.b32 $0,0;}"
    )
    args = [barrier, turn & 1, there.to(gl.int32)]
    gl.inline_asm_elementwise(text, "=r,r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def count_read(at, lane, there):
    """Count a warp that has read its part of a stage: how many have before it. The last one may fill the place again."""
    text: gl.constexpr = (
        "{.reg .pred p; .reg .b32 n; setp.ne.b32 p,$2,0; mov.b32 n,-1; bar.warp.sync 0xffffffff;"
        "@p atom.acq_rel.cta.shared::cta.add.u32 n,[$1],1; shfl.sync.idx.b32 $0,n,0,31,0xffffffff;}"
    )
    args = [at, (there & (lane == 0)).to(gl.int32)]
    return gl.inline_asm_elementwise(text, "=r,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def lines_two(base, lane, LINE: gl.constexpr, APART: gl.constexpr):
    """Scales and biases of row g, group t, here and APART bytes on; rows are LINE bytes apart, biases behind 8 of scales."""
    at = base + lane // 4 * LINE + lane % 4 * 2
    return half_at(at), half_at(at + APART), half_at(at + 8 * LINE), half_at(at + (8 * LINE + APART))


@gluon.jit
def sums_16(x):
    """Σ x of columns 2t and 2t + 1."""
    args = [x[0], x[1], x[2], x[3], x[4], x[5], x[6], x[7]]
    a, b = gl.inline_asm_elementwise(SUM, "=&f,=&f" + ",r" * 8, args, (gl.float32,) * 2, is_pure=True, pack=1)
    return a * OF_X, b * OF_X


@gluon.jit
def multiplied_two(words, lines, x, sums, lane, SECOND: gl.constexpr):
    """A lane's two rows times group t, which is in columns 2t and, for the second row, 2t + SECOND."""
    args = []
    for j in gl.static_range(8):
        args += [words[j]]
    for j in gl.static_range(8):
        args += [x[j]]
    c = gl.inline_asm_elementwise(GROUPS, GROUPS_REGISTERS, args, (gl.float32,) * 16, is_pure=True, pack=1)
    mine, r0, r1 = lane % 4 ^ lane // 4 % 4, c[0], c[2 + SECOND]
    for j in gl.static_range(1, 4):
        r0, r1 = gl.where(mine == j, c[4 * j], r0), gl.where(mine == j, c[4 * j + 2 + SECOND], r1)
    return lines[0] * (r0 * OF_CODES) + lines[2] * sums[0], lines[1] * (r1 * OF_CODES) + lines[3] * sums[SECOND]
