"""Paged flash attention in Triton: over keys and values, or over latents that serve as both, with a rotated key."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.attention.pages import Pages
from auraflux.ops.gpu.blocks.flash import (
    NO_WINDOW,
    RecentKeys,
    accumulate_values,
    fits_half_precision,
    keys_of_split,
    load_rows,
    rows_of_tile,
    shape_for,
    store_result,
)
from auraflux.ops.gpu.blocks.pages import index_of, place_keys
from auraflux.ops.gpu.blocks.softmax import LOG2E, Partials, empty_partials, launch_merge, online_softmax, softcap_log2
from auraflux.ops.gpu.device import ready, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import power_of_two


class PageShape(NamedTuple):
    """Compile-time shape: query heads per key head, key heads, widths, tokens per page.

    value_width  of values, or of rotated keys
    sequences    rounded up to a power of two
    """

    group: int
    heads: int
    width: int
    value_width: int
    page: int
    sequences: int


class Tile(NamedTuple):
    """Tile of a program.

    rows, keys          queries and keys
    width, value_width  padded widths of keys and values
    wide                float32 products
    softcap             whether scores are capped
    aligned             pages are multiples of the tile's keys
    unsplit             one split, whose results are final
    """

    rows: int
    keys: int
    width: int
    value_width: int
    wide: bool
    softcap: bool
    aligned: bool
    unsplit: bool


@triton.jit
def attend_pages(
    queries, pools, index, sinks, out, parts, scores, recent, heads, splits, SHAPE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Attend from M rows to the keys of one split; grid (tiles, HEADS, splits).

    queries  q and q_rope; where q_rope is not None, keys are latents of D that serve as values too
    pools    keys and values; or latents and rotated keys of width DV
    scores   scale, softcap and window
    recent   None; or a row's recent keys are in other pages, see `RecentKeys`: the first split handles them
    """
    q, q_rope = queries
    LATENT: tl.constexpr = q_rope is not None
    G: tl.constexpr = SHAPE.group
    HEADS: tl.constexpr = SHAPE.heads
    D: tl.constexpr = SHAPE.width
    DV: tl.constexpr = SHAPE.value_width
    PAGE: tl.constexpr = SHAPE.page
    S: tl.constexpr = SHAPE.sequences
    M: tl.constexpr = TILE.rows
    N: tl.constexpr = TILE.keys
    P: tl.constexpr = TILE.width
    PV: tl.constexpr = TILE.value_width
    WIDE: tl.constexpr = TILE.wide
    SOFTCAP: tl.constexpr = TILE.softcap
    ALIGNED: tl.constexpr = TILE.aligned
    keys, values = pools
    scale, softcap, window = scores
    # late tiles of a prompt see the most keys: schedule them first
    tile, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, start, new, length, first_row = rows_of_tile(tile, index, G, M, S)
    if first_row >= new * G:
        return
    PRECISION: tl.constexpr = "tf32x3" if WIDE else "tf32"
    O: tl.constexpr = P if LATENT else PV  # noqa: E741
    r = first_row + tl.arange(0, M)
    live = r < new * G
    token = tl.minimum(r // G, new - 1)
    at = (start + token).to(tl.int64) * heads + head * G + r % G
    position = length - new + token
    x = load_rows(q, at, live, D, P, WIDE)
    if LATENT:
        x_rope = load_rows(q_rope, at, live, DV, PV, WIDE)
    table = index.table + sequence.to(tl.int64) * index.width
    last = length - new + tl.minimum((first_row + M - 1) // G, new - 1)
    first_position, shift = length - new + first_row // G, 0
    if recent is not None:
        shift = recent.newest
    lookback = window - shift
    begin, end, full, edge = keys_of_split(first_position - shift, last - shift, lookback, 0, split, splits, N)
    m = tl.full([M], float("-inf"), tl.float32)
    l = tl.zeros([M], tl.float32)  # noqa: E741
    acc = tl.zeros([M, O], tl.float32)
    for EDGE in tl.static_range(2):
        count = (edge - full) // N
        if EDGE:
            count = tl.cdiv(end - begin, N) - count
        for i in range(count):
            if EDGE:
                first = begin + i * N
                first += tl.where(first >= full, edge - full, 0)
            else:
                first = full + i * N
            origin, row, there = place_keys(table, first, end, head, index.width, index.pool, HEADS, PAGE, N, ALIGNED)
            k = load_rows(keys + origin * D, row, there, D, P, WIDE)
            s = tl.dot(x, tl.trans(k), input_precision=PRECISION)
            if LATENT:
                k_rope = load_rows(values + origin * DV, row, there, DV, PV, WIDE)
                s = tl.dot(x_rope, tl.trans(k_rope), s, input_precision=PRECISION)
                v = k
            else:
                v = load_rows(values + origin * DV, row, there, DV, PV, WIDE)
            s = softcap_log2(s * scale, softcap, SOFTCAP)
            key = first + tl.arange(0, N)
            seen = there[None, :] & (key[None, :] <= position[:, None] - shift)
            if EDGE:
                seen = seen & (key[None, :] > position[:, None] - shift - lookback)
            s = tl.where(seen, s, float("-inf"))
            p, rescale, m, l = online_softmax(s, m, l)  # noqa: E741
            acc = accumulate_values(acc * rescale[:, None], p, v, seen, N, EDGE, PRECISION)
    if recent is not None and split == 0:
        oldest = tl.maximum(length - new - recent.newest + 1, 0) // PAGE
        lookback = tl.minimum(window, recent.newest)
        begin = tl.maximum(first_position - lookback + 1, 0) // N * N
        recent_table = table + recent.far - oldest
        for first in range(begin, last + 1, N):
            room = oldest + index.width - recent.far
            origin, row, there = place_keys(recent_table, first, last + 1, head, room, index.pool, HEADS, PAGE, N, ALIGNED)
            k = load_rows(keys + origin * D, row, there, D, P, WIDE)
            v = load_rows(values + origin * DV, row, there, DV, PV, WIDE)
            s = softcap_log2(tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
            key = first + tl.arange(0, N)
            seen = there[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - lookback)
            p, rescale, m, l = online_softmax(tl.where(seen, s, float("-inf")), m, l)  # noqa: E741
            acc = accumulate_values(acc * rescale[:, None], p, v, seen, N, True, PRECISION)
    sink = tl.full([M], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head * G + r % G) * LOG2E
    DO: tl.constexpr = D if LATENT else DV
    store_result(out, parts, at, live, acc, m, l, sink, split, splits, DO, O, TILE.unsplit)


def attend(
    q: Tensor,
    q_rope: Tensor | None,
    pools: tuple[Tensor, Tensor],
    pages: Pages,
    starts: Tensor,
    scale: float,
    out: Tensor | Partials,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    recent: RecentKeys | None = None,
) -> None:
    """Attend into results or into partials of one block, with 16-bit MMAs where all operands share a 16-bit dtype."""
    ready(q)
    (tokens, heads, width), (a, b), latent = q.shape, pools, q_rope is not None
    key_heads = 1 if latent else a.shape[1]
    result = width if latent else b.shape[-1]
    if not tokens * heads * result:
        return
    wide = not fits_half_precision(q, *pools, q if q_rope is None else q_rope)
    sequences, table_width = pages.table.shape
    page, group = pages.pool[1], heads // key_heads
    padded = max(16, power_of_two(width)), max(16, power_of_two(b.shape[-1]))
    widths = sum(padded), padded[0] if latent else padded[1]
    # with more rows Triton 3.6 gave wrong sums where a tile serves as keys and values
    launch_shape = shape_for(
        tokens, sequences, group, key_heads, widths, wide, table_width * page, q.device, 32 if latent else 128
    )
    stages, queries, tile = launch_shape.stages, launch_shape.rows * padded[0], launch_shape.keys * sum(padded)
    # recent keys take registers, and an RTX card has 99 KB
    if recent is not None or (queries + stages * tile) * q.element_size() > shared_nbytes(q.device):
        stages = 2
    unsplit = launch_shape.splits == 1 and isinstance(out, Tensor)
    parts = None if unsplit else empty_partials(tokens * heads, launch_shape.splits, result, q.device)
    launch(attend_pages, (launch_shape.tiles, key_heads, launch_shape.splits))(
        *((q, q_rope), pools, index_of(pages, starts), sinks, out if unsplit else None, parts),
        *((scale, softcap or 1.0, NO_WINDOW if window is None else window), recent, heads, launch_shape.splits),
        SHAPE=PageShape(group, key_heads, width, b.shape[-1], page, power_of_two(sequences)),
        TILE=Tile(
            *(launch_shape.rows, launch_shape.keys, *padded),
            wide=wide,
            softcap=softcap is not None,
            aligned=page % launch_shape.keys == 0,
            unsplit=unsplit,
        ),
        num_warps=launch_shape.warps,
        num_stages=stages,
    )
    if parts is not None:
        launch_merge(parts, sinks, out, heads)
