"""TMA copies of the `matvec_tma` kernels: address tables of a token's experts and of stages.

Every tensor has one element per thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import expect, tma_copy
from auraflux.ops.hopper.shared_memory import long_at, put_long


@gluon.jit
def put_chosen(
    table, tid, chosen, stack, FIRST: gl.constexpr, ARRAYS: gl.constexpr, K: gl.constexpr, HAS_SHARED: gl.constexpr
):  # fmt: skip
    """Store the addresses of each slot's expert arrays in a table. A shared expert's slot is the first."""
    lane, expert = tid % 32, chosen.to(gl.int64)
    at, there = table + ((lane + HAS_SHARED) * ARRAYS + FIRST) * 8, (tid < 32) & (lane < K)
    put_long(at, stack.packed.to(gl.int64) + expert * stack.step * 4, there)
    put_long(at + 8, stack.scales.to(gl.int64) + expert * stack.scale_step * 2, there)
    put_long(at + 16, stack.biases.to(gl.int64) + expert * stack.scale_step * 2, there)


@gluon.jit
def put_shared_expert(table, tid, weight, FIRST: gl.constexpr):
    """Store the addresses of the shared expert's arrays in the table."""
    at, there = table + FIRST * 8 + tid * 0, tid == 0
    put_long(at, weight.packed.to(gl.int64) + tid * 0, there)
    put_long(at + 8, weight.scales.to(gl.int64) + tid * 0, there)
    put_long(at + 16, weight.biases.to(gl.int64) + tid * 0, there)


@gluon.jit
def copy_array(ring, bars, sources, n, spot, p, there, ARRAYS: gl.constexpr, WIDTH: gl.constexpr):
    """Copy array p of stage n: 8 rows of codes, scales or biases of WIDTH inputs; array 0 also announces the bytes of all."""
    HALF: gl.constexpr = WIDTH // 2 * 9
    STAGE: gl.constexpr = HALF * (ARRAYS // 3)
    codes, bar = p % 3 == 0, bars + spot * 8
    to = ring + spot * STAGE + (p // 3 * HALF + gl.where(codes, 0, 4 * WIDTH + (p % 3 - 1) * (WIDTH // 4)))
    expect(bar, p * 0 + STAGE, there & (p == 0))
    tma_copy(to, long_at(sources + (n * ARRAYS + p) * 8), gl.where(codes, 4 * WIDTH, WIDTH // 4), bar, there)


@gluon.jit
def put_source(sources, table, entry, slot, row0, there, ARRAYS: gl.constexpr, WIDTH: gl.constexpr):
    """Store the source address of a stage's array: entry ARRAYS n + p is of stage n."""
    p = entry % ARRAYS
    source = long_at(table + (slot * ARRAYS + p) * 8) + row0.to(gl.int64) * gl.where(p % 3 == 0, WIDTH // 2, WIDTH // 32)
    put_long(sources + entry * 8, source, there)


@gluon.jit
def inputs_at(at):
    """Load a lane's part of x, in the order of `paired`."""
    text: gl.constexpr = "ld.shared.v4.b32 {$0,$1,$2,$3},[$8]; ld.shared.v4.b32 {$4,$5,$6,$7},[$8+16];"
    registers: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,~{memory}"
    return gl.inline_asm_elementwise(text, registers, [at], (gl.int32,) * 8, is_pure=False, pack=1)
