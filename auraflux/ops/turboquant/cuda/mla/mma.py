"""MLA decode attention over codes of 4 and 8 bits by cp.async and mma.sync, in Gluon: 16 or 32 heads of one token per program.

As for uncompressed latents (`attention.cuda.mma.latents`), four warps share the channels. A warp loads the codes of its
quarter two tiles ahead, looks up their levels, and writes these as float16 to shared memory, where it reads them twice: for
scores and for the output. Norms multiply scores and softmax weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.blocks.softmax import LOG2E
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.hopper.latent_tiles import (
    NARROW,
    TILE,
    Tiling,
    exchange,
    fetch_quarters,
    four_parts,
    load_queries,
    mix,
    offsets,
    products,
    rows_of_quarters,
    scores_layout,
    store_part,
    sum_of_parts,
    tile_positions,
    warps_of,
    weights_of,
)
from auraflux.ops.hopper.ptx import SHARED_BASE
from auraflux.ops.hopper.split_kv import empty_split_partials, invariant_split_keys, split_range, splits_for
from auraflux.ops.turboquant.cuda.arguments import CodeTensors
from auraflux.ops.turboquant.cuda.encode.hadamard import rotation_for
from auraflux.ops.turboquant.cuda.mla.full_precision import (
    FullPrecisionLatentShape,
    full_precision_latent_shape,
    full_precision_latents,
)
from auraflux.ops.turboquant.cuda.mla.lookup import (
    LANES,
    TABLE_ROWS,
    is_full_precision,
    load_table,
    look_up_ptx,
    store_table,
    table_for,
)
from auraflux.ops.turboquant.cuda.mla.merge import hadamard_queries, merge_rotated
from auraflux.ops.turboquant.pages import LatentCodes

LATENT = 512
BITS = 8  # of the codes for which results on a GPU were compared
TILINGS = (Tiling(16, 2, 16, 2), Tiling(32, 1, 32, 2))
MIXED = 16  # neighbouring channels of a merging program, which has those of all quarters
F16, BF, F32 = gl.constexpr(gl.float16), gl.constexpr(gl.bfloat16), gl.constexpr(gl.float32)


class Shape(NamedTuple):
    """Compile-time shape of the kernel.

    page, sequences  tokens per page, sequences rounded up to a power of two
    tiling           see `Tiling`; its stages are those of RoPE keys
    bits             of a code
    full             positions read in full precision
    split_keys       see `invariant_split_keys`
    """

    page: int
    sequences: int
    tiling: Tiling
    bits: int
    full: FullPrecisionLatentShape
    split_keys: int


@gluon.constexpr_function
def _word_ptx(bits):
    """Return PTX that maps a word of codes to pairs of levels.

    inputs  the word, 4 * lane in every byte, the table's address
    """
    outs = bits_to_pairs(bits)
    text = look_up_ptx(f"${outs}", [f"${n}" for n in range(outs)], f"${outs + 1}", f"${outs + 2}", bits)
    return "{.reg .b32 h, l, a, b; " + text + "}"


@gluon.constexpr_function
def bits_to_pairs(bits):
    """Return the pairs of codes in a word."""
    return 16 // bits


@gluon.constexpr_function
def words_layout(bits, tiling):
    """Return a layout whose threads have 8 codes of a row each."""
    heads, halves, _, _ = tiling
    return gl.BlockedLayout([1, 1, bits // 4], [1, 2, 16], [4 * halves, heads // 16, 1], [2, 1, 0])


@gluon.constexpr_function
def tile_rows(tiling):
    """Return the 4 KB rows of a tile of levels."""
    _, halves, positions, _ = tiling
    return positions * halves // 4


@gluon.jit
def _load_codes(codes, norms, table, at, end, last, pool, SHAPE: gl.constexpr):
    """Load the codes and norms of the tile of positions from `at` on; those of invisible positions are zeros."""
    TILING: gl.constexpr = SHAPE.tiling
    WORDS: gl.constexpr = 16 * SHAPE.bits
    page = gl.load(table + gl.minimum(at, last) // SHAPE.page)
    left = gl.where((page >= 0) & (page < pool), end - at, 0)
    line = gl.where(left > 0, page, 0).to(gl.int64) * SHAPE.page + gl.minimum(at, last) % SHAPE.page
    row, channel = offsets(TILING.positions, WORDS // 4, TILING.halves, words_layout(SHAPE.bits, TILING))
    words = gl.load(codes + line * WORDS + row * WORDS + channel, mask=(row < left) & (channel >= 0), other=0)
    return words, gl.load(norms + line + tile_positions(TILING)), left


@gluon.jit
def _decode(w, shared, lanes, base, SHAPE: gl.constexpr):
    """Write the levels of a tile of codes."""
    TILING: gl.constexpr = SHAPE.tiling
    H: gl.constexpr = TILING.halves
    N: gl.constexpr = TILING.positions
    PTX: gl.constexpr = _word_ptx(SHAPE.bits)
    if SHAPE.bits == 8:
        a, b = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,r,r,r,~{memory}", [w, lanes, base], (gl.int32,) * 2, is_pure=False, pack=1
        )
        pairs = gl.join(a, b)
    else:
        a, b, c, d = gl.inline_asm_elementwise(
            PTX, "=&r,=&r,=&r,=&r,r,r,r,~{memory}", [w, lanes, base], (gl.int32,) * 4, is_pure=False, pack=1
        )
        pairs = gl.join(gl.join(a, c), gl.join(b, d))
    words = shared.index(TABLE_ROWS)._reinterpret(gl.int32, [4 * H, N, 64], gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
    words.store(gl.reshape(pairs, [4 * H, N, 64]))


@gluon.jit
def _replace_rows(tile, rows, pages, width, pool, position, wanted, channel, PAGE: gl.constexpr, L: gl.constexpr):
    """Overwrite rows of a tile with full-precision rows of their positions, where `wanted`."""
    page = gl.load(pages + position // PAGE, mask=wanted & (position // PAGE < width), other=0)
    page = gl.where((page >= 0) & (page < pool), page, 0)
    at, wanted = (page.to(gl.int64) * PAGE + position % PAGE) * 512, wanted & (channel >= 0)
    found = gl.load(rows + at + channel, mask=wanted, other=0.0)
    tile.store(gl.where(wanted, found.to(gl.float16), tile.load(L)))


@gluon.jit
def _insert_full_precision(tile, full, sequence, first, seen, FULL: gl.constexpr, TILING: gl.constexpr):
    """Overwrite the rows of full-precision positions in a decoded tile at `first`."""
    L: gl.constexpr = rows_of_quarters(128, TILING)
    row, channel = offsets(TILING.positions, 128, TILING.halves, L)
    position, sequence = first + row, sequence.to(gl.int64)
    if FULL.recent_window > 0:  # noqa: SIM102
        if first + TILING.positions * TILING.halves + FULL.recent_window > seen:
            near = (position >= FULL.sink_tokens) & (position < seen) & (position + FULL.recent_window >= seen)
            table = full.recent_table + sequence * full.recent_width
            _replace_rows(
                tile, full.recent_rows, table, full.recent_width, full.recent_pool, position, near, channel, FULL.page, L
            )
    if FULL.sink_tokens > 0:  # noqa: SIM102
        if first < FULL.sink_tokens:
            early = (position < FULL.sink_tokens) & (position < seen)
            table = full.sink_table + sequence * full.sink_width
            _replace_rows(
                tile, full.sink_rows, table, full.sink_width, full.sink_pool, position, early, channel, FULL.sink_page, L
            )


@gluon.jit
def _for_columns(x, TILING: gl.constexpr):
    """Return a number of each position [halves, 1, positions] for the columns of products: [4 * halves, 1, positions]."""
    L: gl.constexpr = products(TILING)
    H: gl.constexpr = TILING.halves
    N: gl.constexpr = TILING.positions
    WIDE: gl.constexpr = gl.SliceLayout(2, four_parts(TILING, False, 4))
    x = gl.convert_layout(gl.reshape(x, [H, N]), gl.SliceLayout(1, WIDE), assert_trivial=True)
    every = gl.zeros([H, 4, N], gl.float32, WIDE) + gl.expand_dims(x, 1)
    return gl.expand_dims(gl.convert_layout(gl.reshape(every, [4 * H, N]), gl.SliceLayout(1, L), assert_trivial=True), 1)


@gluon.jit
def _butterflies(x, TILING: gl.constexpr):
    """Apply the Walsh-Hadamard transform over the upper three channel bits of a quarter, which lie in one thread."""
    G: gl.constexpr = 4 * TILING.halves
    M: gl.constexpr = TILING.heads
    for i in gl.static_range(3):
        a, b = gl.split(gl.permute(gl.reshape(x, [G, M, 4 >> i, 2, 16 << i]), [0, 1, 2, 4, 3]))
        x = gl.reshape(gl.permute(gl.join(a + b, a - b), [0, 1, 2, 4, 3]), [G, M, 128])
    return gl.convert_layout(x, products(TILING), assert_trivial=True)


@gluon.jit
def _fetch_keys(R, ropes, table, at, end, last, pool, SHAPE: gl.constexpr):
    """Begin copying the RoPE keys of the tile of positions from `at` on, as one group."""
    TILING: gl.constexpr = SHAPE.tiling
    page = gl.load(table + gl.minimum(at, last) // SHAPE.page)
    known = (page >= 0) & (page < pool)
    line = gl.where(known, page, 0).to(gl.int64) * SHAPE.page + at % SHAPE.page
    if at < end:
        fetch_quarters(R, ropes + line * 64, gl.where(known, end - at, 0), 16, TILING, rows_of_quarters(16, TILING))
    async_copy.commit_group()


@gluon.jit
def latent_codes_mma(
    queries, q_rope, ropes, store, full, index, partials, factors, heads, splits, SHAPE: gl.constexpr
):  # fmt: skip
    """Attend from a program's heads of one token to one split of its positions; grid (tokens * tiles of heads, splits).

    queries  rotated, in float16
    factors  of scores, to base 2; of norms, for levels of N(0, 1)
    """
    TILING: gl.constexpr = SHAPE.tiling
    M: gl.constexpr = TILING.heads
    H: gl.constexpr = TILING.halves
    N: gl.constexpr = TILING.positions
    ST: gl.constexpr = TILING.stages
    TILED: gl.constexpr = N * H
    FULL: gl.constexpr = SHAPE.full
    NW: gl.constexpr = warps_of(TILING)
    L: gl.constexpr = products(TILING)
    ROWS: gl.constexpr = gl.SliceLayout(2, scores_layout(TILING))
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, L, 2)
    scale, unit = factors
    tiles = (heads + M - 1) // M
    token, first, split = gl.program_id(0) // tiles, gl.program_id(0) % tiles * M, gl.program_id(1)
    share = split_range(token, split, splits, 1 << 30, index, SHAPE.sequences, TILED, SHAPE.split_keys, NW)
    sequence, begin, _, end, count, _, seen = share
    table, pool = index.table + sequence.to(gl.int64) * index.width, index.pool
    # the largest allocation starts at the shared-memory base and the table is its first part: the PTX look-ups rely on it
    shared = gl.allocate_shared_memory(gl.int32, [TABLE_ROWS + tile_rows(TILING), 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    R = gl.allocate_shared_memory(BF, [ST, 4 * H, N, 16], NARROW)
    X = gl.allocate_shared_memory(F32, [4 * H, M, N], exchange(N))
    last = begin + gl.maximum(count - 1, 0) * TILED
    line, room = token * heads + first, heads - first
    q = load_queries(queries + line.to(gl.int64) * 512, room, 128, TILING)
    qr = load_queries(q_rope + line.to(gl.int64) * 64, room, 16, TILING)
    w, norm, left = _load_codes(store.codes, store.norms, table, begin, end, last, pool, SHAPE)
    w1, norm1, left1 = _load_codes(store.codes, store.norms, table, begin + TILED, end, last, pool, SHAPE)
    for i in gl.static_range(ST - 1):
        _fetch_keys(R.index(i), ropes, table, begin + i * TILED, end, last, pool, SHAPE)
    for part in gl.static_range(16 // NW):
        store_table(shared, load_table(store.levels, part * 16 * NW, 16 * NW, NW), part * NW // 2, 16 * NW)
    base = gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    lanes = gl.inline_asm_elementwise(LANES, "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    m = gl.full([H, M], float("-inf"), F32, ROWS)
    l = gl.full([H, M], 0.0, F32, ROWS)  # noqa: E741
    acc = gl.full([4 * H, M, 128], 0.0, F32, L)
    zero = gl.full([4 * H, M, N], 0.0, F32, L)
    position = tile_positions(TILING)
    tile = shared.index(TABLE_ROWS)._reinterpret(F16, [4 * H, N, 128], TILE)
    for i in range(count):
        at = begin + i * TILED
        w2, norm2, left2 = _load_codes(store.codes, store.norms, table, at + 2 * TILED, end, last, pool, SHAPE)
        async_copy.wait_group(ST - 2)
        gl.thread_barrier()
        _fetch_keys(R.index((i + ST - 1) % ST), ropes, table, at + (ST - 1) * TILED, end, last, pool, SHAPE)
        _decode(w, shared, lanes, base, SHAPE)
        live, weight = position < left, norm * unit
        if FULL.sink_tokens + FULL.recent_window > 0:
            weight = gl.where(is_full_precision(position, at, seen, FULL), 1.0, weight)
            if (at < FULL.sink_tokens) | (at + TILED + FULL.recent_window > seen):
                _insert_full_precision(tile, full, sequence, at, seen, FULL, TILING)
        # masked tokens may have norms that are not finite
        weight = gl.where(live, weight, 0.0)
        s = mma_v2(qr, R.index(i % ST).permute([0, 2, 1]).load(RIGHT), zero)
        c = mma_v2(q, tile.permute([0, 2, 1]).load(RIGHT), zero)
        s = sum_of_parts((c * _for_columns(weight, TILING) + s) * scale, X, TILING)
        p, fade, m, l = weights_of(gl.where(live, s, float("-inf")), m, l)  # noqa: E741
        acc = mix(acc, p * weight, fade, tile, TILING)
        w, norm, left, w1, norm1, left1 = w1, norm1, left1, w2, norm2, left2
    shared._keep_alive()
    store_part(partials, line.to(gl.int64) * splits + split, splits, room, _butterflies(acc, TILING), m, l, TILING)


def attend_latent_codes(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    """Run `turboquant_latent_attention` for few tokens."""
    (tokens, heads, _), (sequences, table_width), page = q_latent.shape, pages.table.shape, pages.pool[1]
    out, device, tiling = torch.empty_like(q_latent), q_latent.device, TILINGS[heads > TILINGS[0].heads]
    programs = tokens * cdiv(heads, tiling.heads)
    splits = splits_for(max(1, multiprocessors(device) // programs), table_width * page)
    # the extra rounding to float16 is invisible in the mean of many splits
    partials = empty_split_partials(tokens * heads, splits, LATENT, torch.float16, device)
    signs, _ = rotation_for(LATENT, pages.seed, False, device)
    full = full_precision_latent_shape(pages)
    shape = Shape(page, power_of_two(sequences), tiling, pages.bits, full, invariant_split_keys())
    launch(latent_codes_mma, (programs, splits))(
        hadamard_queries(q_latent, signs), q_rope, pages.rope,
        CodeTensors(pages.codes, pages.norms, table_for(pages.bits, LATENT, device, pages.book)), full_precision_latents(pages),
        index_of(pages, starts), partials, (scale * LOG2E.value, LATENT**-0.5), heads, splits, shape,
        num_warps=tiling.heads // 4 * tiling.halves,
    )  # fmt: skip
    merge_rotated(partials, signs, out, MIXED, early=False)
    return out
