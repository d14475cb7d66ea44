"""Flash attention over codes in Triton: scores of rotated queries and levels, values summed in the rotated space."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.flash import accumulate_values, keys_of_split, load_rows, rows_of_tile, store_result
from auraflux.ops.gpu.blocks.pages import place_keys, place_of
from auraflux.ops.gpu.blocks.softmax import LOG2E, online_softmax, softcap_log2
from auraflux.ops.turboquant.cuda.arguments import CodeShape
from auraflux.ops.turboquant.cuda.encode.hadamard import codes_of, pairs_as_rows
from auraflux.ops.turboquant.cuda.mla.full_precision import (
    FullPrecisionLatents,
    FullPrecisionLatentShape,
    place_full_precision,
)


class Tile(NamedTuple):
    """Tile of a program: query rows, keys, and padded widths of heads or latents and of RoPE keys."""

    rows: int
    keys: int
    width: int
    rope: int


class Latents(NamedTuple):
    """Further inputs of MLA: RoPE queries, RoPE keys, and full-precision latents, if any, which the last split reads."""

    q_rope: Tensor
    rope: Tensor
    full: FullPrecisionLatents | None


class Splits(NamedTuple):
    """Split-KV: positions per split, or 0 for equal splits; number of splits; capacity of `partials`."""

    block: int
    number: int
    slots: int


class Scores(NamedTuple):
    """Scaling and masking of attention scores: scale, factor of norms for the given levels, softcap, sliding window."""

    scale: float
    unit: float
    softcap: float
    window: int


class Config(NamedTuple):
    """Compile-time configuration of `attend_codes`.

    group    query rows per key head
    rope     width of RoPE keys of MLA; 0 otherwise
    wide     float32 queries
    softcap  whether the call has one
    aligned  a tile of keys never crosses a page
    full     full-precision latents of MLA
    """

    shape: CodeShape
    tile: Tile
    group: int
    rope: int
    wide: bool
    softcap: bool
    aligned: bool
    full: FullPrecisionLatentShape


@triton.jit
def attend_codes(
    q, keys, values, latents, index, partials, scores, splits, heads, CONFIG: tl.constexpr
):  # fmt: skip
    """Attend from M rotated rows to the coded keys of one split; grid (tiles, HEADS, splits).

    latents  further inputs of MLA, whose latents are keys and values; None otherwise
    """
    SHAPE: tl.constexpr = CONFIG.shape
    TILE: tl.constexpr = CONFIG.tile
    FULL: tl.constexpr = CONFIG.full
    G: tl.constexpr = CONFIG.group
    R: tl.constexpr = CONFIG.rope
    WIDE: tl.constexpr = CONFIG.wide
    SOFTCAP: tl.constexpr = CONFIG.softcap
    ALIGNED: tl.constexpr = CONFIG.aligned
    scale, unit, softcap, window = scores
    LATENT: tl.constexpr = R > 0
    HAS_FULL: tl.constexpr = FULL.sink_tokens + FULL.recent_window > 0
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
    begin, end, _, _ = keys_of_split(length - new + first_row // G, last, window, splits.block, split, splits.number, N)
    if HAS_FULL:
        end = tl.minimum(end, last + 1 - FULL.recent_window)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, P], tl.float32)
    # a stored row of pairs mixes several tokens: read complete blocks
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
        s = softcap_log2(s, softcap, SOFTCAP)
        seen = there[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - window)
        if SHAPE.pairs:
            seen &= ((key >= begin) & (key < end))[None, :]
        if HAS_FULL:
            seen &= (key >= FULL.sink_tokens)[None, :] & (key[None, :] <= position[:, None] - FULL.recent_window)
        p, decay, m, l = online_softmax(tl.where(seen, s, float("-inf")), m, l)  # noqa: E741
        # levels are finite, norms may not be: 0 times NaN must not reach a row whose mask excludes the key
        weights = tl.where(p == 0, 0.0, p * v_norm[None, :]).to(v.dtype)
        acc = tl.dot(weights, v, acc * decay[:, None], input_precision=PRECISION)
    if HAS_FULL:  # noqa: SIM102
        if split == splits.number - 1:
            near = tl.maximum(length - new + first_row // G - FULL.recent_window + 1, FULL.sink_tokens)
            for first in range(0, tl.minimum(FULL.sink_tokens, last + 1), N):
                seen = _sink_mask(first, position, N, FULL)
                m, l, acc = _attend_full_precision(  # noqa: E741
                    (x, x_rope), (m, l, acc), latents, index, sequence, first, seen, scale, True, CONFIG, PRECISION
                )
            if FULL.recent_window:
                for first in range(near, last + 1, N):
                    seen = _recent_mask(first, position, N, FULL)
                    m, l, acc = _attend_full_precision(  # noqa: E741
                        (x, x_rope), (m, l, acc), latents, index, sequence, first, seen, scale, False, CONFIG, PRECISION
                    )
    store_result(partials.o, partials, at, live, acc, m, l, m, split, splits.slots, D, P, False)


@triton.jit
def _sink_mask(first, position, N: tl.constexpr, FULL: tl.constexpr):
    """Return which of N positions query rows read as full-precision sink tokens."""
    key = first + tl.arange(0, N)
    return (key < FULL.sink_tokens)[None, :] & (key[None, :] <= position[:, None])


@triton.jit
def _recent_mask(first, position, N: tl.constexpr, FULL: tl.constexpr):
    """Return which of N positions query rows read from the full-precision recent window."""
    key = first + tl.arange(0, N)
    near = (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - FULL.recent_window)
    return near & (key >= FULL.sink_tokens)[None, :]


@triton.jit
def _attend_full_precision(
    queries, softmax, latents, index, sequence, first, seen, scale, FIRST: tl.constexpr, CONFIG: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend to full-precision latents with the running softmax."""
    SHAPE: tl.constexpr = CONFIG.shape
    TILE: tl.constexpr = CONFIG.tile
    FULL: tl.constexpr = CONFIG.full
    R: tl.constexpr = CONFIG.rope
    x, x_rope = queries
    m, l, acc = softmax  # noqa: E741
    key = first + tl.arange(0, TILE.keys)
    base, row, there = place_full_precision(latents.full, sequence, key, key >= 0, FIRST, FULL)
    page, slot = place_of(index.table, sequence, key, index.width, index.pool, SHAPE.page)
    there = there & (page >= 0)
    v = load_rows(base, row, there, SHAPE.width, TILE.width, True).to(x.dtype)
    k_rope = load_rows(latents.rope, page * SHAPE.page + slot, there, R, TILE.rope, True)
    s = tl.dot(x, tl.trans(v), input_precision=PRECISION) + tl.dot(x_rope, tl.trans(k_rope), input_precision="tf32x3")
    seen = seen & there[None, :]
    p, decay, m, l = online_softmax(tl.where(seen, s * (scale * LOG2E), float("-inf")), m, l)  # noqa: E741
    return m, l, accumulate_values(acc * decay[:, None], p, v, seen, TILE.keys, True, PRECISION)


@triton.jit
def sum_coded(
    weights, values, out, threshold, tokens, share, group, D: tl.constexpr, P: tl.constexpr, BITS: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Sum quantized values by their weights over one split of the tokens; grid (tiles of a group's rows, heads, splits)."""
    head, part = tl.program_id(1), tl.program_id(2)
    r = tl.program_id(0) * M + tl.arange(0, M)
    row = (head * group + r).to(tl.int64)
    acc = tl.zeros([M, P], tl.float32)
    for first in range(part * share, tl.minimum((part + 1) * share, tokens), N):
        t = first + tl.arange(0, N)
        at = head.to(tl.int64) * tokens + t
        there = t < tokens
        v = tl.load(values.levels + codes_of(values.codes, at, there, BITS, P, (D * BITS + 31) // 32))
        norm = tl.load(values.norms + at, mask=there, other=0.0)
        here = (r < group)[:, None] & there[None, :]
        w = tl.load(weights + row[:, None] * tokens + t[None, :], mask=here, other=0.0).to(tl.float32)
        w = tl.where(here & (w >= threshold), w * norm[None, :], 0.0)
        acc = tl.dot(w, v, acc, input_precision="tf32x3")
    d = tl.arange(0, P)
    at = part.to(tl.int64) * tl.num_programs(1) * group + row
    tl.store(out + at[:, None] * D + d[None, :], acc, mask=(r < group)[:, None] & (d < D)[None, :])
