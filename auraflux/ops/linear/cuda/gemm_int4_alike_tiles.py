"""Rows of four-bit weights times a tile of tokens on Hopper, to the bit as `matvec_int4.py` multiplies one token.

There a warp takes every W-th run of eight groups, and lane t of four has groups 2t and 2t + 1 of each run: sums over runs, then
over lanes, then over warps. A group's products are four of 16 inputs, begun at -128 Σ x; `wgmma` adds those up as `mma` does.
So pairs of groups are taken in the order (warp, lane, run), and added up in three steps.

- Rows are the tensor cores' M: a lane holds codes of rows g and g + 8, as in `mma_int4.py`. Tokens are N, in shared memory.
- Codes, tokens and their sums come by TMA, which one more warp feeds: H pairs of groups at a time, so that H lanes' sums over
  runs are made side by side.
- Gated: g is of the first weight, g + 8 of the second, so that a lane has both sums of a result.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.ptx import bf16_at
from auraflux.ops.linear.cuda.matvec_int4 import gated_sum
from auraflux.ops.linear.cuda.row_copies import chosen

BF, F32, I32 = gl.bfloat16, gl.float32, gl.int32


class Weight(NamedTuple):
    """What belongs to the rows of a weight: scales and biases, where products go, and how many rows there are."""

    scales: Any
    biases: Any
    out: Any
    rows: int


@gluon.constexpr_function
def runs_of(K, W):
    """How many runs of eight groups a warp of `matvec_int4.py` has at most."""
    return ((K // 256 + 1) // 2 + W - 1) // W


@gluon.constexpr_function
def _held(rows, pairs, apart):
    """[rows, 16 * pairs] words of codes: lane (g, t) has of each group words 2t and 2t + 1 of rows g and g + 8.

    apart  the row that is g + 8 to a lane lies half of all rows further on
    """
    more, across = (rows // 2, 8) if apart else (8, 16)
    mine = [[0, 1], [0, 8], *[[0, 16]] * (pairs - 1), [more, 0]]
    lanes = [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]]
    warps = [[across << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout(mine, lanes, warps, [], [rows, 16 * pairs])


@gluon.constexpr_function
def _beside(groups, tokens, rows):
    """[groups, tokens] in all threads that have those tokens' sums."""
    mine = [[1 << i, 0] for i in range(groups.bit_length() - 1)]
    more = [[0, 8 << i] for i in range((tokens // 8).bit_length() - 1)]
    lanes, warps = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]], [[0, 0]] * ((rows // 16).bit_length() - 1)
    return gl.DistributedLinearLayout([*mine, [0, 1], *more], lanes, warps, [], [groups, tokens])


@gluon.constexpr_function
def _codes_ptx(j):
    """128 and a code, for both codes of step j in a word: a pair of bf16."""
    shift = f"shr.u32 r,$1,{4 * j};" if j else "mov.b32 r,$1;"
    return f"{{.reg .b32 r; {shift} lop3.b32 $0,r,0x000F000F,0x43004300,0xEA;}}"


@gluon.jit
def _split_groups(words, H: gl.constexpr):
    """Words [R, 16 H] of lanes by groups, [R, 4, 2] each."""
    R: gl.constexpr = words.shape[0]
    if H == 2:
        even, odd = gl.split(words.reshape(R, 2, 2, 4, 2).permute(0, 3, 4, 1, 2))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = (first, second, third, fourth)
    else:
        found = gl.split(words.reshape(R, 2, 4, 2).permute(0, 2, 3, 1))
    return found


@gluon.jit
def _split_sums(sums, H: gl.constexpr, COLUMN: gl.constexpr):
    """Sums of tokens [2 H, T] by groups."""
    T: gl.constexpr = sums.shape[1]
    if H == 2:
        even, odd = gl.split(sums.reshape(2, 2, T).permute(2, 0, 1))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = (
            gl.convert_layout(first, COLUMN), gl.convert_layout(second, COLUMN),
            gl.convert_layout(third, COLUMN), gl.convert_layout(fourth, COLUMN),
        )  # fmt: skip
    else:
        first, second = gl.split(sums.permute(1, 0))
        found = (gl.convert_layout(first, COLUMN), gl.convert_layout(second, COLUMN))  # type: ignore[assignment]
    return found


@gluon.jit
def _begin_group(words, X, sums, n: gl.constexpr, ACC: gl.constexpr):
    """Begin the products of a group of codes [R, 4, 2] with tokens: [R, T]."""
    R: gl.constexpr = words.shape[0]
    T: gl.constexpr = ACC.instr_shape[1]
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    pairs = gl.convert_layout(gl.join(words, words).permute(0, 2, 1, 3).reshape(R, 16), A)
    _, acc = gl.broadcast(gl.full([R, 1], 0.0, F32, ACC), (sums * -128.0)[None, :])
    for j in gl.static_range(4):
        a = gl.inline_asm_elementwise(_codes_ptx(j), "=r,r,r", [pairs], BF, is_pure=True, pack=2)
        x = X.slice(n * T, T, dim=0).permute((1, 0)).slice(16 * j, 16, dim=0)
        acc = warpgroup_mma(a, x, acc, is_async=True)
        if T > 32:
            # products of many tokens take long enough for the next codes to be made meanwhile, not sooner
            acc = warpgroup_mma_wait(1, deps=[acc])
    return acc


@gluon.jit
def _pair_sum(scales, biases, p: gl.constexpr, first, second, x0, x1):
    """As `matvec_int4.pair_sum`, for rows by tokens; scales and biases are those of pairs of groups in words."""
    s0, s1 = bf16_at(scales, 2 * p)[:, None], bf16_at(scales, 2 * p + 1)[:, None]
    b0, b1 = bf16_at(biases, 2 * p)[:, None], bf16_at(biases, 2 * p + 1)[:, None]
    found = gl.fma(s1, second, s0 * first)
    return gl.fma(b1, x1[None, :], gl.fma(b0, x0[None, :], found))


@gluon.jit
def _block_of(n, v, K: gl.constexpr, W: gl.constexpr, H: gl.constexpr, SPLIT: gl.constexpr):
    """The n-th H pairs of groups, of those of warp v or of all."""
    MINE: gl.constexpr = runs_of(K, W)
    EACH: gl.constexpr = 4 // H
    warp = v if SPLIT else n // (EACH * MINE)
    return (warp + n % MINE * W) * EACH + n // MINE % EACH


@gluon.jit
def _feed(
    xs, sums, codes, X, S, C, full, empty, row0, which, tile, v, K: gl.constexpr, W: gl.constexpr, H: gl.constexpr,
    ST: gl.constexpr, GATED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    STEPS: gl.constexpr = 4 // H * runs_of(K, W) * (1 if SPLIT else W)
    T: gl.constexpr = X.shape[1] // (2 * H)
    NBYTES: gl.constexpr = C.shape[1] * 64 * H + 2 * H * T * (128 + 4)
    for n in gl.static_range(min(ST, STEPS)):
        mbarrier.expect(full.index(n), NBYTES)
        _request_codes(codes, C.index(n), full.index(n), row0, _block_of(n + 0 * v, v, K, W, H, SPLIT), which, H, GATED)
    # codes are older than the kernel before, tokens are not
    gdc_wait()
    gdc_launch_dependents()
    for n in range(STEPS):
        stage = n % ST
        block, bar = _block_of(n, v, K, W, H, SPLIT), full.index(stage)
        if n >= ST:
            mbarrier.wait(empty.index(stage), (n // ST - 1) % 2)
            mbarrier.expect(bar, NBYTES)
            _request_codes(codes, C.index(stage), bar, row0, block, which, H, GATED)
        tma.async_copy_global_to_shared(xs, [(tile * (K // 64) + block * (2 * H)) * T, 0], bar, X.index(stage))
        tma.async_copy_global_to_shared(sums, [block * (2 * H), tile * T], bar, S.index(stage))


@gluon.jit
def _request_codes(codes, to, bar, row0, block, which, H: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        HALF: gl.constexpr = to.shape[0] // 2
        for i in gl.static_range(2):
            tma.async_copy_global_to_shared(codes[i], [row0, block * (16 * H)], bar, to.slice(i * HALF, HALF, dim=0))
    else:
        for i in gl.static_range(len(codes)):
            tma.async_copy_global_to_shared(codes[i], [row0, block * (16 * H)], bar, to, pred=which == i)


@gluon.jit
def _lines(scales, biases, block, inside, K: gl.constexpr, H: gl.constexpr):
    """Load scales and biases of the groups of a block."""
    there = inside & (block < K // (128 * H))
    at = gl.minimum(block, K // (128 * H) - 1)
    return gl.load(scales + at, there, 0), gl.load(biases + at, there, 0)


@gluon.jit
def _fetch_lines(scales, biases, K: gl.constexpr, H: gl.constexpr):
    """Bring the scales and biases of rows into the cache."""
    text: gl.constexpr = "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.b32 $0,0;"
    for first in gl.static_range(0, K // (128 * H), 32 // H):
        args = [(scales + first).to(gl.int64), (biases + first).to(gl.int64)]
        gl.inline_asm_elementwise(text, "=r,l,l", args, I32, is_pure=False, pack=1)


@gluon.jit
def _add_block(chains, words, X, sums, lines, there, H: gl.constexpr, ACC: gl.constexpr):
    """Add the products of H pairs of groups to the sums of as many lanes."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, ACC)
    groups, x = _split_groups(words, H), _split_sums(sums, H, COLUMN)
    new = ()
    for p in gl.static_range(H):
        a = _begin_group(groups[2 * p], X, x[2 * p], 2 * p, ACC)
        b = _begin_group(groups[2 * p + 1], X, x[2 * p + 1], 2 * p + 1, ACC)
        a, b = warpgroup_mma_wait(0, deps=[a, b])
        found = _pair_sum(lines[0], lines[1], p, a, b, x[2 * p], x[2 * p + 1])
        new += (chains[p] + (found if there is None else gl.where(there, found, 0.0)),)  # type: ignore[assignment]
    return new


@gluon.jit
def _multiply(
    own, also, factors, part, X, S, C, full, empty, row0, tile, v, count, padded, K: gl.constexpr, W: gl.constexpr,
    H: gl.constexpr, ST: gl.constexpr, GATED: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = C.shape[1]
    T: gl.constexpr = X.shape[1] // (2 * H)
    MINE: gl.constexpr = runs_of(K, W)
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [R // 16, 1], [16, T, 16])
    LINE: gl.constexpr = gl.SliceLayout(1, ACC)
    row = gl.arange(0, R, LINE)
    if GATED:
        second, row = row % 16 >= 8, row // 16 * 8 + row % 8
    inside = row0 + row < own.rows
    line = gl.minimum(row0 + row, own.rows - 1).to(gl.int64) * (K // (128 * H))
    scales, biases = own.scales + line, own.biases + line
    if GATED:
        scales = gl.where(second, also.scales + line, scales)
        biases = gl.where(second, also.biases + line, biases)
    _fetch_lines(scales, biases, K, H)
    n = 0 * v
    lines = _lines(scales, biases, _block_of(n, v, K, W, H, SPLIT), inside, K, H)
    zero = gl.full([R, T], 0.0, F32, ACC)
    total = zero
    for _ in range(1 if SPLIT else W):
        some = zero
        for _ in range(4 // H):
            chains = (zero,) * H
            for _ in range(MINE):
                stage = n % ST
                mbarrier.wait(full.index(stage), n // ST % 2)
                words = C.index(stage).load(_held(R, H, GATED))
                if GATED:
                    words = words.reshape(2, R // 16, 8, 16 * H).permute(1, 0, 2, 3).reshape(R, 16 * H)
                sums = S.index(stage).load(_beside(2 * H, T, R))
                following = _lines(scales, biases, _block_of(n + 1, v, K, W, H, SPLIT), inside, K, H)
                there = None if K % (512 * W) == 0 else _block_of(n, v, K, W, H, SPLIT) < K // (128 * H)
                chains = _add_block(chains, words, X.index(stage), sums, lines, there, H, ACC)
                mbarrier.arrive(empty.index(stage))
                lines, n = following, n + 1
            for p in gl.static_range(H):
                some += chains[p]
        total += some
    if SPLIT:
        r, c = gl.arange(0, R, LINE), tile * T + gl.arange(0, T, gl.SliceLayout(0, ACC))
        at = (v * padded + c).to(gl.int64) * gl.num_programs(2) + gl.program_id(2)
        gl.store(part + (at[None, :] * R + r[:, None]), total, mask=(c < count)[None, :])
    else:
        if factors is not None:
            total *= gl.load(factors + tile * T + gl.arange(0, T, gl.SliceLayout(0, ACC)))[None, :]
        _store(total, own.out, own.rows, count, row0, tile * T, GATED)


@gluon.jit
def _store(found, out, rows, count, row0, token0, GATED: gl.constexpr):
    M: gl.constexpr = found.shape[0]
    T: gl.constexpr = found.shape[1]
    if GATED:
        gate, up = gl.split(found.reshape(M // 16, 2, 8, T).permute(0, 2, 3, 1))
        found = gated_sum(gate, up).reshape(M // 2, T)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4] if GATED else [16, 2], [1, M // 16], [0, 1])
    r, c = row0 + gl.arange(0, found.shape[0], gl.SliceLayout(1, OUT)), token0 + gl.arange(0, T, gl.SliceLayout(0, OUT))
    at = c.to(gl.int64)[None, :] * rows + r[:, None]
    gl.store(out + at, gl.convert_layout(found.to(BF), OUT), mask=(r < rows)[:, None] & (c < count)[None, :])


@gluon.jit
def multiply_alike(
    xs, sums, factors, c0, c1, c2, c3, weights, ends, part, count, padded, K: gl.constexpr, W: gl.constexpr, T: gl.constexpr,
    R: gl.constexpr, H: gl.constexpr, ST: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """R rows by T tokens; grid (tiles of tokens, W or 1, tiles of rows of all weights).

    xs, sums  tokens in order [tiles * K / 64 * T, 64], and the sums of their groups [K / 64, padded]
    factors   what results are multiplied by [padded]; None for nothing
    c0 to c3  codes of each weight, for TMA; None where there are fewer
    part      where sums of each warp go, float32 [W, padded, tiles of rows * R]; None if a program has those of all
    """
    SPLIT: gl.constexpr = part is not None
    tile, v = gl.program_id(0), gl.program_id(1)
    codes = (c0,)
    if len(weights) > 1:
        codes += (c1,)  # type: ignore[assignment]
    if len(weights) > 2:
        codes += (c2,)  # type: ignore[assignment]
    if len(weights) > 3:
        codes += (c3,)  # type: ignore[assignment]
    own, number = chosen(gl.program_id(2), ends, [(each.scales, each.biases, each.out, 0 * v + each.rows) for each in weights])
    own = Weight(own[0], own[1], own[2], own[3])
    which = 0 * v
    for i in gl.static_range(len(ends)):
        which += (gl.program_id(2) >= ends[i]).to(I32)
    row0 = number * (R // 2 if GATED else R)
    X = gl.allocate_shared_memory(BF, [ST, 2 * H * T, 64], xs.layout)
    S = gl.allocate_shared_memory(F32, [ST, 2 * H, T], sums.layout)
    C = gl.allocate_shared_memory(I32, [ST, R, 16 * H], c0.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(ST):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    gl.thread_barrier()
    also = weights[1 if GATED else 0]
    gl.warp_specialize(
        [
            (_multiply, (own, also, factors, part, X, S, C, full, empty, row0, tile, v, count, padded, K, W, H, ST, GATED,
                         SPLIT)),
            (_feed, (xs, sums, codes, X, S, C, full, empty, row0, which, tile, v, K, W, H, ST, GATED, SPLIT)),
        ],
        [1],
        [24],
    )  # fmt: skip
