"""Attention over pages of plain numbers on CUDA: keys and values, or latents that are both with a rotated key beside them."""

import triton
import triton.language as tl

from auraflux.ops.attention.cuda.flash import LOG2E, capped, keys_of_split, leave, mix, place_keys, rows_of_tile, soften


@triton.jit
def load_rows(base, row, there, D: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr):
    """Load rows of D elements as [rows, P], zeros where there is none."""
    d = tl.arange(0, P)
    x = tl.load(base + row[:, None] * D + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    return x.to(tl.float32) if WIDE else x


@triton.jit
def attend_pages(
    q, q_rope, keys, values, table, lengths, starts, sinks, out, part_o, part_m, part_l, scale, softcap, window, sequences,
    heads, table_width, pool, splits,
    G: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, PAGE: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, P: tl.constexpr, PV: tl.constexpr, S: tl.constexpr, WIDE: tl.constexpr, LATENT: tl.constexpr,
    SOFTCAP: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Attend from M rows to the keys of one split; grid (tiles, HEADS, splits).

    LATENT  keys are latents of D, and values too; `values` holds the rotated keys of width DV that score with `q_rope`
    """
    # late tiles of a prompt see most keys: they come first
    tile, head, split = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, start, new, length, first_row = rows_of_tile(tile, starts, lengths, sequences, G, M, S)
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
    table += sequence.to(tl.int64) * table_width
    last = length - new + tl.minimum((first_row + M - 1) // G, new - 1)
    begin, end, full, edge = keys_of_split(length - new + first_row // G, last, window, 0, split, splits, N)
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
            origin, row, there = place_keys(table, first, end, head, table_width, pool, HEADS, PAGE, N, ALIGNED)
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
            seen = there[None, :] & (key[None, :] <= position[:, None])
            if EDGE:
                seen = seen & (key[None, :] > position[:, None] - window)
            s = tl.where(seen, s, float("-inf"))
            p, fade, m, l = soften(s, m, l)  # noqa: E741
            acc = mix(acc * fade[:, None], p, v, seen, N, EDGE, PRECISION)
    sink = tl.full([M], float("-inf"), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head * G + r % G) * LOG2E
    DO: tl.constexpr = D if LATENT else DV
    leave(out, (part_o, part_m, part_l), at, live, acc, m, l, sink, split, splits, DO, O, WHOLE)
