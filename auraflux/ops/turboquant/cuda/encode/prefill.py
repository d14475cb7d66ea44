"""Encoding of bfloat16 prefill tokens into their pages on Hopper: Gluon, with PTX for tensor cores and look-ups.

Codes equal the reference's bit for bit, though float32 decides nearly all of them. The transform on tensor cores is off by less
than 1e-6 of a coordinate's standard deviation, so codes are certain wherever coordinates are that far from the midpoints
between levels. Vectors with a closer coordinate are recoded with the reference's arithmetic (`exact.py`).

- *Transform*: the WHT of 128 is one of 32 by `mma`, whose factors 1 and -1 a lane holds in 16 words, and eight additions per
  four channels. Tensor cores sum in any order, so the order is chosen that leaves a lane with 32 neighbouring channels of two
  neighbouring tokens, the contents of the words of keys and of values in pairs: no shuffles.
- *Codes*: one table look-up and one multiply-add, see `tables.py`. Tables of 32 words lie in the lanes of a warp, those of 8
  bits in shared memory. The last additions of the transform also scale its results to table coordinates.
- *One wave*: a program is a warp with 16 tokens, and 16 or 17 of them are resident on a multiprocessor, enough for 2048 tokens
  of 8 heads. Tokens of one sequence are copied as if the first position were a multiple of 16, and again if it is not, so that
  the copy does not wait for the length. Values of few bits do wait, and load while keys are encoded.
- *L2 prefetch*: programs that start while the previous kernel still runs (PDL) prefetch all keys and values.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import inline_asm_elementwise as asm

from auraflux.ops.gpu.blocks.pages import index_of
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.hopper.ptx import SHARED_BASE, WAIT_AND_LAUNCH, run
from auraflux.ops.hopper.reduce import any_bits, sum_four
from auraflux.ops.turboquant.cuda.arguments import keys_of, values_of
from auraflux.ops.turboquant.cuda.encode.exact import recode_uncertain, store_one_by_one
from auraflux.ops.turboquant.cuda.encode.pages import load_tile, prefetch_l2, store_pairs, store_rows, words_of
from auraflux.ops.turboquant.cuda.encode.tables import FEW_BITS, SEARCH, BucketTable, bucket_table_for, sign_words, step
from auraflux.ops.turboquant.cuda.encode.tensor_core_parts import (
    ROW_PITCH,
    factors,
    finish_coordinates,
    four_codes,
    inverse_root,
    load_ptx,
    operands,
    squared_length,
    squares_at,
    squares_of,
    transformed,
)
from auraflux.ops.turboquant.pages import CodePages

MANY = 2048  # vectors; below, one program per row is as fast
TILE = 16  # tokens per program
# with 120 registers 17 programs are resident, which is faster for codes of 8 bits; with 128 registers 16
REGISTERS, MORE_REGISTERS = 120, 128
# shapes for which the kernel is tested on a GPU
WIDTH, KEY_BITS, VALUE_BITS = 128, (4, 8), (2, 4, 8)
MOST_SEQUENCES = 32

MOVE = gl.constexpr("{.reg .b32 a, b, c, d; ld.global.v4.b32 {a,b,c,d}, [$2]; st.shared.v4.b32 [$1],{a,b,c,d}; mov.b32 $0, 0;}")
TOKENS_NBYTES = gl.constexpr(16 * 288)  # of tokens in shared memory
# limits of 32 * squared length outside of which squares may overflow or underflow float32
SHORTEST = gl.constexpr(1e-18)
LONGEST = gl.constexpr(1e36)


class Side(NamedTuple):
    """Encoding of keys or values: bits, buckets of the code search, and unit of integer squared levels."""

    bits: int
    buckets: int
    step: float


class Config(NamedTuple):
    """Compile-time configuration of `append_many`.

    batch       several sequences
    heads       key heads
    keys, vals  their encoding
    page        tokens per page
    nbytes      shared memory
    rare        uncertain codes are rare, since all have few bits
    """

    batch: bool
    heads: int
    keys: Side
    vals: Side
    page: int
    nbytes: int
    rare: bool


@gluon.jit
def _memory(NBYTES: gl.constexpr, lane):
    """Allocate the kernel's only shared memory, so that it begins at the base; the store makes Triton declare it."""
    memory = gl.allocate_shared_memory(gl.int8, [NBYTES // 1024, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory.index(0).slice(0, 32).store(lane.to(gl.int8))
    gl.thread_barrier()
    return memory, asm(SHARED_BASE, "=r,r", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _codes_of(S, TOKEN: gl.constexpr, scale, offset, table, BUCKETS: gl.constexpr, NEAR: gl.constexpr):
    """Return a token's 32 codes, four per word, neighbours if NEAR, else every second of eight; and if any is uncertain."""
    codes = ()
    uncertain, beyond = table * 0 - 1, table * 0
    for j in gl.static_range(4):
        a0, a1, a2, a3 = finish_coordinates(S, 4 * j + 2 * TOKEN, scale, offset, BUCKETS)
        b0, b1, b2, b3 = finish_coordinates(S, 4 * j + 2 * TOKEN + 1, scale, offset, BUCKETS)
        if NEAR:
            c, uncertain, beyond = four_codes(a0, b0, a1, b1, table, uncertain, beyond, BUCKETS)
            d, uncertain, beyond = four_codes(a2, b2, a3, b3, table, uncertain, beyond, BUCKETS)
        else:
            c, uncertain, beyond = four_codes(a0, a1, a2, a3, table, uncertain, beyond, BUCKETS)
            d, uncertain, beyond = four_codes(b0, b1, b2, b3, table, uncertain, beyond, BUCKETS)
        codes += (c, d)  # type: ignore[assignment]
    return codes, ((uncertain & 0xFFFF) == 0) | ((uncertain & -65536) == 0) | (beyond != 0)


@gluon.jit
def _unusual(square):
    return ~((square > SHORTEST) & (square < LONGEST))


@gluon.jit
def _bits(first, second, place):
    """Set a bit for each of a lane's two tokens that is flagged."""
    return (first.to(gl.int32) << place) | (second.to(gl.int32) << (place + 1))


@gluon.jit
def _any_lane(first, second, g):
    """Set a bit for every token of a warp that any of its lanes flags."""
    return any_bits(_bits(first, second, 2 * g))


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _append(
    x, store, signs, index, base, number, head, tokens, lane, SIDE: gl.constexpr, PAIRS: gl.constexpr, CONFIG: gl.constexpr
):  # fmt: skip
    """Encode the keys or values of one head, 16 neighbouring tokens."""
    HEADS: gl.constexpr = CONFIG.heads
    PAGE: gl.constexpr = CONFIG.page
    RARE: gl.constexpr = CONFIG.rare
    BITS: gl.constexpr = SIDE.bits
    BUCKETS: gl.constexpr = SIDE.buckets
    g, q = lane // 4, lane % 4
    words, scale, offset = store.levels
    table, squares, midpoints = gl.load(words + lane), gl.load(words + 32 + lane), gl.load(words + 64 + lane)
    if BUCKETS > 32:
        for i in gl.static_range((BUCKETS + (2 << BITS)) // 128):
            args = [base + TOKENS_NBYTES + 512 * i + lane * 16, (words + (128 * i + lane * 4)).to(gl.int64)]
            asm(MOVE, "=r,r,l,~{memory}", args, gl.int32, is_pure=False, pack=1)
        table = base + TOKENS_NBYTES
        squares = base + (TOKENS_NBYTES + 4 * BUCKETS)
        midpoints = squares + (4 << BITS)
        gl.thread_barrier()
    sign_at = (signs + q * 4).to(gl.int64)
    sign = asm(load_ptx("global", 1), operands(16, "r", "l"), [sign_at], (gl.int32,) * 16, is_pure=False, pack=1)
    F = factors(g, q)
    run(WAIT_AND_LAUNCH, lane)
    pages, first, end, tile = load_tile(x, base, index, number, head, tokens, lane, HEADS, CONFIG.batch, PAIRS and RARE)
    position = tile + 2 * g
    at = base + g * (2 * ROW_PITCH) + q * 16
    w = asm(load_ptx("shared", 2), operands(32, "r", "r,~{memory}"), [at], (gl.int32,) * 32, is_pure=False, pack=1)
    new = (tile >= 0) & (tile < index.width * PAGE) & (tile + 15 >= first) & (tile < end)
    page = gl.load(pages + tile // PAGE, mask=new, other=-1)
    new = (page >= 0) & (page < index.pool)
    one = (position >= gl.maximum(first, 0)) & (position < end)
    two = (position + 1 >= gl.maximum(first, 0)) & (position + 1 < end)
    if not RARE:
        one, two = new & one, new & two
    row = (gl.maximum(page, 0).to(gl.int64) * HEADS + head) * PAGE + position % PAGE
    S = transformed(w, sign, F)
    square0, square1 = squared_length(S, 0), squared_length(S, 1)
    unusual0, unusual1 = _unusual(square0), _unusual(square1)
    single0, single1 = unusual0, unusual1
    if PAIRS:
        # the codes of a pair token that is not new must survive
        single0, single1 = unusual0 | ~two, unusual1 | ~one
    if not RARE:
        single = _any_lane(single0 & one, single1 & two, g)
    NEAR: gl.constexpr = BITS == 8 or (PAIRS and BITS == 4)
    C, uncertain0 = _codes_of(S, 0, inverse_root(square0) * scale, offset, table, BUCKETS, NEAR)
    D, uncertain1 = _codes_of(S, 1, inverse_root(square1) * scale, offset, table, BUCKETS, NEAR)
    if RARE:
        # one reduction, which does not wait for the page
        both = _bits((uncertain0 | unusual0) & one, (uncertain1 | unusual1) & two, 2 * g)
        both = gl.reduce(both | _bits(single0 & one, single1 & two, 2 * g + 16), 0, _either)
        any_uncertain = (both & 0xFFFF) != 0
        mask, single = (both & 0xFFFF) + 0 * lane, gl.where(new, (both >> 16) & 0xFFFF, 0)
    else:
        mask = _any_lane((uncertain0 | unusual0) & one, (uncertain1 | unusual1) & two, g)
        any_uncertain = gl.max(mask, 0) > 0
    if any_uncertain:
        search = scale * (32**-0.5), offset, signs, table, midpoints
        C, D = recode_uncertain(base, C, D, search, mask, lane, BITS, BUCKETS, NEAR)
    if RARE:
        one, two = one & new, two & new
    if BUCKETS == 32:
        c, d = squares_of(words_of(C) + words_of(D), squares, BITS)
        total0, total1 = c.to(gl.float32) * SIDE.step, d.to(gl.float32) * SIDE.step
    else:
        total0, total1 = sum_four(squares_at(C, squares)), sum_four(squares_at(D, squares))
    if PAIRS:
        store_pairs(store.codes, row, q, one & two, C, D, BITS)
    else:
        store_rows(store.codes, row, q, one, two, C, D, BITS)
    second = q % 2 == 1
    square = gl.where(second, square1, square0) * (1.0 / 32)
    norm = square * inverse_root(square * gl.where(second, total1, total0))
    gl.store(store.norms + row + q % 2, norm, mask=gl.where(second, two, one) & (q < 2))
    any_single = ((both & -65536) != 0) if RARE else (gl.max(single, 0) > 0)
    if any_single:
        gl.thread_barrier()
        search, dest = (scale * (32**-0.5), offset, signs, table, midpoints), (page, tile, head)
        store_one_by_one(base, store, search, squares, single, dest, lane, HEADS, BITS, BUCKETS, PAIRS, PAGE)


@gluon.jit(do_not_specialize_on_alignment=["tokens", "tiles"])
def append_many(k, v, keys, values, signs, index, tokens, tiles, CONFIG: gl.constexpr):
    """Encode keys and values into their pages; grid (2 * tiles * HEADS,), keys first."""
    HEADS: gl.constexpr = CONFIG.heads
    KEYS: gl.constexpr = CONFIG.keys
    VALUES: gl.constexpr = CONFIG.vals
    NBYTES: gl.constexpr = CONFIG.nbytes
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    memory, base = _memory(NBYTES, lane)
    program = gl.program_id(0)
    if program < tiles * HEADS:
        prefetch_l2(k, v, tokens, program, lane, HEADS)
        _append(k, keys, signs, index, base, program // HEADS, program % HEADS, tokens, lane, KEYS, False, CONFIG)
    else:
        program -= tiles * HEADS
        _append(v, values, signs, index, base, program // HEADS, program % HEADS, tokens, lane, VALUES, True, CONFIG)
    memory._keep_alive()


def config_for(key_bits: int, value_bits: int, heads: int, page: int, batch: bool) -> Config:
    """Return the compile-time configuration of the kernel."""
    keys, values = (Side(bits, SEARCH[bits].buckets, step(bits)) for bits in (key_bits, value_bits))
    few = max(key_bits, value_bits) <= FEW_BITS
    table = 0 if few else 4 * SEARCH[8].buckets + (8 << 8)
    return Config(batch, heads, keys, values, page, cdiv(TOKENS_NBYTES.value + table, 1024) * 1024, few)


def tile_count(tokens: int, sequences: int) -> int:
    """Return the most tiles of new tokens: positions need not begin or end at a multiple of TILE."""
    return cdiv(tokens + TILE - 1, TILE) if sequences == 1 else tokens // TILE + 2 * sequences


def launch_options(key_bits: int, value_bits: int, batch: bool) -> dict[str, Any]:
    short = max(key_bits, value_bits) <= FEW_BITS
    return {"num_warps": 1, "maxnreg": MORE_REGISTERS if batch or short else REGISTERS}


def append_prefill(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    (tokens, heads, width), device = k.shape, k.device
    sequences = len(pages.lengths)
    tiles, batch = tile_count(tokens, sequences), sequences > 1
    launch(append_many, (2 * tiles * heads,))(
        *(k, v),
        keys_of(pages, _scaled_table(pages.key_bits, width, device)),
        values_of(pages, _scaled_table(pages.value_bits, width, device)),
        *(sign_words(width, pages.seed, device), index_of(pages, starts), tokens, tiles),
        CONFIG=config_for(pages.key_bits, pages.value_bits, heads, pages.pool[1], batch),
        launch_pdl=True,
        **launch_options(pages.key_bits, pages.value_bits, batch),
    )


@cache
def _scaled_table(bits: int, width: int, device: torch.device) -> BucketTable:
    found = bucket_table_for(bits, width, device)
    # the kernel's squared lengths are 32 times as large
    return found._replace(scale=found.scale * 32**0.5)
