"""Producer warps of MLA attention on Hopper: copy codes of latents and write their levels as operands of the tensor cores.

A byte of codes is looked up in a table in shared memory with a column per lane, so that look-ups have no bank conflicts. A byte
is one code of 8 bits or two neighbours of 4; its lower seven bits select the row, the eighth bit the half of the row.

A warp decodes eight rows of every tile. Their codes stream through a per-warp ring by `cp.async`, a chunk of a few rows at a
time, and a warp reads back only what it copied itself: no synchronization until a tile is complete.

Full-precision latents overwrite their rows in a decoded tile; consumers take their norms as 1.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from auraflux.ops.gpu.blocks.dependent_launch import gdc_wait
from auraflux.ops.hopper.ptx import SHARED_BASE
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.encode.hadamard import MOST_BOOKS
from auraflux.ops.turboquant.cuda.mla.full_precision import FullPrecisionLatentShape

# rows of shared memory, 4 KB each
TABLE_ROWS = gl.constexpr(8)
LEVELS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LANES = gl.constexpr("mov.u32 $0, %laneid; mul.lo.u32 $0, $0, 0x04040404; // $1")


class Config(NamedTuple):
    """Compile-time configuration of MLA attention over codes.

    page         tokens per page
    sequences    batch size, rounded up to a power of two
    positions    per tile, 8 per producer warp
    heads        per program
    bits         of a code
    rows, depth  rows per chunk of codes, chunks in flight per warp
    stages       decoded tiles in shared memory
    full         positions read in full precision
    split_keys   keys per split inside `invariant`, else 0
    """

    page: int
    sequences: int
    positions: int
    heads: int
    bits: int
    rows: int
    depth: int
    stages: int
    full: FullPrecisionLatentShape
    split_keys: int


@lru_cache(MOST_BOOKS)
def table_for(bits: int, width: int, device: torch.device, explicit: Codebook | None = None) -> Tensor:
    """Return two float16 levels of N(0, 1) per byte, in the order of the table's rows: int32 [256].

    At 8 bits a byte's level is in the low half.
    """
    byte = torch.arange(256)
    byte = byte // 2 + byte % 2 * 128
    book = (codebook(bits, width, explicit=explicit) * width**0.5).half()
    pair = (byte & 15, byte >> 4) if bits == 4 else (byte, byte)
    return torch.stack([book[code] for code in pair], 1).view(torch.int32).squeeze(1).to(device)


@gluon.constexpr_function
def tile_rows(positions):
    """Return the 4 KB rows of a tile of levels."""
    return positions // 4


@gluon.constexpr_function
def shared_rows(positions, stages, warps, ring):
    """Return the 4 KB rows of the table, the tiles of levels, and the rings of `ring` bytes of all warps."""
    return 8 + positions // 4 * stages + (warps * ring + 4095) // 4096


@gluon.constexpr_function
def _copy_ptx(nbytes):
    """Return PTX that copies a chunk of codes: $1 to, $2 from, $3 predicate; always commits a group."""
    text = "{.reg .pred p; setp.ne.b32 p, $3, 0; bar.warp.sync 0xffffffff; "
    for at in range(0, nbytes, 512):
        text += f"@p cp.async.cg.shared.global [$1 + {at}], [$2 + {at}], 16; "
    return text + "cp.async.commit_group; mov.b32 $0, 0;}"


@gluon.constexpr_function
def _read_ptx(bits, rows, pending):
    """Return PTX that waits for all but `pending` chunks and reads a lane's words of one: 8 codes of every 256."""
    each, count = bits // 4, 2 * rows
    outs = each * count
    text = f"cp.async.wait_group {pending}; bar.warp.sync 0xffffffff; "
    for k in range(count):
        regs = ", ".join(f"${each * k + j}" for j in range(each))
        # half a row of 512 codes
        text += f"ld.shared.v2.b32 {{{regs}}}, " if each == 2 else f"ld.shared.b32 {regs}, "
        text += f"[${outs} + {k * 32 * bits}]; "
    return text


@gluon.constexpr_function
def look_up_ptx(word, outs, lane, table, bits):
    """Return PTX that maps a word to the levels of its codes in pairs, with 4 * lane in every byte of `lane`."""
    text = f"and.b32 h, {word}, 0x7F7F7F7F; lop3.b32 l, {word}, 0x80808080, {lane}, 0xEA; "
    for byte in range(4):
        name = "ab"[byte % 2]
        target = outs[byte] if bits == 4 else name
        # bytes of the address: eighth bit and lane, the other bits, and twice their sign, which is 0
        chosen = (12 + byte) * 0x1100 + (4 + byte) * 16 + byte
        text += f"prmt.b32 {name}, l, h, {chosen}; add.u32 {name}, {name}, {table}; ld.shared.b32 {target}, [{name}]; "
        if bits == 8 and byte % 2:
            text += f"prmt.b32 {outs[byte // 2]}, a, b, 0x5410; "
    return text


@gluon.constexpr_function
def _write_ptx(bits, rows, first, positions):
    """Return PTX that looks up the words of a chunk and stores rows from `first` on in a tile, 16 bytes at a time.

    inputs  words, 4 * lane in every byte, the table's address, a lane's address in the tile, and 16 * (lane % 8)
    """
    each, count = bits // 4, 2 * rows
    words = each * count
    lane, table, place, swizzle = (f"${words + 1 + k}" for k in range(4))
    text = f"{{.reg .b32 h, l, a, b, t; .reg .b32 v<{4 * count}>; "
    for k in range(count):
        for j in range(each):
            outs = [f"v{4 * k + 4 // each * j + n}" for n in range(4 // each)]
            text += look_up_ptx(f"${1 + each * k + j}", outs, lane, table, bits)
    for k in range(count):
        row, half = first + k // 2, k % 2
        values = ", ".join(f"v{4 * k + n}" for n in range(4))
        text += f"xor.b32 t, {swizzle}, {row * 16}; add.u32 t, t, {place}; "
        text += f"st.shared.v4.b32 [t + {row * 128 + half * positions * 512}], {{{values}}}; "
    return text + "mov.b32 $0, 0;}"


@gluon.constexpr_function
def _registers(outs, ins):
    return "=&r," * outs + ",".join(["r"] * ins) + ",~{memory}"


@gluon.jit
def load_table(levels, FIRST: gl.constexpr, ROWS: gl.constexpr, NW: gl.constexpr):
    FILL: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [NW, 1], [1, 0])
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, FILL)), gl.arange(0, 32, gl.SliceLayout(0, FILL))
    return gl.load(levels + FIRST + row[:, None] + column[None, :] * 0)


@gluon.jit
def store_table(shared, words, AT: gl.constexpr, ROWS: gl.constexpr):
    some = shared.index(AT)._reinterpret(gl.int32, [ROWS, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    some.store(words)


@gluon.jit
def page_of(table, begin, tile, count, PAGE: gl.constexpr, NP: gl.constexpr):
    """Load the page of a tile, or of the last tile if it is past the end; there may be no tile."""
    return gl.load(table + (begin + gl.maximum(gl.minimum(tile, count - 1), 0) * NP) // PAGE)


@gluon.jit
def _copy(
    to, source, page, begin, tile, old, count, pool, CHUNK: gl.constexpr, FIRST: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Copy a chunk of a warp's rows of a tile."""
    PAGE: gl.constexpr = CONFIG.page
    NP: gl.constexpr = CONFIG.positions
    BITS: gl.constexpr = CONFIG.bits
    RP: gl.constexpr = CONFIG.rows
    first, there = begin + tile * NP, tile < count
    # the previous kernel writes the new tokens of this step
    if FIRST and there & (first + NP > old):
        gdc_wait()
    page = gl.where((page >= 0) & (page < pool), page, 0)
    at = (page.to(gl.int64) * PAGE + first % PAGE) * (64 * BITS) + CHUNK * (64 * BITS * RP)
    args = [to, source + at, to * 0 + there.to(gl.int32)]
    gl.inline_asm_elementwise(_copy_ptx(64 * BITS * RP), "=r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _read_words(at, BITS: gl.constexpr, RP: gl.constexpr, DEPTH: gl.constexpr):
    N: gl.constexpr = BITS * RP // 2
    PTX: gl.constexpr = _read_ptx(BITS, RP, DEPTH - 1)
    return gl.inline_asm_elementwise(PTX, _registers(N, 1), [at], (gl.int32,) * N, is_pure=False, pack=1)


@gluon.jit
def _write_levels(w, lanes, place, tile, swizzle, CHUNK: gl.constexpr, BITS: gl.constexpr, RP: gl.constexpr, NP: gl.constexpr):
    N: gl.constexpr = BITS * RP // 2
    PTX: gl.constexpr = _write_ptx(BITS, RP, CHUNK * RP, NP)
    if N == 8:
        args = [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], lanes, place, tile, swizzle]
    else:
        args = [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
                lanes, place, tile, swizzle]  # fmt: skip
    gl.inline_asm_elementwise(PTX, _registers(1, N + 4), args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_at(shared, i, NP: gl.constexpr, ST: gl.constexpr):
    """Return the shared memory of decoded tile `i`."""
    return shared.index(TABLE_ROWS + i % ST * tile_rows(NP))._reinterpret(gl.float16, [NP, 512], LEVELS)


@gluon.jit
def is_full_precision(position, first, seen, FULL: gl.constexpr):
    """Return which positions of a tile at `first` the last of `seen` tokens reads in full precision."""
    return (position < FULL.sink_tokens - first) | (position >= seen - FULL.recent_window - first)


@gluon.jit
def _replace_rows(tile, rows, pages, width, pool, position, wanted, PAGE: gl.constexpr, NW: gl.constexpr):
    """Overwrite rows of a tile with full-precision rows of their positions, where `wanted`."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    channel = gl.arange(0, 64, gl.SliceLayout(0, L))[None, :]
    page = gl.load(pages + position // PAGE, mask=wanted & (position // PAGE < width), other=0)
    page = gl.where((page >= 0) & (page < pool), page, 0)
    at, wanted = (page.to(gl.int64) * PAGE + position % PAGE)[:, None] * 512, wanted[:, None] & (channel >= 0)
    for part in gl.static_range(8):
        some = tile.slice(part * 64, 64, dim=1)
        found = gl.load(rows + at + (part * 64 + channel), mask=wanted, other=0.0)
        some.store(gl.where(wanted, found.to(gl.float16), some.load(L)))


@gluon.jit
def _insert_full_precision(tile, full, sequence, first, seen, FULL: gl.constexpr, NP: gl.constexpr, NW: gl.constexpr):
    """Overwrite the rows of full-precision positions in a completed tile at `first`."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    position, sequence = first + gl.arange(0, NP, gl.SliceLayout(1, L)), sequence.to(gl.int64)
    # the previous kernel writes the new tokens of this step
    gdc_wait()
    gl.thread_barrier()
    if FULL.recent_window > 0:  # noqa: SIM102
        if first + NP + FULL.recent_window > seen:
            near = (position >= FULL.sink_tokens) & (position < seen) & (position + FULL.recent_window >= seen)
            table = full.recent_table + sequence * full.recent_width
            _replace_rows(tile, full.recent_rows, table, full.recent_width, full.recent_pool, position, near, FULL.page, NW)
    if FULL.sink_tokens > 0:  # noqa: SIM102
        if first < FULL.sink_tokens:
            early = (position < FULL.sink_tokens) & (position < seen)
            table = full.sink_table + sequence * full.sink_width
            _replace_rows(tile, full.sink_rows, table, full.sink_width, full.sink_pool, position, early, FULL.sink_page, NW)


@gluon.jit
def decode(
    codes, full, shared, levels, tiles, table, sequence, span, pool, CONFIG: gl.constexpr
):  # fmt: skip
    """Fill the table, then decode the tiles of a split.

    full    full-precision latents; None without
    shared  the table, tiles, and rings of all warps
    tiles   barriers of full tiles, of empty tiles
    span    first position, positions cached before this step, tokens of the sequence, number of tiles. Codes of cached
            positions are copied before the previous kernel has ended (PDL)
    """
    PAGE: gl.constexpr = CONFIG.page
    NP: gl.constexpr = CONFIG.positions
    BITS: gl.constexpr = CONFIG.bits
    RP: gl.constexpr = CONFIG.rows
    DEPTH: gl.constexpr = CONFIG.depth
    ST: gl.constexpr = CONFIG.stages
    NW: gl.constexpr = NP // 8
    FULL: gl.constexpr = CONFIG.full
    begin, old, seen, count = span
    CHUNKS: gl.constexpr = 8 // RP  # of a warp's rows
    NBYTES: gl.constexpr = 64 * BITS * RP
    gl.static_assert(NP == 8 * NW and DEPTH <= 2 * CHUNKS)
    if NW == 8:
        # issued before any load that is waited for
        words0, words1 = load_table(levels, 0, 128, NW), load_table(levels, 128, 128, NW)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    warp = gl.arange(0, NW, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :] + warp * 0
    place = gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    lanes = gl.inline_asm_elementwise(LANES, "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    ring = place + (TABLE_ROWS + ST * tile_rows(NP)) * 4096 + warp * (DEPTH * NBYTES)
    to, at = ring + lane * 16, ring + lane * BITS
    source = codes.to(gl.int64) + warp * (512 * BITS) + lane * 16
    target, swizzle = place + TABLE_ROWS * 4096 + lane // 8 * (NP * 128) + warp * 1024, lane % 8 * 16
    page0, page1 = page_of(table, begin, 0, count, PAGE, NP), page_of(table, begin, 1, count, PAGE, NP)
    page2 = page_of(table, begin, 2, count, PAGE, NP)
    for n in gl.static_range(DEPTH):
        page = page0 if n < CHUNKS else page1
        _copy(to + n * NBYTES, source, page, begin, n // CHUNKS, old, count, pool, n % CHUNKS, n % CHUNKS == 0, CONFIG)
    if NW == 8:
        store_table(shared, words0, 0, 128)
        store_table(shared, words1, 4, 128)
    else:
        for part in gl.static_range(4):
            store_table(shared, load_table(levels, part * 64, 64, NW), 2 * part, 64)
    gl.thread_barrier()
    for i in range(count):
        page3 = page_of(table, begin, i + 3, count, PAGE, NP)
        tile = target + i % ST * (NP * 1024)
        for chunk in gl.static_range(CHUNKS):
            slot = (i * CHUNKS + chunk) % DEPTH * NBYTES
            w = _read_words(at + slot, BITS, RP, DEPTH)
            # this chunk has been read: its slot in the ring is free
            page = page0 if chunk + DEPTH < CHUNKS else page1 if chunk + DEPTH < 2 * CHUNKS else page2
            _copy(to + slot, source, page, begin, i + (chunk + DEPTH) // CHUNKS, old, count, pool,
                  (chunk + DEPTH) % CHUNKS, (chunk + DEPTH) % CHUNKS == 0, CONFIG)  # fmt: skip
            if chunk == 0:
                mbarrier.wait(tiles.index(ST + i % ST), (i // ST % 2) ^ 1)
            _write_levels(w, lanes, place, tile, swizzle, chunk, BITS, RP, NP)
        if FULL.sink_tokens + FULL.recent_window > 0:
            first = begin + i * NP
            if (first < FULL.sink_tokens) | (first + NP + FULL.recent_window > seen):
                _insert_full_precision(tile_at(shared, i, NP, ST), full, sequence, first, seen, FULL, NP, NW)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(tiles.index(i % ST))
        page0, page1, page2 = page1, page2, page3
