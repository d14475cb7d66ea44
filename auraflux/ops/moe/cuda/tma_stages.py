"""What programs of `matvec_tma` ask for: where the arrays of a token's experts begin, and those of stages.

PTX for what a thread does; every tensor has one element per thread.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.hopper.copy import expect, fetch
from auraflux.ops.hopper.shared_memory import long_at, put_long


@gluon.jit
def put_chosen(
    table, tid, chosen, stack, FIRST: gl.constexpr, PIECES: gl.constexpr, K: gl.constexpr, OWN: gl.constexpr
):  # fmt: skip
    """Leave in a table where the arrays of each slot's expert begin. A shared expert's slot is the first."""
    lane, expert = tid % 32, chosen.to(gl.int64)
    at, there = table + ((lane + OWN) * PIECES + FIRST) * 8, (tid < 32) & (lane < K)
    put_long(at, stack.packed.to(gl.int64) + expert * stack.step * 4, there)
    put_long(at + 8, stack.scales.to(gl.int64) + expert * stack.scale_step * 2, there)
    put_long(at + 16, stack.biases.to(gl.int64) + expert * stack.scale_step * 2, there)


@gluon.jit
def put_own(table, tid, own, FIRST: gl.constexpr):
    """The same of the shared expert."""
    at, there = table + FIRST * 8 + tid * 0, tid == 0
    put_long(at, own.packed.to(gl.int64) + tid * 0, there)
    put_long(at + 8, own.scales.to(gl.int64) + tid * 0, there)
    put_long(at + 16, own.biases.to(gl.int64) + tid * 0, there)


@gluon.jit
def ask(ring, bars, places, n, spot, p, there, PIECES: gl.constexpr, WIDTH: gl.constexpr):
    """Ask for piece p of stage n: 8 rows of codes, scales or biases of WIDTH inputs; the first also tells the bytes of all."""
    HALF: gl.constexpr = WIDTH // 2 * 9
    STAGE: gl.constexpr = HALF * (PIECES // 3)
    codes, bar = p % 3 == 0, bars + spot * 8
    to = ring + spot * STAGE + (p // 3 * HALF + gl.where(codes, 0, 4 * WIDTH + (p % 3 - 1) * (WIDTH // 4)))
    expect(bar, p * 0 + STAGE, there & (p == 0))
    fetch(to, long_at(places + (n * PIECES + p) * 8), gl.where(codes, 4 * WIDTH, WIDTH // 4), bar, there)


@gluon.jit
def place(places, table, entry, slot, row0, there, PIECES: gl.constexpr, WIDTH: gl.constexpr):
    """Leave where a stage's piece begins: entry PIECES n + p is of stage n."""
    p = entry % PIECES
    source = long_at(table + (slot * PIECES + p) * 8) + row0.to(gl.int64) * gl.where(p % 3 == 0, WIDTH // 2, WIDTH // 32)
    put_long(places + entry * 8, source, there)


@gluon.jit
def inputs_at(at):
    """A lane's part of x, as `paired` left it."""
    text: gl.constexpr = "ld.shared.v4.b32 {$0,$1,$2,$3},[$8]; ld.shared.v4.b32 {$4,$5,$6,$7},[$8+16];"
    registers: gl.constexpr = "=r,=r,=r,=r,=r,=r,=r,=r,r,~{memory}"
    return gl.inline_asm_elementwise(text, registers, [at], (gl.int32,) * 8, is_pure=False, pack=1)
