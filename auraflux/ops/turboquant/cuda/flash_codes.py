"""Attention over codes on CUDA: scores between rotated queries and levels, values summed in the rotated space."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.hopper.flash import keys_of_split, leave, load_rows, mix, rows_of_tile
from auraflux.ops.hopper.pages import place_keys, place_of
from auraflux.ops.hopper.softmax import LOG2E, capped, soften
from auraflux.ops.turboquant.cuda.hadamard import codes_of, pairs_as_rows
from auraflux.ops.turboquant.cuda.mla_kept import KeptLatents, place_kept


class Tile(NamedTuple):
    """What a program has at a time: rows and keys, and the widths that these are padded to, of latents and of rotated keys."""

    rows: int
    keys: int
    width: int
    rope: int


class Latents(NamedTuple):
    """What there is beside latents: queries and keys rotated by position, and latents that are kept as they are, if any.

    The last split goes on to these.
    """

    q_rope: Tensor
    rope: Tensor
    kept: KeptLatents | None


class Splits(NamedTuple):
    """How keys are split: into blocks of so many positions, or with 0 into shares; how many; and the blocks of parts."""

    block: int
    parts: int
    slots: int


@triton.jit
def attend_codes(
    q, keys, values, latents, index, parts, scale, unit, softcap, window, splits, heads, SHAPE: tl.constexpr,
    TILE: tl.constexpr, G: tl.constexpr, R: tl.constexpr, WIDE: tl.constexpr, SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr,
    KEPT: tl.constexpr,
):  # fmt: skip
    """Attend from M rotated rows to the coded keys of one split; grid (tiles, HEADS, splits).

    unit     what norms are multiplied by for the levels at hand
    latents  None, or what there is beside latents, of which each is a key and also the value
    """
    LATENT: tl.constexpr = R > 0
    KEEPS: tl.constexpr = KEPT.first + KEPT.newest > 0
    D: tl.constexpr = SHAPE.width
    M: tl.constexpr = TILE.rows
    N: tl.constexpr = TILE.keys
    P: tl.constexpr = TILE.width
    PR: tl.constexpr = TILE.rope
    tile, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, start, new, length, first_row = rows_of_tile(tile, index, G, M, SHAPE.sequences)
    if first_row >= new * G:
        return
    PRECISION: tl.constexpr = "tf32x3" if WIDE else "tf32"
    K_WORDS: tl.constexpr = (D * SHAPE.key_bits + 31) // 32
    V_WORDS: tl.constexpr = (D * SHAPE.value_bits + 31) // 32
    r = first_row + tl.arange(0, M)
    live = r < new * G
    token = tl.minimum(r // G, new - 1)
    at = (start + token).to(tl.int64) * heads + head * G + r % G
    position = length - new + token
    x = load_rows(q, at, live, D, P, WIDE)
    if LATENT:
        x_rope = load_rows(latents.q_rope, at, live, R, PR, True)
    table = index.table + sequence.to(tl.int64) * index.width
    last = length - new + tl.minimum((first_row + M - 1) // G, new - 1)
    begin, end, _, _ = keys_of_split(length - new + first_row // G, last, window, splits.block, split, splits.parts, N)
    if KEEPS:
        end = tl.minimum(end, last + 1 - KEPT.newest)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, P], tl.float32)
    # stored rows of pairs are of several tokens: blocks are read as a whole
    low, high = (begin // 16 * 16, tl.cdiv(end, 16) * 16) if SHAPE.pairs else (begin, end)
    for first in range(low, end, N):
        key = first + tl.arange(0, N)
        origin, row, there = place_keys(table, first, high, head, index.width, index.pool, SHAPE.heads, SHAPE.page, N, ALIGNED)
        k = tl.load(keys.levels + codes_of(keys.codes + origin * K_WORDS, row, there, SHAPE.key_bits, P, K_WORDS))
        k_norm = tl.load(keys.norms + origin + row, mask=there, other=0.0) * unit
        s = tl.dot(x, tl.trans(k), input_precision=PRECISION) * k_norm[None, :]
        if LATENT:
            k_rope = load_rows(latents.rope + origin * R, row, there, R, PR, True)
            s = (s + tl.dot(x_rope, tl.trans(k_rope), input_precision="tf32x3")) * scale
            v, v_norm = k, k_norm
        else:
            v = tl.load(values.levels + codes_of(values.codes + origin * V_WORDS, row, there, SHAPE.value_bits, P, V_WORDS))
            if SHAPE.pairs:
                v = pairs_as_rows(v, N, D)
            v_norm = tl.load(values.norms + origin + row, mask=there, other=0.0) * unit
            s = s * scale
        s = capped(s, softcap, SOFTCAP)
        seen = there[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        if SHAPE.pairs:
            seen &= ((key >= begin) & (key < end))[None, :]
        if KEEPS:
            seen &= (key >= KEPT.first)[None, :] & (key[None, :] <= position[:, None] - KEPT.newest)
        p, fade, m, l = soften(tl.where(seen, s, float("-inf")), m, l)  # noqa: E741
        # levels are finite, norms need not be: 0 times NaN must not reach a row that does not see the key
        weights = tl.where(p == 0, 0.0, p * v_norm[None, :]).to(v.dtype)
        acc = tl.dot(weights, v, acc * fade[:, None], input_precision=PRECISION)
    if KEEPS:  # noqa: SIM102
        if split == splits.parts - 1:
            near = tl.maximum(length - new + first_row // G - KEPT.newest + 1, KEPT.first)
            for first in range(0, tl.minimum(KEPT.first, last + 1), N):
                seen = _first_keys(first, position, N, KEPT)
                m, l, acc = _take_kept(  # noqa: E741
                    x, x_rope, m, l, acc, latents, index, sequence, first, seen, scale, True, SHAPE, TILE, R, KEPT, PRECISION
                )
            if KEPT.newest:
                for first in range(near, last + 1, N):
                    seen = _near_keys(first, position, N, KEPT)
                    m, l, acc = _take_kept(  # noqa: E741
                        x, x_rope, m, l, acc, latents, index, sequence, first, seen, scale, False, SHAPE, TILE, R, KEPT,
                        PRECISION,
                    )  # fmt: skip
    leave(parts.o, parts, at, live, acc, m, l, m, split, splits.slots, D, P, False)


@triton.jit
def _first_keys(first, position, N: tl.constexpr, KEPT: tl.constexpr):
    """Tell which of N positions rows read among the first ones."""
    key = first + tl.arange(0, N)
    return (key < KEPT.first)[None, :] & (key[None, :] <= position[:, None])


@triton.jit
def _near_keys(first, position, N: tl.constexpr, KEPT: tl.constexpr):
    """Tell which of N positions rows read among the newest ones."""
    key = first + tl.arange(0, N)
    near = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - KEPT.newest)
    return near & (key >= KEPT.first)[None, :]


@triton.jit
def _take_kept(
    x, x_rope, m, l, acc, latents, index, sequence, first, seen, scale, FIRST: tl.constexpr, SHAPE: tl.constexpr,  # noqa: E741
    TILE: tl.constexpr, R: tl.constexpr, KEPT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Take latents that are kept as they are into the softmax of rows that see them."""
    key = first + tl.arange(0, TILE.keys)
    base, row, there = place_kept(latents.kept, sequence, key, key >= 0, FIRST, KEPT)
    page, slot = place_of(index.table, sequence, key, index.width, index.pool, SHAPE.page)
    there = there & (page >= 0)
    v = load_rows(base, row, there, SHAPE.width, TILE.width, True).to(x.dtype)
    k_rope = load_rows(latents.rope, page * SHAPE.page + slot, there, R, TILE.rope, True)
    s = tl.dot(x, tl.trans(v), input_precision=PRECISION) + tl.dot(x_rope, tl.trans(k_rope), input_precision="tf32x3")
    seen = seen & there[None, :]
    p, fade, m, l = soften(tl.where(seen, s * (scale * LOG2E), float("-inf")), m, l)  # noqa: E741
    return m, l, mix(acc * fade[:, None], p, v, seen, TILE.keys, True, PRECISION)


@triton.jit
def sum_coded(
    weights,
    codes,
    norms,
    book,
    out,
    threshold,
    tokens,
    share,
    group,
    D: tl.constexpr,
    P: tl.constexpr,
    BITS: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Sum coded values by their weights over one share of the tokens; grid (tiles of a group's rows, heads, shares)."""
    head, part = tl.program_id(1), tl.program_id(2)
    r = tl.program_id(0) * M + tl.arange(0, M)
    row = (head * group + r).to(tl.int64)
    acc = tl.zeros([M, P], tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, tokens), N):
        t = first + tl.arange(0, N)
        at = head.to(tl.int64) * tokens + t
        there = t < tokens
        v = tl.load(book + codes_of(codes, at, there, BITS, P, (D * BITS + 31) // 32))
        norm = tl.load(norms + at, mask=there, other=0.0)
        here = (r < group)[:, None] & there[None, :]
        w = tl.load(weights + row[:, None] * tokens + t[None, :], mask=here, other=0.0).to(tl.float32)
        w = tl.where(here & (w >= threshold), w * norm[None, :], 0.0)
        acc = tl.dot(w, v, acc, input_precision="tf32x3")
    d = tl.arange(0, P)
    at = part.to(tl.int64) * tl.num_programs(1) * group + row
    tl.store(out + at[:, None] * D + d[None, :], acc, mask=(r < group)[:, None] & (d < D)[None, :])
