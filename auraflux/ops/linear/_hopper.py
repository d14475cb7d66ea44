"""Four-bit affine products for few tokens on Hopper: how a warp multiplies codes is in `_nibbles.py`.

y[m, n] = Σ_k x[m, k] (code[n, k] scale[n, k/64] + bias[n, k/64]); codes eight to a word, low nibble first.

- One token needs one column of eight, so `matvec` gives column c the x of group c: eight groups share their x registers.
- Warps split K and never wait for each other: each fills its own ring in shared memory by `cp.async`.
- Weights are requested before `griddepcontrol.wait`, x after it: the gap between launches disappears behind the kernel before.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from auraflux.ops._triton import INTERPRETED, capability
from auraflux.ops.linear._nibbles import (
    ADDED_X,
    AWAIT,
    COMMIT,
    COPY8,
    COPY16,
    NORMED_X,
    SYNC,
    X_GLOBAL,
    X_SHARED,
    bf16_at,
    codes_at,
    copy,
    four_at,
    group_sums,
    load_normed_x,
    load_x,
    put,
    run,
    shared,
    sum_lanes,
    sum_x,
    wait_ptx,
    word_at,
)
from auraflux.quant import QTensor

CHUNK = 16  # tokens of a launch
MOST_CHUNKS = 4  # at 64 tokens, four launches take 68 µs on an H200, a weight of 8192 x 8192 written out 103
MOST_WEIGHTS = 4  # that one launch multiplies one token by
WIDEST = 16384  # inputs of one token that its threads hold
WARPS = 8
SHARED_NBYTES = 227 << 10  # of a program
HOPPER = (9, 0)

Normed = tuple[Tensor | None, Tensor, Tensor, float]


@gluon.constexpr_function
def _halves_ptx(row_nbytes, rows):
    """128 bytes of each row; a lane copies 16 bytes of rows r, r + 4, r + 8 ... ($1: to even fours, $2: to odd fours).

    The first half of the rows begins at $3, the second at $4.
    """
    text = "{.reg .pred p; setp.ne.b32 p,$5,0; mov.b32 $0,0;"
    for i in range(rows // 4):
        half, at = divmod(4 * i, rows // 2)
        text += f"@p cp.async.cg.shared.global.L2::256B [${1 + i % 2}+{512 * i}],[${3 + half}+{at * row_nbytes}],16;"
    return text + "}"


@gluon.jit
def _copy_halves(slot, lane, first, second, there, K: gl.constexpr, ROWS: gl.constexpr):
    """128 bytes of each of ROWS rows; half of them begin at `first`, half at `second`."""
    r, chunk = lane // 8, lane % 8
    even, odd = slot + r * 128 + (chunk ^ r) * 16, slot + r * 128 + (chunk ^ (r + 4)) * 16
    mine = r * (K // 2) + chunk * 16
    args = [even, odd, (first + mine).to(gl.int64), (second + mine).to(gl.int64), there.to(gl.int32)]
    gl.inline_asm_elementwise(_halves_ptx(K // 2, ROWS), "=r,r,r,l,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def matvec(
    x, delta, norm, total, eps, w, s, b, y, w1, s1, b1, y1, w2, s2, b2, y2, w3, s3, b3, y3, end0, end1, end2,
    COUNT: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, W: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """One token, 16 rows a program. Warp v takes runs v, v + W, ... of eight groups; D half runs of codes are in flight.

    Up to four weights have their programs one after the other, the first `end0` of them work for the first. GATED takes eight
    rows of each of two weights, and stores silu(first) * second.

    With a norm, x and delta are the residual stream and what is added to it: every program adds and weighs for itself, one of
    them stores the sum, and the factor that the squares give is applied to the results.
    """
    QUADS: gl.constexpr = K // 256
    RUNS: gl.constexpr = (QUADS + 1) // 2
    MINE: gl.constexpr = (RUNS + W - 1) // W
    PITCH: gl.constexpr = 16 * MINE
    PER: gl.constexpr = D * 2048 + 32 * PITCH
    ROWS: gl.constexpr = 8 if GATED else 16
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    program = gl.program_id(0)
    before = 0 * program
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if program >= end0:
            w, s, b, y, before = w1, s1, b1, y1, end0
    if COUNT > 2:  # noqa: SIM102 - decided when the kernel is compiled
        if program >= end1:
            w, s, b, y, before = w2, s2, b2, y2, end1
    if COUNT > 3:  # noqa: SIM102 - decided when the kernel is compiled
        if program >= end2:
            w, s, b, y, before = w3, s3, b3, y3, end2
    row0 = (program - before).to(gl.int64) * ROWS
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * 2048
    first = w + row0 * (K // 2) + warp * 256
    second = (w1 if GATED else w + 8 * (K // 2)) + row0 * (K // 2) + warp * 256
    for d in gl.static_range(D):
        ahead = d // 2 * W * 256 + d % 2 * 128
        there = 2 * (warp + d // 2 * W) + d % 2 < QUADS
        _copy_halves(base + d * 2048, lane, first + ahead, second + ahead, there, K, 16)
        if d == 0:
            for k in gl.static_range(MINE):
                e = lane + 32 * k
                quad, row = (warp + e % (2 * MINE) // 2 * W) * 2 + e % 2, e // (2 * MINE)
                at = (row0 + row) * QUADS + quad
                s_at, b_at = (s + at).to(gl.int64), (b + at).to(gl.int64)
                if GATED:
                    s_at = gl.where(row < 8, s_at, (s1 + (at - 8 * QUADS)).to(gl.int64))
                    b_at = gl.where(row < 8, b_at, (b1 + (at - 8 * QUADS)).to(gl.int64))
                copy(COPY8, scales + e * 8, s_at, quad < QUADS)
                copy(COPY8, scales + 16 * PITCH + e * 8, b_at, quad < QUADS)
        run(COMMIT, lane)
    run(AWAIT, lane)
    xs = ()
    squares = (tid * 0).to(gl.float32)
    for i in gl.static_range(MINE):
        begin = (warp + i * W) * 512 + g * 64
        mine_at = gl.minimum(begin, K - 64) + t * 16
        x_at = (x + mine_at).to(gl.int64)
        if norm is None:
            xs += (load_x(X_GLOBAL, "=r,=r,=r,=r,=r,=r,=r,=r,l,l", x_at, x_at + 16),)  # type: ignore[assignment]
        else:
            norm_at, stores = (norm + mine_at).to(gl.int64), (begin < K) & (program == 0)
            if delta is None:
                got = load_normed_x(NORMED_X, x_at, norm_at, x_at, x_at, stores)
            else:
                delta_at, total_at = (delta + mine_at).to(gl.int64), (total + mine_at).to(gl.int64)
                got = load_normed_x(ADDED_X, x_at, norm_at, delta_at, total_at, stores)
            xs += ((got[0], got[1], got[2], got[3], got[4], got[5], got[6], got[7]),)  # type: ignore[assignment]
            squares += gl.where(begin < K, got[8], 0.0)
    total0 = (tid * 0).to(gl.float32)
    total1 = total0
    mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32
    for i in gl.static_range(MINE):
        X = sum_x(xs[i])
        r0, r1, r2, r3 = X[0], X[0], X[0], X[0]
        for h in gl.static_range(2):
            slot = base + (2 * i + h) % D * 2048
            run(wait_ptx(D - 1), lane)
            ws = ()
            for j in gl.static_range(4):
                ws += (codes_at(slot + (mine ^ (32 * j))),)  # type: ignore[assignment]
            if 2 * i + h + D < 2 * MINE:
                run(SYNC, lane)
                next_run = (2 * i + h + D) // 2
                further = next_run * W * 256 + (h + D) % 2 * 128
                more = 2 * (warp + next_run * W) + (h + D) % 2 < QUADS
                _copy_halves(slot, lane, first + further, second + further, more, K, 16)
            run(COMMIT, lane)
            for j in gl.static_range(4):
                c = group_sums(ws[j], xs[i], X, 1)
                keep = t == 2 * h + j // 2
                if j % 2 == 0:
                    r0, r2 = gl.where(keep, c[0], r0), gl.where(keep, c[2], r2)
                else:
                    r1, r3 = gl.where(keep, c[1], r1), gl.where(keep, c[3], r3)
        at = scales + g * PITCH + i * 16 + t * 4
        s0, s1_, b0, b1_ = word_at(at), word_at(at + 8 * PITCH), word_at(at + 16 * PITCH), word_at(at + 24 * PITCH)
        # a lane's two groups lie in one quad
        live = 2 * (warp + i * W) + t // 2 < QUADS
        sum0 = bf16_at(s0, 0) * r0 + bf16_at(s0, 1) * r1 + bf16_at(b0, 0) * X[0] + bf16_at(b0, 1) * X[1]
        sum1 = bf16_at(s1_, 0) * r2 + bf16_at(s1_, 1) * r3 + bf16_at(b1_, 0) * X[0] + bf16_at(b1_, 1) * X[1]
        total0 += gl.where(live, sum0, 0.0)
        total1 += gl.where(live, sum1, 0.0)
    gl.thread_barrier()
    put(ring + warp * 256 + lane * 4, total0)
    put(ring + warp * 256 + lane * 4 + 128, total1)
    if norm is not None:
        put(ring + W * 256 + warp * 4, sum_lanes(squares))
    gl.thread_barrier()
    out = (tid * 0).to(gl.float32)
    for k in gl.static_range(4 * W):
        out += word_at(ring + k // 4 * 256 + tid % 16 * 16 + k % 4 * 4).to(gl.float32, bitcast=True)
    factor = out
    if norm is not None:
        length = (tid * 0).to(gl.float32)
        for v in gl.static_range(W):
            length += word_at(ring + W * 256 + v * 4 + tid * 0).to(gl.float32, bitcast=True)
        factor = 1.0 / gl.sqrt(length / K + eps)
        out *= factor
    if GATED:
        up = (tid * 0).to(gl.float32)
        for k in gl.static_range(4 * W):
            up += word_at(ring + k // 4 * 256 + (tid % 8 + 8) * 16 + k % 4 * 4).to(gl.float32, bitcast=True)
        if norm is not None:
            up *= factor
        # as two products stored in bf16 would have it
        out, up = out.to(gl.bfloat16).to(gl.float32), up.to(gl.bfloat16).to(gl.float32)
        out = out / (1.0 + gl.exp(-out)) * up
    gl.store(y + row0 + tid, out.to(gl.bfloat16), tid < ROWS)
    memory._keep_alive()


@gluon.jit
def _copy_x(slot, lane, source, there, M, K: gl.constexpr, TILES: gl.constexpr):
    """256 values of x of each token, 16-byte chunks swizzled by token."""
    for token in gl.static_range(8 * TILES):
        copy(COPY16, slot + token * 512 + ((lane ^ (token % 8)) * 16), source + lane * 8 + token * K, there & (token < M))


@gluon.jit
def matmul16(x, w, s, b, y, M, N, K: gl.constexpr, R: gl.constexpr, TILES: gl.constexpr, W: gl.constexpr, D: gl.constexpr):
    """Up to 8 TILES tokens, 16R rows a program. Warp v takes quads v, v + W, ... of four groups; a slot holds codes and x."""
    QUADS: gl.constexpr = K // 256
    MINE: gl.constexpr = (QUADS + W - 1) // W
    CODES: gl.constexpr = 2048 * R
    SLOT: gl.constexpr = CODES + 4096 * TILES
    SUMS: gl.constexpr = 4 * R * TILES
    BIASES: gl.constexpr = 128 * R * MINE
    PER: gl.constexpr = D * SLOT + 2 * BIASES
    tid = gl.arange(0, 32 * W, gl.BlockedLayout([1], [32], [W], [0]))
    warp, lane = tid // 32, tid % 32
    g, t = lane // 4, lane % 4
    row0 = gl.program_id(0).to(gl.int64) * (16 * R)
    memory, ring = shared(PER * W, tid)
    base = ring + warp * PER
    scales = base + D * SLOT
    first, second = w + row0 * (K // 2), w + (row0 + 8 * R) * (K // 2)
    for d in gl.static_range(D):
        ahead = (warp + d * W) * 128
        _copy_halves(base + d * SLOT, lane, first + ahead, second + ahead, warp + d * W < QUADS, K, 16 * R)
    for n in gl.static_range((16 * R * MINE + 31) // 32):
        e = lane + 32 * n
        quad = warp + e % MINE * W
        there = (e < 16 * R * MINE) & (quad < QUADS)
        copy(COPY8, scales + e * 8, s + (row0 + e // MINE) * QUADS + quad, there)
        copy(COPY8, scales + BIASES + e * 8, b + (row0 + e // MINE) * QUADS + quad, there)
    run(AWAIT, lane)
    for d in gl.static_range(D):
        _copy_x(base + d * SLOT + CODES, lane, x + (warp + d * W) * 256, warp + d * W < QUADS, M, K, TILES)
        run(COMMIT, lane)
    acc = ((tid * 0).to(gl.float32),) * SUMS
    mine, x_mine = g * 128 + ((t // 2) ^ (g % 2)) * 16 + (t % 2) * 8 + (g // 2) * 32, g * 512 + ((2 * t) ^ g) * 16
    slot = base
    for i in range(MINE):
        q = warp + i * W
        run(wait_ptx(D - 1), lane)
        ss = ()
        bs = ()
        for r in gl.static_range(2 * R):
            at = scales + ((g + 8 * r) * MINE + i) * 8
            ss += (four_at(at),)  # type: ignore[assignment]
            bs += (four_at(at + BIASES),)  # type: ignore[assignment]
        for j in gl.static_range(4):
            xs = ()
            X = ()
            new = ()
            for m in gl.static_range(TILES):
                tile = slot + (CODES + m * 4096 + j * 128)
                xm = load_x(X_SHARED, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", tile + x_mine, tile + (x_mine ^ 16))
                xs, X = xs + xm, X + sum_x(xm)
            for r in gl.static_range(R):
                c = group_sums(codes_at(slot + r * 2048 + (mine ^ (32 * j))), xs, X, TILES)
                for k in gl.static_range(4 * TILES):
                    a = acc[r * 4 * TILES + k] + bf16_at(ss[2 * r + k // 2 % 2], j) * c[k]
                    a += bf16_at(bs[2 * r + k // 2 % 2], j) * X[k // 4 * 2 + k % 2]
                    new += (gl.where(q < QUADS, a, acc[r * 4 * TILES + k]) if QUADS % W else a,)  # type: ignore[assignment]
            acc = new
        run(SYNC, lane)
        further = (q + D * W) * 128
        _copy_halves(slot, lane, first + further, second + further, q + D * W < QUADS, K, 16 * R)
        _copy_x(slot + CODES, lane, x + (q + D * W) * 256, q + D * W < QUADS, M, K, TILES)
        run(COMMIT, lane)
        slot = gl.where(slot == base + (D - 1) * SLOT, base, slot + SLOT)
    gl.thread_barrier()
    for k in gl.static_range(SUMS):
        put(ring + (warp * SUMS + k) * 128 + lane * 4, acc[k])
    gl.thread_barrier()
    for p in gl.static_range((SUMS + W - 1) // W):
        k2 = warp + p * W
        out = (tid * 0).to(gl.float32)
        for v2 in gl.static_range(W):
            out += word_at(ring + (v2 * SUMS + k2 % SUMS) * 128 + lane * 4).to(gl.float32, bitcast=True)
        row, token2 = row0 + k2 // (4 * TILES) * 16 + g + k2 % 4 // 2 * 8, k2 // 4 % TILES * 8 + 2 * t + k2 % 2
        gl.store(y + token2 * N + row, out.to(gl.bfloat16), (token2 < M) & (k2 < SUMS))
    memory._keep_alive()


def _plan(tokens: int, rows: int, width: int) -> tuple[int, int, int | None] | None:
    """Blocks of rows a program, slots of a ring, a cap on registers; None where a shape does not go."""
    if tokens == 1:
        # 128 registers: four programs of four warps on each multiprocessor
        deep, cap = (3, 128) if width <= 8192 else (2, None)
        return (1, deep, cap) if rows % 16 == 0 and width % 256 == 0 and width <= WIDEST else None
    if rows % 64 or width % 256:
        return None
    if rows >= 8192 and tokens <= 8 and width <= 8192:
        # two programs on each multiprocessor
        return 2, 1, 128
    block = 4 if rows >= 8192 else 2 if rows >= 4096 else 1
    deep = 2 if width > 2048 and rows < 8192 else 1
    tiles, mine = 1 if tokens <= 8 else 2, -(-width // 256 // WARPS)
    while WARPS * (deep * (2048 * block + 4096 * tiles) + 256 * block * mine) + 2048 > SHARED_NBYTES:
        if (block, deep) == (1, 1):
            return None
        block, deep = (block, 1) if deep == 2 else (block // 2, 1)
    return block, deep, None


def fits_hopper(x: Tensor, weight: QTensor) -> bool:
    """Whether the kernels here serve a product: 4 bits in groups of 64, all in bf16, whole runs of groups and of rows."""
    return (
        not INTERPRETED
        and x.shape[0] <= MOST_CHUNKS * CHUNK
        and weight.format == (4, 64, 1, torch.bfloat16)
        and x.dtype is torch.bfloat16
        and capability(x.device) == HOPPER
        and not (x.data_ptr() | weight.packed.data_ptr() | weight.scales.data_ptr()) % 16
        and _plan(min(x.shape[0], CHUNK), *weight.shape) is not None
        # the rest of the last chunk may be a single token
        and (x.shape[0] % CHUNK != 1 or _plan(1, *weight.shape) is not None)
    )


def multiply_hopper(x: Tensor, weight: QTensor, out: Tensor) -> None:
    """Tokens times a weight, into bf16 [T, N]."""
    for first in range(0, x.shape[0], CHUNK):
        _multiply_chunk(x[first : first + CHUNK], weight, out[first : first + CHUNK])


def _multiply_chunk(x: Tensor, weight: QTensor, out: Tensor) -> None:
    tokens, (rows, width) = x.shape[0], weight.shape
    if tokens == 1:
        multiply_hopper_one(x, [weight], [out])
        return
    plan = _plan(tokens, rows, width)
    assert plan is not None
    block, deep, cap = plan
    sizes = tokens, rows, width, block, 1 if tokens <= 8 else 2, WARPS, deep
    grid = (rows // (16 * block),)
    matmul16[grid](x, *_operands(weight), out, *sizes, num_warps=WARPS, maxnreg=cap, launch_pdl=True)


def multiply_hopper_one(
    x: Tensor, weights: Sequence[QTensor], outs: Sequence[Tensor], gated: bool = False, normed: Normed | None = None
) -> None:
    """One token times up to MOST_WEIGHTS weights of one width in one launch; gated: silu(first) * second, into one out.

    normed  x is first added to and normalised: what is added or None, the norm in float32, where the sum goes, eps
    """
    width = weights[0].shape[1]
    plan = _plan(1, weights[0].shape[0], width)
    assert plan is not None
    _, deep, cap = plan
    passed: list[Any] = []
    for number in range(MOST_WEIGHTS):
        passed += _operands(weights[number]) if number < len(weights) else [None] * 3
        passed.append(outs[number] if number < len(outs) else None)
    ends = list(accumulate(weight.shape[0] // 16 for weight in weights))
    count, grid = (1, ends[0] * 2) if gated else (len(weights), ends[-1])
    passed += [ends[number] if number < count - 1 else None for number in range(MOST_WEIGHTS - 1)]
    matvec[(grid,)](
        x,
        *(normed or (None, None, None, 0.0)),
        *passed,
        count,
        gated,
        width,
        4,
        deep,
        num_warps=4,
        maxnreg=cap,
        launch_pdl=True,
    )


def _operands(weight: QTensor) -> list[Tensor]:
    assert weight.biases is not None
    return [weight.packed.view(torch.int8), weight.scales.view(torch.int64), weight.biases.view(torch.int64)]
