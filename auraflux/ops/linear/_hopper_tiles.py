"""Four-bit affine products for tens of tokens on Hopper, in Gluon: weights are made in registers, for `wgmma` to multiply.

A program multiplies R rows of a weight by all tokens of a tile, over a share of K. Rows are the matrix units' M: a lane holds
codes of rows g and g + 8, takes them apart by nibble planes (`_nibbles.py`), and one fused multiply-add in pairs of bf16 makes
them what a weight written out in bf16 would be. Tokens are N, and lie in shared memory.

- Codes and tokens come by the copy engine, which one more warp feeds, in blocks of KB inputs.
- A lane reads 16 bytes of codes at once. That gives K an order of its own within a block, the same for all rows;
  `order_tokens` brings tokens into it first.
- Shares of K are added up by `add_shares`, in one order whatever finishes first.
"""

import triton
import triton.language as tl
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

from auraflux.ops._triton import silu

DEEP = gl.constexpr(1)
BF, F32, I32 = gl.bfloat16, gl.float32, gl.int32


@gluon.constexpr_function
def _weights_ptx(bits, j):
    """Weights of a pair of codes, 16 bits apart in a word: plane j of it, which lies in its even bytes.

    Whole numbers below 256, read as the bits of bf16, are themselves times 2**-133: times 2**127 they are code / 64.
    """
    odd = bits * j % 8
    mask, up = hex(((1 << bits) - 1 << odd) * 0x10001), hex((254 - odd << 7) * 0x10001)
    return (
        f"{{.reg .b32 r,up,zero; mov.b32 up,{up}; mov.b32 zero,0; and.b32 r,$1,{mask};"
        "fma.rn.bf16x2 r,r,up,zero; fma.rn.bf16x2 $0,r,$3,$5;}"
    )


@triton.jit
def order_tokens(x, out, tokens, K, padded, BITS: tl.constexpr, T: tl.constexpr, KB: tl.constexpr, BLOCK: tl.constexpr):
    """Write tokens [tiles, K / 64, T, 64] in the order in which lanes take codes apart; zeros where there are none.

    Lane t of four has a quarter of a block's KB inputs, 16 for each 64: pairs (j, j + PLANES) of words v.
    """
    # what follows reads nothing but weights before it waits
    gdc_launch_dependents()
    gdc_wait()
    PLANES: tl.constexpr = 16 // BITS
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e, t, v, j = at % 2, at // 2 % 4, at // 8 % (8 // PLANES), at % 64 // (64 // PLANES)
    k = at // KB * KB + KB // 4 * t + at % KB // 64 * 16 + 2 * PLANES * v + j + PLANES * e
    value = tl.load(x + token.to(tl.int64) * K + k, mask=(k < K) & (token < tokens), other=0.0)
    tile = (token // T).to(tl.int64) * padded * T
    tl.store(out + tile + (at // 64 * T + token % T) * 64 + at % 64, value, mask=at < padded)


@gluon.constexpr_function
def _row_bases(rows, warps):
    """Rows that registers stand for, and those of warps; lanes have rows 1, 2, 4."""
    more, row = [8], 16 * warps
    while row < rows:
        more, row = [*more, row], 2 * row
    return [[row, 0] for row in more], [[16 << i, 0] for i in range(warps.bit_length() - 1)]


@gluon.constexpr_function
def _held(rows, warps, words):
    """[rows, 4 * words], of which lane t of four has words from t * words on."""
    more, across = _row_bases(rows, warps)
    mine = [[0, 1 << i] for i in range(words.bit_length() - 1)]
    lanes = [[0, words], [0, 2 * words], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(mine + more, lanes, across, [], [rows, 4 * words])


@gluon.jit
def _beside(held, j: gl.constexpr, A: gl.constexpr):
    """What lanes t hold for V words of 64 codes, [R, 4, V], beside the codes of the j-th 16: pairs of two words each."""
    R: gl.constexpr = held.shape[0]
    if held.shape[2] == 4:
        even, odd = gl.split(held.reshape(R, 4, 2, 2).permute(0, 1, 3, 2))
        held = even if j % 2 == 0 else odd
    return gl.convert_layout(gl.join(held, held).permute(0, 2, 1, 3).reshape(R, 16), A)


@gluon.jit
def _weights(words, s, b, j: gl.constexpr, A: gl.constexpr):
    """The weights of the j-th 16 of 64 codes, as an operand of the matrix units."""
    BITS: gl.constexpr = words.shape[2] * 2
    PLANE: gl.constexpr = j * 4 // BITS
    if PLANE * BITS >= 8:
        words = words >> 8
    args = [_beside(words, j, A), _beside(s, j, A), _beside(b, j, A)]
    return gl.inline_asm_elementwise(_weights_ptx(BITS, PLANE), "=r,r,r,r,r,r,r", args, BF, is_pure=True, pack=2)


@gluon.jit
def _words(words, KB: gl.constexpr):
    """The words of lanes for each 64 inputs, [R, 4, V] each."""
    R: gl.constexpr = words.shape[0]
    V: gl.constexpr = words.shape[1] // (KB // 16)
    if KB == 256:
        even, odd = gl.split(words.reshape(R, 4, 2, 2, V).permute(0, 1, 4, 2, 3))
        first, third = gl.split(even)
        second, fourth = gl.split(odd)
        found = (first, second, third, fourth)
    else:
        found = gl.split(words.reshape(R, 4, 2, V).permute(0, 1, 3, 2))
    return found


@gluon.jit
def _line(scales, biases, line, k, inside, width, G: gl.constexpr, V: gl.constexpr):
    """Scales and biases of the groups that inputs k are in, for pairs of codes: twice in a word, for V words."""
    there = inside & (k < width)
    # see `_weights_ptx`: 2**133 in two steps
    s = (gl.load(scales + line + k // G, mask=there, other=0.0).to(F32) * 64.0).to(BF).to(gl.int16, bitcast=True)
    b = gl.load(biases + line + k // G, mask=there, other=0.0).to(gl.int16, bitcast=True)
    s, b = s.to(I32) & 0xFFFF, b.to(I32) & 0xFFFF
    s, b = s | (s << 16), b | (b << 16)
    s, b = gl.join(s, s), gl.join(b, b)
    if V == 4:
        s, b = gl.join(s, s).reshape(s.shape[0], 4, 4), gl.join(b, b).reshape(s.shape[0], 4, 4)
    return s, b


@gluon.jit
def _request_codes(w0, w1, w2, codes, bar, row0, word, which, there, COUNT: gl.constexpr):
    tma.async_copy_global_to_shared(w0, [row0, word], bar, codes, pred=there & (which == 0))
    if COUNT > 1:
        tma.async_copy_global_to_shared(w1, [row0, word], bar, codes, pred=there & (which == 1))
    if COUNT > 2:
        tma.async_copy_global_to_shared(w2, [row0, word], bar, codes, pred=there & (which == 2))


@gluon.jit
def _feed(
    xs, w0, w1, w2, X, C, full, empty, row0, which, x_row, first, count,
    COUNT: gl.constexpr, T: gl.constexpr, KB: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = xs.block_type.shape[0]
    EACH: gl.constexpr = KB // 64 * T
    WORDS: gl.constexpr = C.shape[2]
    NBYTES: gl.constexpr = C.shape[1] * WORDS * 4 + EACH * 128
    for n in gl.static_range(ST):
        mbarrier.expect(full.index(n), NBYTES, pred=n < count)
        _request_codes(w0, w1, w2, C.index(n), full.index(n), row0, (first + n) * WORDS, which, n < count, COUNT)
    # codes are older than the kernel before, tokens are not
    gdc_wait()
    gdc_launch_dependents()
    for i in range(count):
        stage = i % ST
        bar = full.index(stage)
        if i >= ST:
            mbarrier.wait(empty.index(stage), (i // ST - 1) % 2)
            mbarrier.expect(bar, NBYTES)
            _request_codes(w0, w1, w2, C.index(stage), bar, row0, (first + i) * WORDS, which, i < count, COUNT)
        for n in gl.static_range(EACH // BOX):
            some = X.index(stage).slice(n * BOX, BOX, dim=0)
            tma.async_copy_global_to_shared(xs, [x_row + (first + i) * EACH + n * BOX, 0], bar, some)


@gluon.jit
def _multiply(
    X, C, full, empty, scales, biases, out, part, rows, width, tokens, row0, tile, first, count,
    T: gl.constexpr, KB: gl.constexpr, G: gl.constexpr, ST: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = C.shape[1]
    LANE: gl.constexpr = C.shape[2] // 4
    V: gl.constexpr = LANE * 64 // KB
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, T, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ONE: gl.constexpr = _held(R, W, 1)
    # 64 inputs of a lane may be in two groups
    TWO: gl.constexpr = KB // 4 > G
    row, t = row0 + gl.arange(0, R, gl.SliceLayout(1, ONE)), gl.arange(0, 4, gl.SliceLayout(0, ONE))
    inside, line = (row < rows)[:, None], (gl.minimum(row, rows - 1).to(gl.int64) * (width // G))[:, None]
    k = (first * KB + t * (KB // 4))[None, :]
    s0, b0 = _line(scales, biases, line, k, inside, width, G, V)
    s1, b1 = _line(scales, biases, line, k + 32, inside, width, G, V) if TWO else (s0, b0)
    acc = gl.full([R, T], 0.0, F32, ACC)
    for i in range(count):
        mbarrier.wait(full.index(i % ST), i // ST % 2)
        words = _words(C.index(i % ST).load(_held(R, W, LANE)), KB)
        k += KB
        next_s0, next_b0 = _line(scales, biases, line, k, inside, width, G, V)
        next_s1, next_b1 = _line(scales, biases, line, k + 32, inside, width, G, V) if TWO else (next_s0, next_b0)
        for n in gl.static_range(KB // 64):
            s, b = (s0, b0) if n < 2 else (s1, b1)
            for j in gl.static_range(4):
                a = _weights(words[n], s, b, j, A)
                x = X.index(i % ST).slice(n * T, T, dim=0).permute((1, 0)).slice(16 * j, 16, dim=0)
                # one by one: a warp does not go on until all but the last of several products have begun
                acc = warpgroup_mma(a, x, acc, is_async=True)
                acc = warpgroup_mma_wait(DEEP, deps=[acc])
            if n == 0:
                # all that read the block before is done
                mbarrier.arrive(empty.index((i + ST - 1) % ST), pred=i > 0)
        s0, b0, s1, b1 = next_s0, next_b0, next_s1, next_b1
    acc = warpgroup_mma_wait(0, deps=[acc])
    if part is not None:
        r, c = gl.arange(0, R, gl.SliceLayout(1, ACC)), gl.arange(0, T, gl.SliceLayout(0, ACC))
        gl.store(part + (r[:, None] * T + c[None, :]), acc)
    else:
        OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, W], [0, 1])
        r, c = row0 + gl.arange(0, R, gl.SliceLayout(1, OUT)), tile * T + gl.arange(0, T, gl.SliceLayout(0, OUT))
        at = c.to(gl.int64)[None, :] * rows + r[:, None]
        gl.store(out + at, gl.convert_layout(acc.to(BF), OUT), mask=(r < rows)[:, None] & (c < tokens)[None, :])


@gluon.jit
def multiply_tiles(
    xs, w0, w1, w2, s0, b0, y0, s1, b1, y1, s2, b2, y2, part, end0, end1, rows0, rows1, rows2, width, tokens, blocks, share,
    COUNT: gl.constexpr, R: gl.constexpr, T: gl.constexpr, KB: gl.constexpr, G: gl.constexpr, ST: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """R rows times a tile of tokens over a share of K's blocks; grid (tiles of rows, shares, tiles of tokens).

    Up to three weights have their tiles of rows one after the other, the first `end0` are of the first. Where `part` is given,
    sums go there, float32 [shares, tiles of tokens, tiles of rows, R, T], and not to y.
    """
    at, split, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    # numbers, also where they are known when the kernel is compiled
    which, before, rows0 = 0 * at, 0 * at, 0 * at + rows0
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= end0:
            s0, b0, y0, rows0, which, before = s1, b1, y1, rows1, 0 * at + 1, end0
    if COUNT > 2:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= end1:
            s0, b0, y0, rows0, which, before = s2, b2, y2, rows2, 0 * at + 2, end1
    row0, first = (at - before) * R, split * share
    count = gl.minimum(share, blocks - first)
    if part is not None:
        part += ((split * gl.num_programs(2) + tile) * gl.num_programs(0) + at).to(gl.int64) * (R * T)
    X = gl.allocate_shared_memory(BF, [ST, KB // 64 * T, 64], xs.layout)
    C = gl.allocate_shared_memory(I32, [ST, R, w0.block_type.shape[1]], w0.layout)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(ST):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    gl.thread_barrier()
    x_row = tile * (blocks * (KB // 64) * T)
    gl.warp_specialize(
        [
            (
                _multiply,
                (X, C, full, empty, s0, b0, y0, part, rows0, width, tokens, row0, tile, first, count, T, KB, G, ST, W),
            ),
            (_feed, (xs, w0, w1, w2, X, C, full, empty, row0, which, x_row, first, count, COUNT, T, KB, ST)),
        ],
        [1],
        [24],
    )


@triton.jit
def add_shares(
    part, y0, y1, y2, end0, end1, rows0, rows1, rows2, tokens, tiles, shares,
    COUNT: tl.constexpr, GATED: tl.constexpr, R: tl.constexpr, T: tl.constexpr, BR: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Add up what programs found of BR rows and BT tokens, or gate one weight's sums with another's; grid (rows, tokens)."""
    gdc_wait()
    gdc_launch_dependents()
    at, r = tl.program_id(0) // (R // BR), tl.program_id(0) % (R // BR) * BR + tl.arange(0, BR)
    tile, c = tl.program_id(1) // (T // BT), tl.program_id(1) % (T // BT) * BT + tl.arange(0, BT)
    stride = tl.num_programs(1).to(tl.int64) // (T // BT) * tiles * (R * T)
    part += (tile * tiles + at).to(tl.int64) * (R * T) + (r[:, None] * T + c[None, :])
    found = tl.load(part)
    for share in range(1, shares):
        found += tl.load(part + share * stride)
    if GATED:
        part += end0 * R * T
        up = tl.load(part)
        for share in range(1, shares):
            up += tl.load(part + share * stride)
        found = silu(found) * up
    before, rows0 = 0 * at, 0 * at + rows0
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= end0:
            y0, rows0, before = y1, rows1, end0
    if COUNT > 2:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= end1:
            y0, rows0, before = y2, rows2, end1
    row, token = (at - before) * R + r, tile * T + c
    to = token.to(tl.int64)[None, :] * rows0 + row[:, None]
    tl.store(y0 + to, found.to(y0.dtype.element_ty), mask=(row < rows0)[:, None] & (token < tokens)[None, :])
