"""4-bit experts for thousands of pairs on Hopper, in Gluon: weights are dequantized in registers for `wgmma`.

Pairs are in blocks of one expert, see `grouped`. A program multiplies R rows of a block's expert by its T pairs, or by T / 2
where no more are used. Rows are M of the MMA: a lane holds codes of rows g and g + 8, and one bf16x2 FMA turns them into the
bf16 weights. Pairs are N, in shared memory. A producer warp loads codes and pairs by TMA in blocks of KB inputs.

A lane reads 16 bytes of a row's codes at once. That permutes K within a block, the same way for all rows; `order_pairs`
permutes the inputs accordingly. Gate and up: a lane's rows g are gate's and g + 8 up's, so that it has both sums of a hidden
value, and stores these in the permuted order of the next product.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

BF, F32, I32 = gl.bfloat16, gl.float32, gl.int32


class Lines(NamedTuple):
    """Per-row scales and biases of a stack, and the stride between experts."""

    scales: Tensor
    biases: Tensor
    step: int


class TileShape(NamedTuple):
    """Compile-time tile of a program: rows R, pairs T, inputs KB of a K block, inputs per scale G, stages, warps."""

    rows: int
    pairs: int
    inputs: int
    group: int
    stages: int
    warps: int


class Memory(NamedTuple):
    """Shared memory of a program: inputs and codes in flight, and barriers of full and empty stages."""

    X: Any
    C: Any
    full: Any
    empty: Any


@gluon.constexpr_function
def _weights_ptx(j):
    """Return PTX for the weights of two codes in the halves of a word: nibbles j and j + 4, in its even bytes.

    Integers below 256, read as bf16 bits, are themselves times 2**-133: times 2**127 they are code / 64.
    """
    odd = 4 * j % 8
    mask, up = hex((15 << odd) * 0x10001), hex((254 - odd << 7) * 0x10001)
    return (
        f"{{.reg .b32 r,up,zero; mov.b32 up,{up}; mov.b32 zero,0; and.b32 r,$1,{mask};"
        "fma.rn.bf16x2 r,r,up,zero; fma.rn.bf16x2 $0,r,$3,$5;}"
    )


@gluon.constexpr_function
def _row_layout(rows, warps, words, each=16):
    """Return the layout [rows, 4 * words] where lane t of four holds words from t * words on; a warp has `each` rows."""
    more, row = [8] if each == 16 else [], each * warps
    while row < rows:
        more, row = [*more, row], 2 * row
    mine = [[0, 1 << i] for i in range(words.bit_length() - 1)] + [[row, 0] for row in more]
    lanes = [[0, words], [0, 2 * words], [1, 0], [2, 0], [4, 0]]
    across = [[each << i, 0] for i in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout(mine, lanes, across, [], [rows, 4 * words])


@gluon.jit
def _codes(C, stage, R: gl.constexpr, W: gl.constexpr):
    """Load a block's codes, [R, words]; gate and up interleaved by eight rows where both are given."""
    ROWS: gl.constexpr = C.shape[1]
    WORDS: gl.constexpr = C.shape[2]
    if ROWS == R:
        found = C.index(stage).load(_row_layout(R, W, WORDS // 4))
    else:
        gate = C.index(2 * stage).load(_row_layout(ROWS, W, WORDS // 4, 8))
        up = C.index(2 * stage + 1).load(_row_layout(ROWS, W, WORDS // 4, 8))
        found = gl.join(gate, up).reshape(R // 16, 8, WORDS, 2).permute(0, 3, 1, 2).reshape(R, WORDS)
    return found


@gluon.jit
def _broadcast_lanes(held, A: gl.constexpr):
    """Broadcast per-lane values of two words of 64 codes, [R, 4, 2], to the layout of 16 codes."""
    return gl.convert_layout(gl.join(held, held).permute(0, 2, 1, 3).reshape(held.shape[0], 16), A)


@gluon.jit
def _weights(words, s, b, j: gl.constexpr, A: gl.constexpr):
    """Return the weights of the j-th 16 of 64 codes as an MMA operand."""
    if j >= 2:
        words = words >> 8
    args = [_broadcast_lanes(words, A), _broadcast_lanes(s, A), _broadcast_lanes(b, A)]
    return gl.inline_asm_elementwise(_weights_ptx(j), "=r,r,r,r,r,r,r", args, BF, is_pure=True, pack=2)


@gluon.jit
def _words(words):
    """Split the words of 256 inputs by 64 inputs, [R, 4, 2] each."""
    even, odd = gl.split(words.reshape(words.shape[0], 4, 2, 2, 2).permute(0, 1, 4, 2, 3))
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return first, second, third, fourth


@gluon.jit
def _line(scales, biases, at, there):
    """Load scales and biases, duplicated in each half-word for two words."""
    # see `_weights_ptx`: 2**133 in two steps
    s = (gl.load(scales + at, mask=there, other=0.0).to(F32) * 64.0).to(BF).to(gl.int16, bitcast=True)
    b = gl.load(biases + at, mask=there, other=0.0).to(gl.int16, bitcast=True)
    s, b = s.to(I32) & 0xFFFF, b.to(I32) & 0xFFFF
    s, b = s | (s << 16), b | (b << 16)
    return gl.join(s, s), gl.join(b, b)


@gluon.jit
def _feed(xs, w0, w1, memory, expert, row0, x_row, count, many, SHAPE: gl.constexpr):
    """Load blocks of KB inputs by TMA: codes and pairs, the second half of the pairs only where there are `many`."""
    T: gl.constexpr = SHAPE.pairs
    KB: gl.constexpr = SHAPE.inputs
    ST: gl.constexpr = SHAPE.stages
    X, C, full, empty = memory.X, memory.C, memory.full, memory.empty
    HALF: gl.constexpr = T // 2
    EACH: gl.constexpr = KB // 64 * T
    PARTS: gl.constexpr = C.shape[0] // ST
    ROWS: gl.constexpr = C.shape[1]
    WORDS: gl.constexpr = C.shape[2]
    NBYTES: gl.constexpr = PARTS * ROWS * WORDS * 4
    for i in range(count):
        bar = full.index(i % ST)
        mbarrier.wait(empty.index(i % ST), (i // ST + 1) % 2, pred=i >= ST)
        if many:
            mbarrier.expect(bar, NBYTES + EACH * 128)
        else:
            mbarrier.expect(bar, NBYTES + EACH * 64)
        codes = C.index(i % ST * PARTS)._reinterpret(I32, [1, ROWS, WORDS], w0.layout)
        tma.async_copy_global_to_shared(w0, [expert, row0, i * WORDS], bar, codes)
        if w1 is not None:
            codes = C.index(i % ST * PARTS + 1)._reinterpret(I32, [1, ROWS, WORDS], w0.layout)
            tma.async_copy_global_to_shared(w1, [expert, row0, i * WORDS], bar, codes)
        for n in gl.static_range(EACH // HALF):
            some = X.index(i % ST).slice(n * HALF, HALF, dim=0)
            tma.async_copy_global_to_shared(xs, [x_row + i * EACH + n * HALF, 0], bar, some, pred=True if n % 2 == 0 else many)


@gluon.jit
def _store(found, out, rows, row0, place0, W: gl.constexpr):
    """Store results of R rows and N places to [places, rows]."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [16, 2], [1, W], [0, 1])
    r, c = gl.arange(0, found.shape[0], gl.SliceLayout(1, OUT)), gl.arange(0, found.shape[1], gl.SliceLayout(0, OUT))
    r, c = row0 + r, place0 + c
    at = c.to(gl.int64)[None, :] * rows + r[:, None]
    gl.store(out + at, gl.convert_layout(found.to(BF), OUT), mask=(r < rows)[:, None] & (c >= 0)[None, :])


@gluon.jit
def _store_hidden(found, out, row0, T: gl.constexpr, W: gl.constexpr):
    """Store silu(gate) * up of R / 2 rows each and N places to a block [rows / 64, T, 64] in permuted order."""
    R: gl.constexpr = found.shape[0]
    N: gl.constexpr = found.shape[1]
    gate, up = gl.split(found.reshape(R // 16, 2, 8, N).permute(0, 2, 3, 1))
    hidden = (gate / (1.0 + gl.exp(-gate)) * up).reshape(R // 2, N).to(BF)
    EIGHT: gl.constexpr = gl.BlockedLayout([8, 1], [R // 16, 512 // R], [1, W], [0, 1])
    PAIRS: gl.constexpr = gl.BlockedLayout([4, 1], [R // 16, 512 // R], [1, W], [0, 1])
    bits = gl.convert_layout(hidden, EIGHT).to(gl.int16, bitcast=True).to(I32) & 0xFFFF
    low, high = gl.split(bits.reshape(R // 16, 2, 4, N).permute(0, 2, 3, 1))
    words = gl.convert_layout((low | high << 16).reshape(R // 4, N), PAIRS)
    r, c = gl.arange(0, R // 4, gl.SliceLayout(1, PAIRS)), gl.arange(0, N, gl.SliceLayout(0, PAIRS))
    # see `_ordered`: pairs (j, j + 4) of eight rows
    k, j = row0 + r // 4 * 8, r % 4
    line, word = k // 256 * 4 + k % 64 // 16, j * 8 + k % 16 // 8 * 4 + k % 256 // 64
    gl.store(out.to(gl.pointer_type(I32)) + ((line * T)[:, None] + c[None, :]) * 32 + word[:, None], words)


@gluon.jit
def _products(
    memory, first, second, out, rows, width, row0, block, count, SHAPE: gl.constexpr, N: gl.constexpr
):  # fmt: skip
    """Multiply the first N pairs of a block."""
    R: gl.constexpr = SHAPE.rows
    T: gl.constexpr = SHAPE.pairs
    KB: gl.constexpr = SHAPE.inputs
    G: gl.constexpr = SHAPE.group
    ST: gl.constexpr = SHAPE.stages
    W: gl.constexpr = SHAPE.warps
    X, C, full, empty = memory.X, memory.C, memory.full, memory.empty
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [W, 1], [16, N, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ONE: gl.constexpr = _row_layout(R, W, 1)
    row, t = gl.arange(0, R, gl.SliceLayout(1, ONE)), gl.arange(0, 4, gl.SliceLayout(0, ONE))
    others = row % 16 >= 8
    if second is not None:
        row = row // 16 * 8 + row % 8
    row += row0
    inside, line = (row < rows)[:, None], (gl.minimum(row, rows - 1).to(gl.int64) * (width // G))[:, None]
    scales, biases = first.scales + line, first.biases + line
    if second is not None:
        scales = gl.where(others[:, None], second.scales + line, scales)
        biases = gl.where(others[:, None], second.biases + line, biases)
    k = (t * (KB // 4))[None, :]
    s, b = _line(scales, biases, k // G, inside & (k < width))
    acc = gl.full([R, N], 0.0, F32, ACC)
    for i in range(count):
        mbarrier.wait(full.index(i % ST), i // ST % 2)
        words = _words(_codes(C, i % ST, R, W))
        k += KB
        next_s, next_b = _line(scales, biases, k // G, inside & (k < width))
        for n in gl.static_range(4):
            for j in gl.static_range(4):
                a = _weights(words[n], s, b, j, A)
                x = X.index(i % ST).slice(n * T, N, dim=0).permute((1, 0)).slice(16 * j, 16, dim=0)
                # one by one: a warp stalls until all but the last of several wgmmas have been issued; none may be in
                # flight at the loop's back edge, or ptxas serializes all of them
                acc = warpgroup_mma(a, x, acc, is_async=True)
                acc = warpgroup_mma_wait(0 if n + j == 6 else 1, deps=[acc])
            if n == 0:
                # all reads of the previous block are done
                mbarrier.arrive(empty.index((i + ST - 1) % ST), pred=i > 0)
        s, b = next_s, next_b
    acc = warpgroup_mma_wait(0, deps=[acc])
    if second is not None:
        _store_hidden(acc, out + block.to(gl.int64) * rows * T, row0, T, W)
    else:
        _store(acc, out, rows, row0, block * T, W)


@gluon.jit
def _multiply(memory, first, second, out, rows, width, row0, block, count, many, SHAPE: gl.constexpr):
    if many:
        _products(memory, first, second, out, rows, width, row0, block, count, SHAPE, SHAPE.pairs)
    else:
        _products(memory, first, second, out, rows, width, row0, block, count, SHAPE, SHAPE.pairs // 2)


@gluon.jit
def _of_expert(lines, expert):
    """Return the scales and biases of one expert."""
    at = expert.to(gl.int64) * lines.step
    return Lines(lines.scales + at, lines.biases + at, lines.step)


@gluon.jit(do_not_specialize_on_alignment=["pairs"])
def expert_tiles(
    xs, w0, w1, owner, placed, pairs, first, second, out, stack, SHAPE: gl.constexpr, CODES: gl.constexpr
):  # fmt: skip
    """Multiply R rows of a block's expert by its T pairs, to out [places, rows]; grid (row tiles, blocks).

    stack  experts, rows and width of the weights

    With two weights, half of the R rows are of each, and out is silu(first) * second in the order of `order_pairs`. A place is
    empty where `placed` is not below `pairs`.
    """
    R: gl.constexpr = SHAPE.rows
    T: gl.constexpr = SHAPE.pairs
    KB: gl.constexpr = SHAPE.inputs
    ST: gl.constexpr = SHAPE.stages
    experts, rows, width = stack
    at, block = gl.program_id(0), gl.program_id(1)
    expert = gl.load(owner + block)
    if expert >= experts:
        return
    # places are filled in order
    many = gl.load(placed + block * T + T // 2) < pairs
    PARTS: gl.constexpr = 1 if second is None else 2
    row0 = at * (R // PARTS)
    X = gl.allocate_shared_memory(BF, [ST, KB // 64 * T, 64], xs.layout)
    C = gl.allocate_shared_memory(I32, [ST * PARTS, R // PARTS, KB // 8], CODES)
    full = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [ST, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(ST):
        mbarrier.init(full.index(n), count=1)
        mbarrier.init(empty.index(n), count=1)
    fence_async_shared()
    gl.thread_barrier()
    count = width // KB
    x_row = block * (count * (KB // 64) * T)
    first = _of_expert(first, expert)
    if second is not None:
        second = _of_expert(second, expert)
    memory = Memory(X, C, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (memory, first, second, out, rows, width, row0, block, count, many, SHAPE)),
            (_feed, (xs, w0, w1, memory, expert, row0, x_row, count, many, SHAPE)),
        ],
        [1],
        [24],
    )


@triton.jit
def _ordered(x, KB: tl.constexpr):
    """Permute inputs to lane order: lane t of four has a quarter of a block, 16 of each 64: pairs (j, j + 4) of words v."""
    M: tl.constexpr = x.shape[1] // KB
    return x.reshape(x.shape[0], M, 4, KB // 64, 2, 2, 4).permute(0, 1, 3, 6, 4, 2, 5).reshape(x.shape[0], x.shape[1])


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def order_pairs(x, placed, out, pairs, k, K, T: tl.constexpr, KB: tl.constexpr, PLACES: tl.constexpr):
    """Gather and permute x for the pairs of blocks, [blocks, K / 64, T, 64]; grid (places / PLACES, K / KB).

    Empty places are zero. Halves of blocks without pairs are not written.
    """
    first, at = tl.program_id(0) * PLACES, tl.program_id(1) * KB + tl.arange(0, KB)[None, :]
    if tl.load(placed + first // (T // 2) * (T // 2)) >= pairs:
        return
    place = first + tl.arange(0, PLACES)[:, None]
    pair = tl.load(placed + place)
    value = tl.load(x + (pair // k).to(tl.int64) * K + at, mask=(pair < pairs) & (at < K), other=0.0)
    tile = (first // T).to(tl.int64) * K * T
    tl.store(out + tile + (at // 64 * T + place % T) * 64 + at % 64, _ordered(value, KB))


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def find_places(placed, spots, places, pairs, BLOCK: tl.constexpr):
    """Write the place of each pair to `spots`."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(placed + place, mask=place < places, other=pairs)
    tl.store(spots + pair, place, mask=pair < pairs)


@triton.jit(do_not_specialize_on_alignment=["pairs"])
def spread_parts(found, placed, parts, pairs, hidden, BLOCK: tl.constexpr):
    """Scatter the results of placed pairs to `parts`; grid (places, column blocks)."""
    place, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(placed + place).to(tl.int64)
    there = (column < hidden) & (pair < pairs)
    tl.store(parts + pair * hidden + column, tl.load(found + place * hidden + column, mask=there).to(tl.float32), mask=there)
