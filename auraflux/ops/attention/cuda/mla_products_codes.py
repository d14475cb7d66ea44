"""Few tokens times each head's rows of `kv_b_proj`, 4- or 8-bit codes in groups of 64, on Hopper.

A program loads the codes of a head to shared memory before the preceding kernel has ended, and all tokens use them from there.
The PTX is in `mla_products_ptx`.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops.attention.cuda.mla_products_ptx import (
    STEP_NBYTES,
    channel_sums,
    copy_rows,
    four_halves,
    group_products,
    pitch_of,
    put_four,
    put_totals,
    sixteen_at,
    store_eight,
    words_at,
)
from auraflux.ops.gpu.launch import launch
from auraflux.ops.hopper.copy import WAIT_ALL
from auraflux.ops.hopper.ptx import WAIT_AND_LAUNCH, bf16_at, run, shared
from auraflux.ops.hopper.reduce import sum_over
from auraflux.ops.hopper.shared_memory import float_pair_at
from auraflux.quant import QTensor

MOST_TOKENS = 64
FEW_HEADS = 64  # up to which two programs share a head
REGISTERS = 128  # two programs of eight warps on each multiprocessor
GROUP = gl.constexpr(64)
LARGER, BACK = gl.constexpr(2.0**64), gl.constexpr(2.0**69)  # scale of the factors; and back to integer codes
STEP = gl.constexpr(STEP_NBYTES)


class CodesShape(NamedTuple):
    """Compile-time shape: heads, rows per head, the first `nope` of them for keys, columns, bits, tokens per tile, warps."""

    heads: int
    rows: int
    nope: int
    width: int
    bits: int
    tokens: int
    warps: int


@gluon.jit
def _inputs(q, tile, tokens, head, g, t, q_pitch, HEADS: gl.constexpr, NOPE: gl.constexpr, T: gl.constexpr):
    """Load a lane's coordinates of T tokens: 16g + 4e + t of every 128."""
    xs = ()
    for m in gl.static_range(T):
        token = gl.minimum(tile * T + m + 0 * g, tokens - 1).to(gl.int64)
        for n in gl.static_range((NOPE + 127) // 128):
            row = gl.minimum(128 * n + 16 * g + t, NOPE - 13)
            xs += four_halves(q + (token * HEADS + head) * q_pitch + row, 8, False)
    return xs


@gluon.jit
def _factors(x, scales, biases, to, g, t, NOPE: gl.constexpr, M: gl.constexpr):
    """Store a token's coordinates times scales in shared memory, as two bf16 each; return their sum times biases."""
    PARTS: gl.constexpr = (NOPE + 127) // 128
    y = (g * 0).to(gl.float32)
    for n in gl.static_range(PARTS):
        there = 128 * n + 16 * g + t < NOPE
        high = ()
        low = ()
        for e in gl.static_range(4):
            value = bf16_at(x[4 * (M * PARTS + n) + e], 0)
            product = value * (bf16_at(scales[4 * n + e], 0) * LARGER)
            first = product.to(gl.bfloat16).to(gl.float32)
            high += (first,)  # type: ignore[assignment]
            low += (product - first,)  # type: ignore[assignment]
            y += gl.where(there, value * bf16_at(biases[4 * n + e], 0), 0.0)
        at = to + (8 * n + g) * STEP + M * 64 + t * 8
        put_four(at, high, there)
        put_four(at + 32, low, there)
    return sum_over(y, 32)


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def query_codes(
    q, w, s, b, out, tokens, q_pitch, SHAPE: gl.constexpr,
):  # fmt: skip
    """Sum the first NOPE rows of a head, each times its coordinate of T tokens at a time; grid (HEADS, C / 64W).

    A warp has 64 channels, one group of every row, and sums over rows. Scales differ from row to row, so they multiply the
    coordinates. A product of two bf16 numbers is split into two bf16: column 2m of the `mma` has the first of token m.
    """
    HEADS: gl.constexpr = SHAPE.heads
    ROWS: gl.constexpr = SHAPE.rows
    NOPE: gl.constexpr = SHAPE.nope
    C: gl.constexpr = SHAPE.width
    BITS: gl.constexpr = SHAPE.bits
    T: gl.constexpr = SHAPE.tokens
    W: gl.constexpr = SHAPE.warps
    GROUPS: gl.constexpr = C // GROUP
    STEPS: gl.constexpr = NOPE // 16
    STRIDE: gl.constexpr = C * BITS // 8
    SLICE: gl.constexpr = 8 * BITS * W
    PITCH: gl.constexpr = pitch_of(SLICE, 32)
    CHUNKS: gl.constexpr = SLICE // 16
    TOGETHER: gl.constexpr = 32 * W // CHUNKS
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    head, part = gl.program_id(0), gl.program_id(1)
    memory, codes = shared(NOPE * PITCH + W * STEPS * STEP, tid)
    row0 = head.to(gl.int64) * ROWS
    chunk = tid // CHUNKS
    source = w + (row0 + chunk) * STRIDE + part * SLICE + tid % CHUNKS * 16
    copy_rows(codes + chunk * PITCH + tid % CHUNKS * 16, source, NOPE // TOGETHER, TOGETHER * PITCH, TOGETHER * STRIDE)
    scales = ()
    biases = ()
    for n in gl.static_range((NOPE + 127) // 128):
        at = (row0 + gl.minimum(128 * n + 16 * g + t, NOPE - 13)) * GROUPS + part * W + warp
        scales, biases = scales + four_halves(s + at, 8 * GROUPS, True), biases + four_halves(b + at, 8 * GROUPS, True)
    run(WAIT_AND_LAUNCH, lane)
    factors = codes + NOPE * PITCH + warp * (STEPS * STEP)
    mine = codes + t * PITCH + warp * (8 * BITS) + g * BITS
    xs = _inputs(q, 0, tokens, head, g, t, q_pitch, HEADS, NOPE, T)
    for tile in range((tokens + T - 1) // T):
        y = _factors(xs, scales, biases, factors, g, t, NOPE, 0)
        for m in gl.static_range(1, T):
            y = gl.where(t == m, _factors(xs, scales, biases, factors, g, t, NOPE, m), y)
        if T == 4:
            # fewer tokens fit one tile
            xs = _inputs(q, tile + 1, tokens, head, g, t, q_pitch, HEADS, NOPE, T)
        run(WAIT_ALL, lane)
        gl.thread_barrier()
        c = channel_sums(mine, factors + g * 32 + t * 8, BITS, STEPS, PITCH)
        found = ()
        for j in gl.static_range(4):
            even, odd = c[4 * j] + c[4 * j + 1], c[4 * j + 2] + c[4 * j + 3]
            found += (even * BACK + y, odd * (BACK / 16.0 if BITS == 4 else BACK) + y)  # type: ignore[assignment]
        token = tile * T + t
        to = out + (token.to(gl.int64) * HEADS + head) * C + (part * W + warp) * GROUP + g * 8
        store_eight(to, found, (t < T) & (token < tokens))
        gl.thread_barrier()
    memory._keep_alive()


@gluon.jit(do_not_specialize_on_alignment=["tokens"])
def output_codes(
    x, w, s, b, out, tokens, x_pitch, SHAPE: gl.constexpr,
):  # fmt: skip
    """Multiply eight tokens at a time by 16W rows of a head, after its first SKIP; grid (HEADS, row blocks).

    A warp loads 16 rows to a region of shared memory that only it reads. Sums over the tokens' groups, which the biases need,
    are computed once, split among warps.
    """
    HEADS: gl.constexpr = SHAPE.heads
    ROWS: gl.constexpr = SHAPE.rows
    SKIP: gl.constexpr = SHAPE.nope
    C: gl.constexpr = SHAPE.width
    BITS: gl.constexpr = SHAPE.bits
    W: gl.constexpr = SHAPE.warps
    GROUPS: gl.constexpr = C // GROUP
    USED: gl.constexpr = ROWS - SKIP
    STRIDE: gl.constexpr = C * BITS // 8
    PITCH: gl.constexpr = pitch_of(STRIDE, 8 * BITS)
    CHUNKS: gl.constexpr = STRIDE // 16
    TOGETHER: gl.constexpr = 32 // CHUNKS
    WORDS: gl.constexpr = GROUPS // 2
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    head, row0 = gl.program_id(0), gl.program_id(1) * (16 * W) + warp * 16
    memory, base = shared(16 * W * PITCH + GROUPS * 32, tid)
    totals, codes = base + 16 * W * PITCH, base + warp * (16 * PITCH)
    first = head.to(gl.int64) * ROWS + SKIP + row0
    chunk = lane // CHUNKS
    source = w + (first + chunk) * STRIDE + lane % CHUNKS * 16
    copy_rows(codes + chunk * PITCH + lane % CHUNKS * 16, source, 16 // TOGETHER, TOGETHER * PITCH, TOGETHER * STRIDE)
    at = (first + g) * GROUPS
    s0, s1 = words_at(s + at, WORDS), words_at(s + at + 8 * GROUPS, WORDS)
    b0, b1 = words_at(b + at, WORDS), words_at(b + at + 8 * GROUPS, WORDS)
    run(WAIT_AND_LAUNCH, lane)
    mine = codes + g * PITCH + t * (2 * BITS)
    for tile in range((tokens + 7) // 8):
        token = tile * 8 + g
        there = token < tokens
        x_at = x + (gl.minimum(token, tokens - 1).to(gl.int64) * HEADS + head) * x_pitch + t * 16
        xs = ()
        for k in gl.static_range(GROUPS):
            xs += (sixteen_at(x_at + k * GROUP, there),)  # type: ignore[assignment]
        for n in gl.static_range((GROUPS + W - 1) // W):
            group = warp + n * W
            some = sixteen_at(x_at + gl.minimum(group, GROUPS - 1) * GROUP, there)
            put_totals(totals + group * 32 + t * 8, some, (g == 0) & (group < GROUPS))
        run(WAIT_ALL, lane)
        gl.thread_barrier()
        zero = (tid * 0).to(gl.float32)
        by_code = (zero, zero, zero, zero)
        by_bias = (zero, zero, zero, zero)
        for k in gl.static_range(GROUPS):
            c, X = group_products(mine + k * (8 * BITS), xs[k], BITS, PITCH), float_pair_at(totals + k * 32 + t * 8)
            sa, sb = bf16_at(s0[k // 2], k % 2), bf16_at(s1[k // 2], k % 2)
            ba, bb = bf16_at(b0[k // 2], k % 2), bf16_at(b1[k // 2], k % 2)
            by_code = (by_code[0] + sa * c[0], by_code[1] + sa * c[1], by_code[2] + sb * c[2], by_code[3] + sb * c[3])
            by_bias = (by_bias[0] + ba * X[0], by_bias[1] + ba * X[1], by_bias[2] + bb * X[0], by_bias[3] + bb * X[1])
        for i in gl.static_range(4):
            found = tile * 8 + 2 * t + i % 2
            to = out + (found.to(gl.int64) * HEADS + head) * USED + row0 + g + i // 2 * 8
            gl.store(to, (by_code[i] * BACK + by_bias[i]).to(gl.bfloat16), found < tokens)
        gl.thread_barrier()
    memory._keep_alive()


def project_queries(q: Tensor, weight: QTensor, rows: int, out: Tensor) -> None:
    """Run `latent_query` of few tokens, into bf16 [T, H, C]."""
    (tokens, heads, nope), width = q.shape, weight.shape[1]
    warps, together = min(8 if heads > FEW_HEADS and tokens <= 4 else 4, width // 64), tokens if tokens < 3 else 4
    shape = CodesShape(heads, rows, nope, width, weight.bits, together, warps)
    passed = q, weight.packed.view(torch.int8), weight.scales, weight.biases, out, tokens, q.stride(1)
    launch(query_codes, (heads, width // (64 * warps)))(*passed, shape, num_warps=warps, launch_pdl=True)


def project_outputs(v: Tensor, weight: QTensor, nope: int, out: Tensor) -> None:
    """Run `latent_output` of few tokens, into bf16 [T, H, rows - nope]."""
    (tokens, heads, width), used = v.shape, out.shape[2]
    warps = 8 if heads > FEW_HEADS and used % 128 == 0 else 4
    shape = CodesShape(heads, nope + used, nope, width, weight.bits, 8, warps)
    passed = v, weight.packed.view(torch.int8), weight.scales, weight.biases, out, tokens, v.stride(1)
    launch(output_codes, (heads, used // (16 * warps)))(*passed, shape, num_warps=warps, maxnreg=REGISTERS, launch_pdl=True)
