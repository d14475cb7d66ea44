"""How coded latents become operands of the tensor cores on Hopper: warps that ask for codes and write their levels.

A byte of codes is looked up in a table in shared memory with a column for every lane, so that look-ups never share a bank.
A byte is one code of 8 bits or two neighbours of 4; its row is at its lower seven bits, in the half that the eighth names.

A warp has eight rows of every tile. Their codes come through a ring of its own by `cp.async`, a few rows at a time, and it
reads back only what it asked for itself: warps wait for nobody until a tile is whole.

Rows of latents that are kept as they are replace theirs in a decoded tile. Whoever reads it takes their norms for 1.
"""

from functools import lru_cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from auraflux.ops.hopper.ptx import SHARED_BASE
from auraflux.ops.turboquant.codebook import Codebook, codebook
from auraflux.ops.turboquant.cuda.hadamard import MOST_BOOKS

# of shared memory, 4 KB each
TABLE_ROWS = gl.constexpr(8)
LEVELS = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LANES = gl.constexpr("mov.u32 $0, %laneid; mul.lo.u32 $0, $0, 0x04040404; // $1")


@lru_cache(MOST_BOOKS)
def table_for(bits: int, width: int, device: torch.device, given: Codebook | None = None) -> Tensor:
    """Give two float16 levels of N(0, 1) for every byte, in the order of the table's rows: int32 [256].

    A byte of one code has its level in the lower half.
    """
    byte = torch.arange(256)
    byte = byte // 2 + byte % 2 * 128
    book = (codebook(bits, width, given=given) * width**0.5).half()
    pair = (byte & 15, byte >> 4) if bits == 4 else (byte, byte)
    return torch.stack([book[code] for code in pair], 1).view(torch.int32).squeeze(1).to(device)


@gluon.constexpr_function
def tile_rows(positions):
    """How many times 4 KB a tile of levels takes."""
    return positions // 4


@gluon.constexpr_function
def shared_rows(positions, stages, warps, ring):
    """How many times 4 KB the table, tiles of levels and the rings, of `ring` bytes, of all warps take."""
    return 8 + positions // 4 * stages + (warps * ring + 4095) // 4096


@gluon.constexpr_function
def _copy_ptx(nbytes):
    """Ask for a piece of codes: $1 where to, $2 where from, $3 whether to; a group even if not."""
    text = "{.reg .pred p; setp.ne.b32 p, $3, 0; bar.warp.sync 0xffffffff; "
    for at in range(0, nbytes, 512):
        text += f"@p cp.async.cg.shared.global [$1 + {at}], [$2 + {at}], 16; "
    return text + "cp.async.commit_group; mov.b32 $0, 0;}"


@gluon.constexpr_function
def _read_ptx(bits, rows, pending):
    """Wait until all but `pending` pieces are there, and read a lane's words of one: 8 codes out of every 256."""
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
def _look_up_ptx(word, outs, lane, table, bits):
    """Turn a word into the levels of its codes in pairs, with 4 * lane in every byte of `lane`."""
    text = f"and.b32 h, {word}, 0x7F7F7F7F; lop3.b32 l, {word}, 0x80808080, {lane}, 0xEA; "
    for byte in range(4):
        name = "ab"[byte % 2]
        target = outs[byte] if bits == 4 else name
        # the eighth bit and the lane, the other bits, and twice their sign, which is none
        chosen = (12 + byte) * 0x1100 + (4 + byte) * 16 + byte
        text += f"prmt.b32 {name}, l, h, {chosen}; add.u32 {name}, {name}, {table}; ld.shared.b32 {target}, [{name}]; "
        if bits == 8 and byte % 2:
            text += f"prmt.b32 {outs[byte // 2]}, a, b, 0x5410; "
    return text


@gluon.constexpr_function
def _write_ptx(bits, rows, first, positions):
    """Look up the words of a piece and store 16 bytes at a time, where rows from `first` on belong in a tile.

    inputs  words, 4 * lane in every byte, the table's place, a lane's place in the tile, and 16 * (lane % 8)
    """
    each, count = bits // 4, 2 * rows
    words = each * count
    lane, table, place, swizzle = (f"${words + 1 + k}" for k in range(4))
    text = f"{{.reg .b32 h, l, a, b, t; .reg .b32 v<{4 * count}>; "
    for k in range(count):
        for j in range(each):
            outs = [f"v{4 * k + 4 // each * j + n}" for n in range(4 // each)]
            text += _look_up_ptx(f"${1 + each * k + j}", outs, lane, table, bits)
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
def _load_table(levels, FIRST: gl.constexpr, ROWS: gl.constexpr, NW: gl.constexpr):
    FILL: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [NW, 1], [1, 0])
    row, column = gl.arange(0, ROWS, gl.SliceLayout(1, FILL)), gl.arange(0, 32, gl.SliceLayout(0, FILL))
    return gl.load(levels + FIRST + row[:, None] + column[None, :] * 0)


@gluon.jit
def _store_table(shared, words, AT: gl.constexpr, ROWS: gl.constexpr):
    some = shared.index(AT)._reinterpret(gl.int32, [ROWS, 32], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    some.store(words)


@gluon.jit
def page_of(table, begin, tile, count, PAGE: gl.constexpr, NP: gl.constexpr):
    """Look up the page of a tile, or of the last one if it is past that; there need be none."""
    return gl.load(table + (begin + gl.maximum(gl.minimum(tile, count - 1), 0) * NP) // PAGE)


@gluon.jit
def _ask(
    to, source, page, begin, tile, old, count, pool, PIECE: gl.constexpr, FIRST: gl.constexpr,
    PAGE: gl.constexpr, NP: gl.constexpr, BITS: gl.constexpr, RP: gl.constexpr,
):  # fmt: skip
    """Ask for a piece of a warp's rows of a tile."""
    first, there = begin + tile * NP, tile < count
    # what this step has added is there only when the kernel before has ended
    if FIRST and there & (first + NP > old):
        gdc_wait()
    page = gl.where((page >= 0) & (page < pool), page, 0)
    at = (page.to(gl.int64) * PAGE + first % PAGE) * (64 * BITS) + PIECE * (64 * BITS * RP)
    args = [to, source + at, to * 0 + there.to(gl.int32)]
    gl.inline_asm_elementwise(_copy_ptx(64 * BITS * RP), "=r,r,l,r,~{memory}", args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def _read(at, BITS: gl.constexpr, RP: gl.constexpr, DEEP: gl.constexpr):
    N: gl.constexpr = BITS * RP // 2
    PTX: gl.constexpr = _read_ptx(BITS, RP, DEEP - 1)
    return gl.inline_asm_elementwise(PTX, _registers(N, 1), [at], (gl.int32,) * N, is_pure=False, pack=1)


@gluon.jit
def _write(w, lanes, place, tile, swizzle, PIECE: gl.constexpr, BITS: gl.constexpr, RP: gl.constexpr, NP: gl.constexpr):
    N: gl.constexpr = BITS * RP // 2
    PTX: gl.constexpr = _write_ptx(BITS, RP, PIECE * RP, NP)
    if N == 8:
        args = [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], lanes, place, tile, swizzle]
    else:
        args = [w[0], w[1], w[2], w[3], w[4], w[5], w[6], w[7], w[8], w[9], w[10], w[11], w[12], w[13], w[14], w[15],
                lanes, place, tile, swizzle]  # fmt: skip
    gl.inline_asm_elementwise(PTX, _registers(1, N + 4), args, gl.int32, is_pure=False, pack=1)


@gluon.jit
def tile_at(shared, i, NP: gl.constexpr, ST: gl.constexpr):
    """Give the place of decoded tile `i`."""
    return shared.index(TABLE_ROWS + i % ST * tile_rows(NP))._reinterpret(gl.float16, [NP, 512], LEVELS)


@gluon.jit
def is_kept(position, first, seen, KEPT: gl.constexpr):
    """Tell which positions of a tile that begins at `first` the newest of `seen` tokens reads as they are."""
    return (position < KEPT.first - first) | (position >= seen - KEPT.newest - first)


@gluon.jit
def _replace(tile, rows, pages, width, pool, position, wanted, PAGE: gl.constexpr, NW: gl.constexpr):
    """Replace rows of a tile by those that are kept of their positions, where `wanted`."""
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
def _keep(tile, kept, sequence, first, seen, KEPT: gl.constexpr, NP: gl.constexpr, NW: gl.constexpr):
    """Replace the rows of kept positions in a tile that begins at `first`, when it is whole."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [NW, 1], [1, 0])
    position, sequence = first + gl.arange(0, NP, gl.SliceLayout(1, L)), sequence.to(gl.int64)
    # what this step has added is there only when the kernel before has ended
    gdc_wait()
    gl.thread_barrier()
    if KEPT.newest > 0:  # noqa: SIM102
        if first + NP + KEPT.newest > seen:
            near = (position >= KEPT.first) & (position < seen) & (position + KEPT.newest >= seen)
            table = kept.table + sequence * kept.width
            _replace(tile, kept.rows, table, kept.width, kept.pool, position, near, KEPT.page, NW)
    if KEPT.first > 0:  # noqa: SIM102
        if first < KEPT.first:
            early = (position < KEPT.first) & (position < seen)
            table = kept.head_table + sequence * kept.head_width
            _replace(tile, kept.head, table, kept.head_width, kept.head_pool, position, early, KEPT.head_page, NW)


@gluon.jit
def decode(
    codes, kept, shared, levels, tiles, table, sequence, begin, old, seen, count, pool, PAGE: gl.constexpr, NP: gl.constexpr,
    BITS: gl.constexpr, RP: gl.constexpr, DEEP: gl.constexpr, ST: gl.constexpr, NW: gl.constexpr, KEPT: gl.constexpr,
):  # fmt: skip
    """Fill the table, then write the levels of `count` tiles of NP positions from `begin` on.

    Positions before `old` are of earlier steps: their codes are asked for before the kernel launched before this one has ended.
    kept    latents that the newest of `seen` tokens of a sequence reads as they are, see `KeptLatents`; None for none
    shared  the table, ST tiles, and rings of DEEP pieces of RP rows for each warp
    tiles   barriers of full tiles [ST], of empty ones [ST]
    """
    PIECES: gl.constexpr = 8 // RP  # of a warp's rows
    NBYTES: gl.constexpr = 64 * BITS * RP
    gl.static_assert(NP == 8 * NW and DEEP <= 2 * PIECES)
    if NW == 8:
        # asked for before anything that must be waited for
        words0, words1 = _load_table(levels, 0, 128, NW), _load_table(levels, 128, 128, NW)
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [NW, 1], [1, 0])
    warp = gl.arange(0, NW, gl.SliceLayout(1, L))[:, None]
    lane = gl.arange(0, 32, gl.SliceLayout(0, L))[None, :] + warp * 0
    place = gl.inline_asm_elementwise(SHARED_BASE, "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    lanes = gl.inline_asm_elementwise(LANES, "=r,r", [count], dtype=gl.int32, is_pure=True, pack=1)
    ring = place + (TABLE_ROWS + ST * tile_rows(NP)) * 4096 + warp * (DEEP * NBYTES)
    to, at = ring + lane * 16, ring + lane * BITS
    source = codes.to(gl.int64) + warp * (512 * BITS) + lane * 16
    target, swizzle = place + TABLE_ROWS * 4096 + lane // 8 * (NP * 128) + warp * 1024, lane % 8 * 16
    page0, page1 = page_of(table, begin, 0, count, PAGE, NP), page_of(table, begin, 1, count, PAGE, NP)
    page2 = page_of(table, begin, 2, count, PAGE, NP)
    for n in gl.static_range(DEEP):
        page = page0 if n < PIECES else page1
        _ask(to + n * NBYTES, source, page, begin, n // PIECES, old, count, pool, n % PIECES, n % PIECES == 0, PAGE, NP, BITS,
             RP)  # fmt: skip
    if NW == 8:
        _store_table(shared, words0, 0, 128)
        _store_table(shared, words1, 4, 128)
    else:
        for part in gl.static_range(4):
            _store_table(shared, _load_table(levels, part * 64, 64, NW), 2 * part, 64)
    gl.thread_barrier()
    for i in range(count):
        page3 = page_of(table, begin, i + 3, count, PAGE, NP)
        tile = target + i % ST * (NP * 1024)
        for piece in gl.static_range(PIECES):
            slot = (i * PIECES + piece) % DEEP * NBYTES
            w = _read(at + slot, BITS, RP, DEEP)
            # this piece has been read: its place in the ring is free again
            page = page0 if piece + DEEP < PIECES else page1 if piece + DEEP < 2 * PIECES else page2
            _ask(to + slot, source, page, begin, i + (piece + DEEP) // PIECES, old, count, pool,
                 (piece + DEEP) % PIECES, (piece + DEEP) % PIECES == 0, PAGE, NP, BITS, RP)  # fmt: skip
            if piece == 0:
                mbarrier.wait(tiles.index(ST + i % ST), (i // ST % 2) ^ 1)
            _write(w, lanes, place, tile, swizzle, piece, BITS, RP, NP)
        if KEPT.first + KEPT.newest > 0:
            first = begin + i * NP
            if (first < KEPT.first) | (first + NP + KEPT.newest > seen):
                _keep(tile_at(shared, i, NP, ST), kept, sequence, first, seen, KEPT, NP, NW)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(tiles.index(i % ST))
        page0, page1, page2 = page1, page2, page3
