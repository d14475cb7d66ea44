"""Tens to hundreds of tokens times affine weights on Hopper, in Gluon: weights are dequantized in registers for `wgmma`.

A program multiplies R rows of a weight by all tokens of a tile, over a share of K. Rows are the tensor cores' M: a lane holds
codes of rows g and g + 8 and dequantizes them, in pairs, to bf16. Tokens are N, in shared memory.

- Codes and tokens are loaded by TMA from a producer warp, in blocks of KB inputs.
- A lane reads 16 bytes of codes at once. That permutes K within a block, identically for all rows; tokens are permuted to match
  beforehand (`wgmma_launch.py`).
- Integers below 256, reinterpreted as bf16 bits, are themselves times 2**-133. With scales times 2**69 and biases over 2**64,
  one fma makes weights over 2**64 of them, and sums are multiplied by 2**64 at the end.
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

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait

UP, DOWN, BACK = gl.constexpr(2.0**69), gl.constexpr(2.0**-64), gl.constexpr(2.0**64)
BF, F32, I32 = gl.bfloat16, gl.float32, gl.int32


class WeightRows(NamedTuple):
    """Scales, biases and result of a weight."""

    scales: Any
    biases: Any
    out: Any


class Tiles(NamedTuple):
    """Ends of the row tiles of the first and of the second weight, and rows of each weight."""

    end0: int | None
    end1: int | None
    rows0: int
    rows1: int | None
    rows2: int | None


@gluon.constexpr_function
def _weights_ptx(bits, j):
    """Return PTX for the weights of a pair of codes, 16 bits from each other in a word: its plane j, in the even bytes."""
    odd = bits * j % 8
    mask = hex(((1 << bits) - 1 << odd) * 0x10001)
    return f"{{.reg .b32 r; and.b32 r,$1,{mask}; fma.rn.bf16x2 $0,r,$3,$5;}}"


@gluon.constexpr_function
def held(rows, words, split_halves=False):
    """Return the layout [rows, 4 * words], 16 rows per warp: lane (g, t) has rows g and g + 8, and words from t * words on.

    split_halves  row g + 8 of a lane is half of all rows further on
    """
    more, across = (rows // 2, 8) if split_halves else (8, 16)
    mine = [[0, 1 << i] for i in range(words.bit_length() - 1)]
    lanes = [[0, words], [0, 2 * words], [1, 0], [2, 0], [4, 0]]
    warps = [[across << i, 0] for i in range((rows // 16).bit_length() - 1)]
    return gl.DistributedLinearLayout([*mine, [more, 0]], lanes, warps, [], [rows, 4 * words])


@gluon.jit
def _aligned_with_codes(held, j: gl.constexpr, A: gl.constexpr):
    """Arrange what lanes t hold for V words of 64 codes, [R, 4, V], like the codes of the j-th 16: pairs of two words each."""
    R: gl.constexpr = held.shape[0]
    if held.shape[2] == 4:
        even, odd = gl.split(held.reshape(R, 4, 2, 2).permute(0, 1, 3, 2))
        held = even if j % 2 == 0 else odd
    return gl.convert_layout(gl.join(held, held).permute(0, 2, 1, 3).reshape(R, 16), A)


@gluon.jit
def weights_of(words, s, odd, b, j: gl.constexpr, A: gl.constexpr):
    """Dequantize the j-th 16 of 64 codes, as an operand of the tensor cores."""
    BITS: gl.constexpr = words.shape[2] * 2
    PLANE: gl.constexpr = j * 4 // BITS
    if PLANE * BITS >= 8:
        words = words >> 8
    scale = s if PLANE * BITS % 8 == 0 else odd
    args = [_aligned_with_codes(words, j, A), _aligned_with_codes(scale, j, A), _aligned_with_codes(b, j, A)]
    return gl.inline_asm_elementwise(_weights_ptx(BITS, PLANE), "=r,r,r,r,r,r,r", args, BF, is_pure=True, pack=2)


@gluon.jit
def words_of(words, KB: gl.constexpr):
    """Split words by 64 inputs, [R, 4, V] each."""
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
def _twice(value, V: gl.constexpr):
    """Return numbers in bf16, twice in a word, for V words."""
    bits = value.to(BF).to(gl.int16, bitcast=True).to(I32) & 0xFFFF
    both = gl.join(bits | (bits << 16), bits | (bits << 16))
    if V == 4:
        both = gl.join(both, both).reshape(value.shape[0], 4, 4)
    return both


@gluon.jit
def scaled_lines(scales, biases, k, inside, width, G: gl.constexpr, V: gl.constexpr):
    """Load what dequantizes codes of inputs k over 2**64: scales for planes 0, scales for planes 4 bits up, biases."""
    there = inside & (k < width)
    s = gl.load(scales + k // G, mask=there, other=0.0).to(F32)
    b = gl.load(biases + k // G, mask=there, other=0.0).to(F32)
    return _twice(s * UP, V), _twice(s * (UP / 16), V), _twice(b * DOWN, V)


@gluon.jit
def _lines(scales, biases, k, inside, width, KB: gl.constexpr, G: gl.constexpr, V: gl.constexpr):
    """Return `scaled_lines` of the first and second 32 inputs of a lane, which may be in two groups."""
    first = scaled_lines(scales, biases, k, inside, width, G, V)
    return first + (scaled_lines(scales, biases, k + 32, inside, width, G, V) if KB // 4 > G else first)


@gluon.jit
def prefetch_scales(scales, biases, group):
    """Prefetch scales and biases into L2."""
    ptx: gl.constexpr = "prefetch.global.L2 [$1]; prefetch.global.L2 [$2]; mov.b32 $0,0;"
    args = [(scales + group).to(gl.int64), (biases + group).to(gl.int64)]
    gl.inline_asm_elementwise(ptx, "=r,l,l", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _request_codes(w0, w1, w2, codes, bar, row0, word, which, there, COUNT: gl.constexpr, GATED: gl.constexpr):
    if GATED:
        HALF: gl.constexpr = codes.shape[0] // 2
        tma.async_copy_global_to_shared(w0, [row0, word], bar, codes.slice(0, HALF, dim=0), pred=there)
        tma.async_copy_global_to_shared(w1, [row0, word], bar, codes.slice(HALF, HALF, dim=0), pred=there)
    else:
        tma.async_copy_global_to_shared(w0, [row0, word], bar, codes, pred=there & (which == 0))
    if COUNT > 1:
        tma.async_copy_global_to_shared(w1, [row0, word], bar, codes, pred=there & (which == 1))
    if COUNT > 2:
        tma.async_copy_global_to_shared(w2, [row0, word], bar, codes, pred=there & (which == 2))


@gluon.jit
def _feed(
    xs, w0, w1, w2, X, C, full, empty, row0, which, x_row, first, count,
    COUNT: gl.constexpr, GATED: gl.constexpr, T: gl.constexpr, KB: gl.constexpr, ST: gl.constexpr,
):  # fmt: skip
    BOX: gl.constexpr = xs.block_type.shape[0]
    EACH: gl.constexpr = KB // 64 * T
    WORDS: gl.constexpr = C.shape[2]
    NBYTES: gl.constexpr = C.shape[1] * WORDS * 4 + EACH * 128
    for n in gl.static_range(ST):
        mbarrier.expect(full.index(n), NBYTES, pred=n < count)
        _request_codes(w0, w1, w2, C.index(n), full.index(n), row0, (first + n) * WORDS, which, n < count, COUNT, GATED)
    # codes do not depend on the previous kernel, tokens do
    gdc_wait()
    gdc_launch_dependents()
    for i in range(count):
        stage = i % ST
        bar = full.index(stage)
        if i >= ST:
            mbarrier.wait(empty.index(stage), (i // ST - 1) % 2)
            mbarrier.expect(bar, NBYTES)
            _request_codes(w0, w1, w2, C.index(stage), bar, row0, (first + i) * WORDS, which, i < count, COUNT, GATED)
        for n in gl.static_range(EACH // BOX):
            some = X.index(stage).slice(n * BOX, BOX, dim=0)
            tma.async_copy_global_to_shared(xs, [x_row + (first + i) * EACH + n * BOX, 0], bar, some)


@gluon.jit
def _store(found, out, rows, tokens, row0, token0, GATED: gl.constexpr):
    M: gl.constexpr = found.shape[0]
    T: gl.constexpr = found.shape[1]
    if GATED:
        gate, up = gl.split(found.reshape(M // 16, 2, 8, T).permute(0, 2, 3, 1))
        found = (gate / (1.0 + gl.exp(-gate)) * up).reshape(M // 2, T)
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4] if GATED else [16, 2], [1, M // 16], [0, 1])
    r, c = row0 + gl.arange(0, found.shape[0], gl.SliceLayout(1, OUT)), token0 + gl.arange(0, T, gl.SliceLayout(0, OUT))
    at = c.to(gl.int64)[None, :] * rows + r[:, None]
    gl.store(out + at, gl.convert_layout(found.to(BF), OUT), mask=(r < rows)[:, None] & (c < tokens)[None, :])


@gluon.jit
def _multiply(
    X, C, full, empty, own, also, part, rows, width, tokens, row0, tile, first, count, T: gl.constexpr, KB: gl.constexpr,
    G: gl.constexpr, ST: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    R: gl.constexpr = C.shape[1]
    LANE: gl.constexpr = C.shape[2] // 4
    V: gl.constexpr = LANE * 64 // KB
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [R // 16, 1], [16, T, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ONE: gl.constexpr = held(R, 1)
    row, t = gl.arange(0, R, gl.SliceLayout(1, ONE)), gl.arange(0, 4, gl.SliceLayout(0, ONE))
    if GATED:
        second, row = row % 16 >= 8, row // 16 * 8 + row % 8
    row += row0
    inside, line = (row < rows)[:, None], (gl.minimum(row, rows - 1).to(gl.int64) * (width // G))[:, None]
    scales, biases = own.scales + line, own.biases + line
    if GATED:
        scales = gl.where(second[:, None], also.scales + line, scales)
        biases = gl.where(second[:, None], also.biases + line, biases)
    k = (first * KB + t * (KB // 4))[None, :]
    lines = _lines(scales, biases, k, inside, width, KB, G, V)
    # 32 bytes hold 16 groups: prefetch a row's next ones while these are used
    for ahead in range(first * KB, (first + count) * KB, 64 * G):
        prefetch_scales(scales, biases, gl.minimum(ahead + t * (16 * G), width - G)[None, :] // G)
    acc = gl.full([R, T], 0.0, F32, ACC)
    for i in range(count):
        mbarrier.wait(full.index(i % ST), i // ST % 2)
        codes = C.index(i % ST).load(held(R, LANE, GATED))
        if GATED:
            codes = codes.reshape(2, R // 16, 8, LANE * 4).permute(1, 0, 2, 3).reshape(R, LANE * 4)
        words = words_of(codes, KB)
        k += KB
        following = _lines(scales, biases, k, inside, width, KB, G, V)
        for n in gl.static_range(KB // 64):
            for j in gl.static_range(4):
                a = weights_of(words[n], lines[n // 2 * 3], lines[n // 2 * 3 + 1], lines[n // 2 * 3 + 2], j, A)
                x = X.index(i % ST).slice(n * T, T, dim=0).permute((1, 0)).slice(16 * j, 16, dim=0)
                # one in flight: issuing several would stall the warp until all but the last have begun
                acc = warpgroup_mma(a, x, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=[acc])
            if n == 0:
                # the previous block has been read
                mbarrier.arrive(empty.index((i + ST - 1) % ST), pred=i > 0)
        lines = following
    found = warpgroup_mma_wait(0, deps=[acc]) * BACK
    if part is not None:
        r, c = gl.arange(0, R, gl.SliceLayout(1, ACC)), gl.arange(0, T, gl.SliceLayout(0, ACC))
        gl.store(part + (r[:, None] * T + c[None, :]), found)
    else:
        _store(found, own.out, rows, tokens, row0, tile * T, GATED)


@gluon.jit
def _neighbours(at, tile, NEAR: gl.constexpr):
    """Renumber programs so that consecutive ones multiply the same rows by up to NEAR tiles of tokens.

    They run concurrently, so that codes are read from memory once for all of them.
    """
    rows = gl.num_programs(0)
    number = tile * rows + at
    first = number // (NEAR * rows) * NEAR
    number -= first * rows
    together = gl.minimum(NEAR, gl.num_programs(2) - first)
    return number // together, first + number % together


@gluon.jit(do_not_specialize_on_alignment=["tokens", "blocks"])
def multiply_tiles(
    xs, w0, w1, w2, first, second, third, part, sizes, width, tokens, blocks, share, GATED: gl.constexpr, R: gl.constexpr,
    T: gl.constexpr, KB: gl.constexpr, G: gl.constexpr, ST: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """Multiply R rows by a tile of tokens over a share of K's blocks; grid (tiles of rows, shares, tiles of tokens).

    Row tiles of up to three weights follow each other. With `part`, sums go there instead of to y, float32
    [shares, tiles of tokens, tiles of rows, R, T].
    """
    COUNT: gl.constexpr = 1 if sizes.end0 is None else 2 if sizes.end1 is None else 3
    at, split, tile = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    if part is None:
        at, tile = _neighbours(at, tile, NEAR)
    # tensors, even where the compiler knows the numbers
    own, which, before, rows = first, 0 * at, 0 * at, 0 * at + sizes.rows0
    if COUNT > 1:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= sizes.end0:
            own, rows, which, before = second, sizes.rows1, 0 * at + 1, sizes.end0
    if COUNT > 2:  # noqa: SIM102 - decided when the kernel is compiled
        if at >= sizes.end1:
            own, rows, which, before = third, sizes.rows2, 0 * at + 2, sizes.end1
    row0, begin = (at - before) * (R // 2 if GATED else R), split * share
    count = gl.minimum(share, blocks - begin)
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
            (_multiply, (
                X, C, full, empty, own, second if GATED else own, part, rows, width, tokens, row0, tile, begin, count,
                T, KB, G, ST, GATED,
            )),
            (_feed, (xs, w0, w1, w2, X, C, full, empty, row0, which, x_row, begin, count, COUNT, GATED, T, KB, ST)),
        ],
        [1],
        [24],
    )  # fmt: skip
