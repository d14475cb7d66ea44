"""Many new tokens of bfloat16 coded into their pages on Hopper: Gluon, with PTX for tensor cores and look-ups.

Codes are those of the reference to the bit, though float32 finds nearly all of them. A transform by tensor cores is off by less
than 1e-6 of a coordinate's spread, so codes are certain wherever coordinates keep that distance from midpoints between levels.
Vectors with one that does not are coded once more, number by number as the reference does (`encode_exact.py`).

- *The transform* of 128 is one of 32 by `mma`, whose factors 1 and -1 a lane holds in 16 words, and eight additions for each
  four coordinates. Tensor cores multiply in any order, so one is chosen that leaves a lane with 32 neighbouring coordinates of
  two neighbouring tokens: what the words of keys, and of values in pairs, are made of. Nothing is shuffled.
- *Codes*: one word looked up and one multiply-add, see `encode_tables.py`. Tables of 32 words lie in the lanes of a warp, those
  of 8 bits in shared memory. The last additions of the transform also scale: their results lie where tables want them.
- *All tokens under way at once*: a program is a warp with 16 tokens, and a multiprocessor has room for 16 or 17 of them, which
  2048 tokens of 8 heads take. Those of one sequence are asked for as if the first position were a multiple of 16, and once more
  if it is not, so that nothing waits for the length. Values of few bits do, and come while keys are coded.
- *The next call's tokens*: programs that find room while others still work ask the cache for all of them.
"""

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import inline_asm_elementwise as asm

from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of
from auraflux.ops.hopper.ptx import AWAIT, SHARED_BASE, run
from auraflux.ops.hopper.reduce import any_bits, sum_four
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.turboquant.cuda.arguments import keys_of, values_of
from auraflux.ops.turboquant.cuda.encode_exact import settle, store_one_by_one
from auraflux.ops.turboquant.cuda.encode_pages import fetch, load_tile, store_pairs, store_rows, words_of
from auraflux.ops.turboquant.cuda.encode_parts import (
    ROW_PITCH,
    factors,
    four_codes,
    inverse_root,
    joined,
    load_ptx,
    operands,
    squared_length,
    squares_at,
    squares_of,
    transformed,
)
from auraflux.ops.turboquant.cuda.encode_tables import FEW, SEARCH, Places, places_for, sign_words, step
from auraflux.ops.turboquant.pages import CodePages

MANY = 2048  # vectors; fewer are coded as soon one by one
TILE = 16  # tokens of a program
# with 120 a multiprocessor has room for 17 programs, which is faster for codes of 8 bits; with 128 for 16
REGISTERS, MORE_REGISTERS = 120, 128
# for which a GPU has judged the kernel
WIDTH, KEY_BITS, VALUE_BITS = 128, (4, 8), (2, 4, 8)
MOST_SEQUENCES = 32

MOVE = gl.constexpr("{.reg .b32 a, b, c, d; ld.global.v4.b32 {a,b,c,d}, [$2]; st.shared.v4.b32 [$1],{a,b,c,d}; mov.b32 $0, 0;}")
TOKENS_NBYTES = gl.constexpr(16 * 288)  # of shared memory
# 32 times squares of lengths outside of which a square may leave float32
SHORTEST = gl.constexpr(1e-18)
LONGEST = gl.constexpr(1e36)


class Side(NamedTuple):
    """How keys or values are coded: bits, buckets that codes are searched in, and what squares of levels are counted in."""

    bits: int
    buckets: int
    step: float


@gluon.jit
def _memory(NBYTES: gl.constexpr, lane):
    """Allocate the kernel's only shared memory, so that it begins where this does; the store makes Triton declare it."""
    memory = gl.allocate_shared_memory(gl.int8, [NBYTES // 1024, 1024], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory.index(0).slice(0, 32).store(lane.to(gl.int8))
    gl.thread_barrier()
    return memory, asm(SHARED_BASE, "=r,r", [lane], gl.int32, is_pure=False, pack=1)


@gluon.jit
def _codes_of(S, TOKEN: gl.constexpr, scale, offset, table, BUCKETS: gl.constexpr, NEAR: gl.constexpr):
    """Find a token's 32 codes, four in each of eight words, neighbours if NEAR, else every second of eight; and any doubt."""
    codes = ()
    doubt, beyond = table * 0 - 1, table * 0
    for j in gl.static_range(4):
        a0, a1, a2, a3 = joined(S, 4 * j + 2 * TOKEN, scale, offset, BUCKETS)
        b0, b1, b2, b3 = joined(S, 4 * j + 2 * TOKEN + 1, scale, offset, BUCKETS)
        if NEAR:
            c, doubt, beyond = four_codes(a0, b0, a1, b1, table, doubt, beyond, BUCKETS)
            d, doubt, beyond = four_codes(a2, b2, a3, b3, table, doubt, beyond, BUCKETS)
        else:
            c, doubt, beyond = four_codes(a0, a1, a2, a3, table, doubt, beyond, BUCKETS)
            d, doubt, beyond = four_codes(b0, b1, b2, b3, table, doubt, beyond, BUCKETS)
        codes += (c, d)  # type: ignore[assignment]
    return codes, ((doubt & 0xFFFF) == 0) | ((doubt & -65536) == 0) | (beyond != 0)


@gluon.jit
def _unusual(square):
    return ~((square > SHORTEST) & (square < LONGEST))


@gluon.jit
def _bits(first, second, place):
    """Set a bit for each of a lane's two tokens that is named."""
    return (first.to(gl.int32) << place) | (second.to(gl.int32) << (place + 1))


@gluon.jit
def _named(first, second, g):
    """Set a bit for every token of a warp that any of its lanes names."""
    return any_bits(_bits(first, second, 2 * g))


@gluon.jit
def _either(a, b):
    return a | b


@gluon.jit
def _append(
    x, store, signs, index, base, number, head, tokens, lane, HEADS: gl.constexpr, BITS: gl.constexpr, BUCKETS: gl.constexpr,
    STEP: gl.constexpr, PAIRS: gl.constexpr, PAGE: gl.constexpr, BATCH: gl.constexpr, RARE: gl.constexpr,
):  # fmt: skip
    """Encode the keys or the values of one head, 16 neighbouring tokens; doubts are RARE where all codes are of few bits."""
    g, q = lane // 4, lane % 4
    words, scale, offset = store.levels
    table, squares, middles = gl.load(words + lane), gl.load(words + 32 + lane), gl.load(words + 64 + lane)
    if BUCKETS > 32:
        for i in gl.static_range((BUCKETS + (2 << BITS)) // 128):
            args = [base + TOKENS_NBYTES + 512 * i + lane * 16, (words + (128 * i + lane * 4)).to(gl.int64)]
            asm(MOVE, "=r,r,l,~{memory}", args, gl.int32, is_pure=False, pack=1)
        table = base + TOKENS_NBYTES
        squares = base + (TOKENS_NBYTES + 4 * BUCKETS)
        middles = squares + (4 << BITS)
        gl.thread_barrier()
    sign_at = (signs + q * 4).to(gl.int64)
    sign = asm(load_ptx("global", 1), operands(16, "r", "l"), [sign_at], (gl.int32,) * 16, is_pure=False, pack=1)
    F = factors(g, q)
    run(AWAIT, lane)
    pages, first, end, tile = load_tile(x, base, index, number, head, tokens, lane, HEADS, BATCH, PAIRS and RARE)
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
    alone0, alone1 = unusual0, unusual1
    if PAIRS:
        # of a pair that is half new the other half stays
        alone0, alone1 = unusual0 | ~two, unusual1 | ~one
    if not RARE:
        alone = _named(alone0 & one, alone1 & two, g)
    NEAR: gl.constexpr = BITS == 8 or (PAIRS and BITS == 4)
    C, doubt0 = _codes_of(S, 0, inverse_root(square0) * scale, offset, table, BUCKETS, NEAR)
    D, doubt1 = _codes_of(S, 1, inverse_root(square1) * scale, offset, table, BUCKETS, NEAR)
    if RARE:
        # one reduction, and nothing waits for the page
        both = _bits((doubt0 | unusual0) & one, (doubt1 | unusual1) & two, 2 * g)
        both = gl.reduce(both | _bits(alone0 & one, alone1 & two, 2 * g + 16), 0, _either)
        doubted = (both & 0xFFFF) != 0
        mask, alone = (both & 0xFFFF) + 0 * lane, gl.where(new, (both >> 16) & 0xFFFF, 0)
    else:
        mask = _named((doubt0 | unusual0) & one, (doubt1 | unusual1) & two, g)
        doubted = gl.max(mask, 0) > 0
    if doubted:
        C, D = settle(base, C, D, scale * (32**-0.5), offset, signs, table, middles, mask, lane, BITS, BUCKETS, NEAR)
    if RARE:
        one, two = one & new, two & new
    if BUCKETS == 32:
        c, d = squares_of(words_of(C) + words_of(D), squares, BITS)
        total0, total1 = c.to(gl.float32) * STEP, d.to(gl.float32) * STEP
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
    lonely = ((both & -65536) != 0) if RARE else (gl.max(alone, 0) > 0)
    if lonely:
        gl.thread_barrier()
        store_one_by_one(
            base, store.codes, store.norms, scale * (32**-0.5), offset, signs, table, squares, middles, alone, page, tile,
            head, lane, HEADS, BITS, BUCKETS, PAIRS, PAGE,
        )  # fmt: skip


@gluon.jit(do_not_specialize_on_alignment=["tokens", "tiles"])
def append_many(
    k, v, keys, values, signs, index, tokens, tiles, BATCH: gl.constexpr, HEADS: gl.constexpr, KEYS: gl.constexpr,
    VALUES: gl.constexpr, PAGE: gl.constexpr, NBYTES: gl.constexpr,
):  # fmt: skip
    """Encode keys and values into their pages; grid (2 * tiles * HEADS,), keys first."""
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    memory, base = _memory(NBYTES, lane)
    program = gl.program_id(0)
    RARE: gl.constexpr = KEYS.buckets == 32 and VALUES.buckets == 32
    if program < tiles * HEADS:
        fetch(k, v, tokens, program, lane, HEADS)
        _append(
            k, keys, signs, index, base, program // HEADS, program % HEADS, tokens, lane,
            HEADS, KEYS.bits, KEYS.buckets, KEYS.step, False, PAGE, BATCH, RARE,
        )  # fmt: skip
    else:
        program -= tiles * HEADS
        _append(
            v, values, signs, index, base, program // HEADS, program % HEADS, tokens, lane,
            HEADS, VALUES.bits, VALUES.buckets, VALUES.step, True, PAGE, BATCH, RARE,
        )  # fmt: skip
    memory._keep_alive()


def sizes(key_bits: int, value_bits: int) -> dict[str, Any]:
    """What the kernel is compiled for, apart from heads and pages."""
    keys, values = (Side(bits, SEARCH[bits].buckets, step(bits)) for bits in (key_bits, value_bits))
    table = 0 if max(key_bits, value_bits) <= FEW else 4 * SEARCH[8].buckets + (8 << 8)
    return {"KEYS": keys, "VALUES": values, "NBYTES": cdiv(TOKENS_NBYTES.value + table, 1024) * 1024}


def tile_count(tokens: int, sequences: int) -> int:
    """How many tiles new tokens may take: positions need not begin, nor end, at a multiple of TILE."""
    return cdiv(tokens + TILE - 1, TILE) if sequences == 1 else tokens // TILE + 2 * sequences


def launch_options(key_bits: int, value_bits: int, batch: bool) -> dict[str, Any]:
    short = max(key_bits, value_bits) <= FEW
    return {"num_warps": 1, "maxnreg": MORE_REGISTERS if batch or short else REGISTERS}


def append_at_once(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    (tokens, heads, width), device = k.shape, k.device
    sequences = len(pages.lengths)
    tiles, batch = tile_count(tokens, sequences), sequences > 1
    launch(append_many, (2 * tiles * heads,))(
        *(k, v),
        keys_of(pages, _places(pages.key_bits, width, device)),
        values_of(pages, _places(pages.value_bits, width, device)),
        *(sign_words(width, pages.seed, device), index_of(pages, starts), tokens, tiles),
        BATCH=batch,
        HEADS=heads,
        PAGE=pages.pool[1],
        **sizes(pages.key_bits, pages.value_bits),
        launch_pdl=True,
        **launch_options(pages.key_bits, pages.value_bits, batch),
    )


@cache
def _places(bits: int, width: int, device: torch.device) -> Places:
    found = places_for(bits, width, device)
    # the kernel's squares of lengths are 32 times as large
    return found._replace(scale=found.scale * 32**0.5)
