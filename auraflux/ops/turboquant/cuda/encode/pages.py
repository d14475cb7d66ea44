"""Loads of new tokens and stores of their codes in the Hopper kernel that encodes prefill tokens.

Lane (g, q) has tokens 2g and 2g + 1 of a tile of 16, and 32 neighbouring channels of each, from 32q on; their codes are bytes
of eight words.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import inline_asm_elementwise as asm

from auraflux.ops.gpu.blocks.dependent_launch import launches_early
from auraflux.ops.hopper.copy import wait_ptx
from auraflux.ops.hopper.ptx import from_lane, run
from auraflux.ops.hopper.reduce import sum_int
from auraflux.ops.turboquant.cuda.encode.tensor_core_parts import ROW_PITCH, pick, store2, store4

PREFETCH_L2 = gl.constexpr("{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}")


@gluon.jit
def prefetch_l2(k, v, tokens, program, lane, HEADS: gl.constexpr):
    """Prefetch 64 KB of the keys, then of the values into L2: the first programs prefetch everything."""
    count = tokens.to(gl.int64) * (HEADS * 128)
    padded = (count + 1023) // 1024 * 1024
    offset = (program * 32 + lane).to(gl.int64) * 1024
    second = offset >= padded
    offset = gl.where(second, offset - padded, offset)
    size = gl.minimum(gl.maximum(count - offset, 0), 1024).to(gl.int32) * 2
    k_at, v_at = (k + offset).to(gl.int64), (v + offset).to(gl.int64)
    if launches_early():
        asm(PREFETCH_L2, "=r,l,r", [gl.where(second, v_at, k_at), size], gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def _copy_ptx(step):
    """Return PTX that copies 16 bytes of every second of 16 tokens, `step` bytes each: to $1, from $2; token $3 of $4."""
    text = "{.reg .pred p; .reg .b32 t; bar.warp.sync 0xffffffff;"
    for i in range(0, 16, 2):
        text += f"add.s32 t, $3, {i}; setp.lt.u32 p, t, $4;"
        text += f"@p cp.async.cg.shared.global [$1 + {i * ROW_PITCH.value}], [$2 + {i * step}], 16;"
    return text + "cp.async.commit_group; mov.b32 $0, 0;}"


@gluon.jit
def _copy(x, base, token, tokens, head, lane, HEADS: gl.constexpr):
    """Copy 16 tokens to shared memory, those that exist."""
    mine = token + lane // 16
    source = (x + (mine.to(gl.int64) * HEADS + head) * 128 + lane % 16 * 8).to(gl.int64)
    args = [base + lane // 16 * ROW_PITCH + lane % 16 * 16, source, mine, tokens + 0 * lane]
    asm(_copy_ptx(256 * HEADS), "=r,r,l,r,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _place_in_batch(starts, lengths, sequences, number, lane):
    """Return a tile's sequence, that sequence's first token, its first and last new position, and the tile's position."""
    there = lane < sequences
    start = gl.load(starts + lane, mask=there, other=0)
    end = gl.load(lengths + lane, mask=there, other=0)
    first = end - (gl.load(starts + lane + 1, mask=there, other=0) - start)
    tiles = gl.where(there & (first < end), ((end + 15) >> 4) - (first >> 4), 0)
    until = tiles
    for i in gl.static_range(5):
        before = from_lane(until, lane - (1 << i))
        until += gl.where(lane >= (1 << i), before, 0)
    passed = (until <= number).to(gl.int32)
    sequence = sum_int(passed)
    # the grid is an upper bound: the last programs may have no tile
    sequence = gl.minimum(sequence, sequences - 1)
    tile = number - from_lane(until - tiles, sequence)
    start, first, end = from_lane(start, sequence), from_lane(first, sequence), from_lane(end, sequence)
    return sequence, start, first, end, ((first >> 4) + tile) * 16


@gluon.jit
def load_tile(x, base, index, number, head, tokens, lane, HEADS: gl.constexpr, BATCH: gl.constexpr, LATE: gl.constexpr):
    """Copy 16 tokens to `base`; return their page table row, first and last new position, and the tile's position."""
    pages = index.table
    if BATCH:
        sequence, start, first, end, tile = _place_in_batch(index.starts, index.lengths, index.sequences, number, lane)
        pages += sequence * index.width
        _copy(x, base, start + tile - first, tokens, head, lane, HEADS)
        run(wait_ptx(0), lane)
    elif LATE:
        end = gl.load(index.lengths)
        first = end - tokens
        tile = ((first >> 4) + number) * 16 + 0 * lane
        _copy(x, base, tile - first, tokens, head, lane, HEADS)
        run(wait_ptx(0), lane)
    else:
        # assume that the first position is a multiple of 16, so that the copy does not wait for the length
        _copy(x, base, number * 16, tokens, head, lane, HEADS)
        end = gl.load(index.lengths)
        first = end - tokens
        tile = ((first >> 4) + number) * 16 + 0 * lane
        run(wait_ptx(0), lane)
        if (first & 15) != 0:
            _copy(x, base, tile - first, tokens, head, lane, HEADS)
            run(wait_ptx(0), lane)
    return pages, first, end, tile


@gluon.jit
def words_of(C):
    """Pack a token's codes, eight to a word."""
    return C[0] + C[1] * 16, C[2] + C[3] * 16, C[4] + C[5] * 16, C[6] + C[7] * 16


@gluon.jit
def store_rows(codes, row, q, one, two, C, D, BITS: gl.constexpr):
    at = (codes + (row * (4 * BITS) + q * BITS)).to(gl.int64)
    if BITS == 8:
        store4(at, one, C[0], C[1], C[2], C[3])
        store4(at + 16, one, C[4], C[5], C[6], C[7])
        store4(at + 128, two, D[0], D[1], D[2], D[3])
        store4(at + 144, two, D[4], D[5], D[6], D[7])
    else:
        c, d = words_of(C), words_of(D)
        store4(at, one, c[0], c[1], c[2], c[3])
        store4(at + 64, two, d[0], d[1], d[2], d[3])


@gluon.jit
def store_pairs(codes, row, q, both, C, D, BITS: gl.constexpr):
    at = (codes + ((row // 8 * 8 + 2 * q) * (4 * BITS) + row % 8 // 2 * BITS)).to(gl.int64)
    if BITS == 4:
        store4(at, both, C[0] + D[0] * 16, C[1] + D[1] * 16, C[2] + D[2] * 16, C[3] + D[3] * 16)
        store4(at + 64, both, C[4] + D[4] * 16, C[5] + D[5] * 16, C[6] + D[6] * 16, C[7] + D[7] * 16)
    elif BITS == 8:
        for i in gl.static_range(4):
            c, d, e, f = C[2 * i], D[2 * i], C[2 * i + 1], D[2 * i + 1]
            words = pick(c, d, 0x5140), pick(c, d, 0x7362), pick(e, f, 0x5140), pick(e, f, 0x7362)
            store4(at + (i // 2 * 128 + i % 2 * 16), both, words[0], words[1], words[2], words[3])
    else:
        c, d = words_of(C), words_of(D)
        store2(at, both, c[0] + d[0] * 4, c[1] + d[1] * 4)
        store2(at + 32, both, c[2] + d[2] * 4, c[3] + d[3] * 4)
