"""Attention over pages of plain numbers on CUDA: keys and values, or latents that are both with a rotated key beside them."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.attention.pages import Pages
from auraflux.ops.hopper.device import ready
from auraflux.ops.hopper.flash import EVERYTHING, Near, keys_of_split, leave, load_rows, mix, narrow, rows_of_tile, shape_for
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.pages import index_of, place_keys
from auraflux.ops.hopper.sizes import power_of_two
from auraflux.ops.hopper.softmax import LOG2E, Parts, capped, launch_merge, parts_like, soften


class PageShape(NamedTuple):
    """What the kernel is compiled for: query heads of a key head, key heads, widths, tokens of a page.

    value_width  of values, or of rotated keys
    sequences    the power of two that holds them
    """

    group: int
    heads: int
    width: int
    value_width: int
    page: int
    sequences: int


class Tile(NamedTuple):
    """What a program has at a time: rows and keys, and the widths that keys and values are padded to."""

    rows: int
    keys: int
    width: int
    value_width: int


@triton.jit
def attend_pages(
    q, q_rope, keys, values, index, sinks, out, parts, scale, softcap, window, near, heads, splits, SHAPE: tl.constexpr,
    TILE: tl.constexpr, WIDE: tl.constexpr, SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend from M rows to the keys of one split; grid (tiles, HEADS, splits).

    q_rope  None; or keys are latents of D, and values too: `values` holds the rotated keys of width DV that score with it
    near    None; or keys near to a row lie elsewhere, see `Near`: the first split takes them
    """
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
    # late tiles of a prompt see most keys: they come first
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
    if near is not None:
        shift = near.newest
    reach = window - shift
    begin, end, full, edge = keys_of_split(first_position - shift, last - shift, reach, 0, split, splits, N)
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
            s = capped(s * scale, softcap, SOFTCAP)
            key = first + tl.arange(0, N)
            seen = there[None, :] & (key[None, :] <= position[:, None] - shift)
            if EDGE:
                seen = seen & (key[None, :] > position[:, None] - shift - reach)
            s = tl.where(seen, s, float("-inf"))
            p, fade, m, l = soften(s, m, l)  # noqa: E741
            acc = mix(acc * fade[:, None], p, v, seen, N, EDGE, PRECISION)
    if near is not None and split == 0:
        oldest = tl.maximum(length - new - near.newest + 1, 0) // PAGE
        reach = tl.minimum(window, near.newest)
        begin = tl.maximum(first_position - reach + 1, 0) // N * N
        beside = table + near.far - oldest
        for first in range(begin, last + 1, N):
            room = oldest + index.width - near.far
            origin, row, there = place_keys(beside, first, last + 1, head, room, index.pool, HEADS, PAGE, N, ALIGNED)
            k = load_rows(keys + origin * D, row, there, D, P, WIDE)
            v = load_rows(values + origin * DV, row, there, DV, PV, WIDE)
            s = capped(tl.dot(x, tl.trans(k), input_precision=PRECISION) * scale, softcap, SOFTCAP)
            key = first + tl.arange(0, N)
            seen = there[None, :] & (key[None, :] <= position[:, None]) & (key[None, :] > position[:, None] - reach)
            p, fade, m, l = soften(tl.where(seen, s, float("-inf")), m, l)  # noqa: E741
            acc = mix(acc * fade[:, None], p, v, seen, N, True, PRECISION)
    sink = tl.full([M], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head * G + r % G) * LOG2E
    DO: tl.constexpr = D if LATENT else DV
    leave(out, parts, at, live, acc, m, l, sink, split, splits, DO, O, WHOLE)


def attend(
    q: Tensor,
    q_rope: Tensor | None,
    pools: tuple[Tensor, Tensor],
    pages: Pages,
    starts: Tensor,
    scale: float,
    out: Tensor | Parts,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    near: Near | None = None,
) -> None:
    """Attend with products in 16 bits where all operands have the same 16, into results or into parts of one block."""
    ready(q)
    (tokens, heads, width), (a, b), latent = q.shape, pools, q_rope is not None
    key_heads = 1 if latent else a.shape[1]
    result = width if latent else b.shape[-1]
    if not tokens * heads * result:
        return
    wide = not narrow(q, *pools, q if q_rope is None else q_rope)
    sequences, table_width = pages.table.shape
    page, group = pages.pool[1], heads // key_heads
    padded = max(16, power_of_two(width)), max(16, power_of_two(b.shape[-1]))
    widths = sum(padded), padded[0] if latent else padded[1]
    # with more rows Triton 3.6 gave wrong sums where a tile is key and value at once
    cut = shape_for(tokens, sequences, group, key_heads, widths, wide, table_width * page, q.device, 32 if latent else 128)
    if near is not None:
        # what is near takes registers: with three stages not all fits
        cut = cut._replace(stages=2)
    whole = cut.splits == 1 and isinstance(out, Tensor)
    parts = None if whole else parts_like(tokens * heads, cut.splits, result, q.device)
    launch(attend_pages, (cut.tiles, key_heads, cut.splits))(
        *(q, q_rope, a, b, index_of(pages, starts), sinks, out if whole else None, parts),
        *(scale, softcap or 1.0, EVERYTHING if window is None else window, near, heads, cut.splits),
        SHAPE=PageShape(group, key_heads, width, b.shape[-1], page, power_of_two(sequences)),
        TILE=Tile(cut.rows, cut.keys, *padded),
        WIDE=wide,
        SOFTCAP=softcap is not None,
        ALIGNED=page % cut.keys == 0,
        WHOLE=whole,
        num_warps=cut.warps,
        num_stages=cut.stages,
    )
    if parts is not None:
        launch_merge(parts, sinks, out, heads)
