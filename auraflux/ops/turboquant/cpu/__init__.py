"""Codes on CPU: torch outside, addresses inside. Rows are coded in `codec`, attended to in `exact` and `attend_int8`;
`routes.py` says which of these."""

from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.attention.cpu.append import append_rows
from auraflux.ops.attention.cpu.decode_tiles import number_of
from auraflux.ops.attention.cpu.jobs import PRODUCTS_PARALLEL, Batch, run
from auraflux.ops.attention.cpu.page_index import EVERYTHING, count_pairs, index_of
from auraflux.ops.attention.cpu.prefill import ROWS, panel_scratch
from auraflux.ops.attention.cpu.row_tiles import PART
from auraflux.ops.attention.reference_choice import Chosen
from auraflux.ops.attention.reference_latent import split_latent
from auraflux.ops.norm.cpu import rms_norm
from auraflux.ops.rope.cpu import norm_rope, rope
from auraflux.ops.simd.jit import LINE, Kernel, as_float, like, threads, workspace
from auraflux.ops.turboquant.codebook import Codebook
from auraflux.ops.turboquant.cpu.attend import attend_int8, attend_kept, build_finish, build_queries
from auraflux.ops.turboquant.cpu.attend_int8 import fast_scratch
from auraflux.ops.turboquant.cpu.attend_int8_tiles import Loops, loops_for
from auraflux.ops.turboquant.cpu.centres import NO_VECTORS, products_nbytes, vectors_of
from auraflux.ops.turboquant.cpu.choice import choose_codes
from auraflux.ops.turboquant.cpu.codec import scratch_nbytes
from auraflux.ops.turboquant.cpu.codec_kernels import (
    Levels,
    append_nbytes,
    build_append,
    build_decode,
    build_encode,
    build_rotate,
    levels_for,
    turn_for,
)
from auraflux.ops.turboquant.cpu.exact import exact_scratch, sum_values
from auraflux.ops.turboquant.cpu.items import padded
from auraflux.ops.turboquant.cpu.kept_rows import NOTHING_KEPT, check_kept, kept_in
from auraflux.ops.turboquant.cpu.mla import attend_codes
from auraflux.ops.turboquant.cpu.routes import ATTEND, Attend, not_rows
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, RowCodes, row_words

# coordinates; below these, waking the threads costs more than the work
PARALLEL_FROM = 1 << 12
ENCODE_PARALLEL_FROM = 1 << 10
JOBS_PER_THREAD = 4
SEQUENCES_PER_THREAD = 2  # that keep threads busy with what is kept of all heads of one
FEWEST = 8  # rows of queries that an item should have: what is looked up of keys serves all of them


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    wide, width, turn = as_float(x), x.shape[-1], turn_for(x.shape[-1], seed)
    out = torch.empty_like(wide)
    jobs, scratch = _jobs(x.numel()), scratch_nbytes(width)
    table = turn.back if inverse else turn.forward
    rows = x.numel() // width
    build_rotate(width, int(inverse))(jobs, wide.data_ptr(), rows, table, out.data_ptr(), workspace(jobs * scratch), scratch)
    return like(out, x)


def encode(x: Tensor, bits: int, seed: int, levels: Codebook | None = None) -> tuple[Tensor, Tensor]:
    wide, width = as_float(x), x.shape[-1]
    codes = torch.empty(*x.shape[:-1], row_words(bits, width), dtype=torch.int32)
    norms = torch.empty(x.shape[:-1])
    jobs, scratch = _jobs(x.numel()), scratch_nbytes(width)
    source = wide.data_ptr(), x.numel() // width, turn_for(width, seed).forward
    target = codes.data_ptr(), norms.data_ptr(), workspace(jobs * scratch), scratch
    build_encode(width)(jobs, *source, bits, *levels_for(bits, width, levels), *target)
    return codes, norms


def decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, levels: Codebook | None = None) -> Tensor:
    out = torch.empty(*norms.shape, width)
    jobs, scratch = _jobs(out.numel()), scratch_nbytes(width)
    source = codes.data_ptr(), norms.data_ptr(), norms.numel(), turn_for(width, seed).back
    book = levels_for(bits, width, levels).book
    build_decode(width)(jobs, *source, bits, book, out.data_ptr(), workspace(jobs * scratch), scratch)
    return out


def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    _check_rows(pages)
    tokens, heads, width = k.shape
    kept = *vectors_of(pages), *chain(*kept_in(pages))
    count_pairs(pages, starts, tokens, 0)
    check_kept(pages, starts, tokens, 0)
    jobs, scratch, wide_k, wide_v = _jobs(2 * k.numel(), ENCODE_PARALLEL_FROM), append_nbytes(width), as_float(k), as_float(v)
    keys = wide_k.data_ptr(), pages.key_codes.data_ptr(), pages.key_norms.data_ptr(), pages.key_bits
    values = wide_v.data_ptr(), pages.value_codes.data_ptr(), pages.value_norms.data_ptr(), pages.value_bits
    key_levels, value_levels = _levels_of(pages)
    sides = *keys, *key_levels, *values, *value_levels
    place = tokens, heads, turn_for(width, pages.seed).forward, *index_of(pages, starts)
    build_append(width)(jobs, 2, *place, workspace(jobs * scratch), scratch, *kept, *sides)


NO_LOOPS = Loops()  # attention in float32 calls none


def rope_append_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pages: CodePages,
    starts: Tensor,
    inv_freq: Tensor,
    positions: Tensor,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
    mscale: float = 1.0,
    interleaved: bool = False,
) -> Tensor:
    _check_rows(pages)
    q, k = norm_rope(q, k, inv_freq, positions, norms, eps, mscale, interleaved)
    append_codes(k, v, pages, starts)
    return q


def _check_rows(pages: CodePages) -> None:
    if reason := not_rows(pages):
        raise Declined(reason)


def _levels_of(pages: CodePages) -> tuple[Levels, Levels]:
    """The levels of keys and of values."""
    keys = levels_for(pages.key_bits, pages.width, pages.key_book)
    return keys, levels_for(pages.value_bits, pages.width, pages.value_book)


def _jobs(coordinates: int, enough: int = PARALLEL_FROM) -> int:
    return threads() if coordinates >= enough else 1


def append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    tokens, width = latent.shape
    rotated_keys: Any = pages
    check_kept(pages, starts, tokens, 0)
    append_rows(rotated_keys, starts, 1, [(k_rope, pages.rope)])
    wide, jobs, scratch = as_float(latent), _jobs(latent.numel(), ENCODE_PARALLEL_FROM), append_nbytes(width)
    place = tokens, 1, turn_for(width, pages.seed).forward, *index_of(pages, starts)
    stores = wide.data_ptr(), pages.codes.data_ptr(), pages.norms.data_ptr(), pages.bits
    side = *stores, *levels_for(pages.bits, width, pages.book)
    # a kernel always takes the same number of arguments: the second side is not looked at
    kept = *NO_VECTORS, *chain(*kept_in(pages))
    build_append(width)(jobs, 1, *place, workspace(jobs * scratch), scratch, *kept, *side, *side)


def append_key_codes(k: Tensor, pages: RowCodes, starts: Tensor) -> None:
    tokens, width = k.shape
    count_pairs(pages, starts, tokens, 0)
    wide, jobs, scratch = as_float(k), _jobs(k.numel(), ENCODE_PARALLEL_FROM), append_nbytes(width)
    place = tokens, 1, turn_for(width, pages.seed).forward, *index_of(pages, starts)
    stores = wide.data_ptr(), pages.codes.data_ptr(), pages.norms.data_ptr(), pages.bits
    side, kept = (*stores, *levels_for(pages.bits, width, None)), (*NO_VECTORS, *NOTHING_KEPT, *NOTHING_KEPT)
    build_append(width)(jobs, 1, *place, workspace(jobs * scratch), scratch, *kept, *side, *side)


def choose_coded_positions(q: Tensor, weights: Tensor, pages: RowCodes, starts: Tensor, most: int) -> Chosen:
    return choose_codes(rotate(as_float(q), pages.seed), weights, pages, starts, most)


def rope_append_latent_codes(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_nope, q_rope, latent, k_rope = split_latent.reference(q, kv, heads, nope)
    turning = inv_freq, positions, mscale, interleaved
    append_latent_codes(rms_norm(latent, norm, eps), rope(k_rope[:, None], *turning)[:, 0], pages, starts)
    return q_nope, rope(q_rope, *turning)


def turboquant_latent_attention(q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float) -> Tensor:
    return like(rotate(_attend_latents(q_latent, q_rope, pages, starts, scale), pages.seed, inverse=True), q_latent)


def turboquant_latent_partials(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = q_latent.shape[0] * q_latent.shape[1]
    m, l = torch.empty(rows, 1), torch.empty(rows, 1)  # noqa: E741
    o = _attend_latents(q_latent, q_rope, pages, starts, scale, (m.data_ptr(), l.data_ptr()))
    return o.view(rows, 1, -1), m, l


def _attend_latents(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, ends: tuple[int, int] = (0, 0)
) -> Tensor:
    """Attend in the rotated space; with `ends` the largest scores and the sums of weights go there, and nothing is divided."""
    (tokens, heads, width), rope = q_latent.shape, q_rope.shape[2]
    pairs, (oldest, newest) = count_pairs(pages, starts, tokens, None), kept_in(pages)
    check_kept(pages, starts, tokens, newest.positions - 1)
    q, q2 = rotate(as_float(q_latent), pages.seed), as_float(q_rope)
    out = torch.empty_like(q)
    batch = Batch(
        *(q.data_ptr(), q2.data_ptr(), width, rope, heads),
        *(pages.codes.data_ptr(), pages.rope.data_ptr(), width, rope, 1, number_of(pages.rope.dtype)),
        *index_of(pages, starts),
        reach=EVERYTHING,
        sinks=0,
        out=out.data_ptr(),
        peaks=ends[0],
        totals=ends[1],
        value_width=width,
        scale=float(scale),
        softcap=0.0,
    )
    jobs = threads() if pairs * heads * (2 * width + rope) >= PRODUCTS_PARALLEL else 1
    codes = pages.norms.data_ptr(), levels_for(pages.bits, width, pages.book).book, pages.bits
    run(attend_codes, jobs, batch, ROWS, 1, tokens, panel_scratch(width, rope, 1), *codes, *oldest, *newest)
    return out


def turboquant_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0,
    levels: Codebook | None = None,
) -> Tensor:  # fmt: skip
    wide, (heads, tokens) = as_float(weights), norms.shape
    jobs, parts = _jobs(weights.shape[0] * tokens * width), max(1, tokens // PART)
    out, scratch = torch.empty(parts, weights.shape[0], width), _scratch(width)
    source = wide.data_ptr(), codes.data_ptr(), norms.data_ptr(), levels_for(bits, width, levels).book, bits, width, heads
    sizes = weights.shape[0] // heads, tokens, parts, float(threshold)
    sum_values(jobs, *source, *sizes, out.data_ptr(), workspace(jobs * scratch), scratch)
    return like(out[0] if parts == 1 else out.sum(0), weights)


def turboquant_partials(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    block: int,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    threshold: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    kernel = ATTEND(Attend(q.shape[0], pages))
    tokens, heads, width = q.shape
    pairs = count_pairs(pages, starts, tokens, _reach(window))
    parts = max(1, -(-pages.capacity // block))
    slots = parts + (pages.plain is not None) + (sinks is not None)
    o, m, l = (torch.empty(tokens, heads, slots, *tail) for tail in ((width,), (), ()))  # noqa: E741
    plan = block, parts, parts, 0, ROWS, o.data_ptr(), m.data_ptr(), l.data_ptr(), slots
    _attend(kernel, q, pages, starts, scale, window, softcap, threshold, plan, _jobs(pairs * heads * width))
    if sinks is not None:
        o[:, :, -1], m[..., -1], l[..., -1] = 0.0, sinks, 1.0
    return o.flatten(0, 1), m.flatten(0, 1), l.flatten(0, 1)


def turboquant_attention(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    threshold: float = 0.0,
) -> Tensor:
    kernel = ATTEND(Attend(q.shape[0], pages))
    tokens, heads, width = q.shape
    pairs = count_pairs(pages, starts, tokens, _reach(window))
    jobs, runs, parts, rows = _jobs(pairs * heads * width), 1, -(-pages.capacity // PART), ROWS
    if jobs > 1:
        rows = _rows_of_item(tokens * heads // pages.heads, pages.heads * parts, jobs)
        items = pages.heads * -(-tokens * heads // pages.heads // rows)
        runs = max(1, min(-(-JOBS_PER_THREAD * jobs // items), parts))
    if runs == 1:
        parts = 1
    slots = parts + (pages.plain is not None)
    states = tokens * heads * slots
    found = torch.empty(states * (width + 2))
    o = found.data_ptr()
    sums = o, o + 4 * states * width, o + 4 * states * (width + 1)
    plan = PART, parts, runs, int(runs == 1), rows, *sums, slots
    _attend(kernel, q, pages, starts, scale, window, softcap, threshold, plan, jobs)
    out, scratch = torch.empty(tokens, heads, width), scratch_nbytes(width) + 4 * width + LINE
    finishers = _jobs(states * width)
    sizes = tokens * heads, heads, slots, 0 if sinks is None else sinks.data_ptr()
    table = turn_for(width, pages.seed).back
    build_finish(width)(finishers, *sums, *sizes, table, out.data_ptr(), workspace(finishers * scratch), scratch)
    return like(out, q)


def _attend(
    kernel: Kernel | None,
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    threshold: float,
    plan: tuple[int, ...],
    jobs: int,
) -> None:
    """Leave sums, highest scores and sums of weights as the plan says: the fields of a `Step` from `block` to `slots`."""
    if kernel is None:
        return
    (tokens, heads, width), wide = q.shape, as_float(q)
    vectors, (oldest, newest) = vectors_of(pages), kept_in(pages)
    check_kept(pages, starts, tokens, newest.positions - 1)
    scratch = _scratch(width)
    rows = tokens * heads * padded(width) * 4
    taken = workspace(LINE + rows * (1 if pages.calibration is None else 2) + jobs * scratch)
    space = taken + LINE
    unrotated = space if pages.calibration is None else space + rows
    work = unrotated + rows
    turn, spinners = turn_for(width, pages.seed).forward, min(jobs, _jobs(q.numel()))
    source = wide.data_ptr(), tokens * heads, heads, heads // pages.heads, turn, float(scale), vectors.scale
    build_queries(width)(spinners, *source, space, unrotated, work, scratch, taken)
    key_book, value_book = (levels.book for levels in _levels_of(pages))
    step = (
        space,
        heads,
        width,
        *index_of(pages, starts),
        pages.heads,
        *(pages.key_codes.data_ptr(), pages.key_norms.data_ptr(), key_book, pages.key_bits),
        *(pages.value_codes.data_ptr(), pages.value_norms.data_ptr(), value_book, pages.value_bits),
        # a window of 0 leaves out even the position of the query
        EVERYTHING if window is None else window - 1,
        float(softcap or 0.0),
        float(threshold),
        *plan[:5],
        taken,
        *plan[5:],
        work,
        scratch,
        *(unrotated, vectors.along, vectors.across, vectors.table),
        *(_plain_items(pages, jobs), oldest.positions, newest.positions),
        *(loops_for(pages.key_bits, pages.value_bits) if kernel is attend_int8 else NO_LOOPS),
        attend_kept.address,
    )
    kernel(jobs, *step, *oldest, *newest)


def _plain_items(pages: CodePages, jobs: int) -> int:
    """How many items of a block of queries read what is kept as it is: one for all heads where sequences are many."""
    if pages.plain is None:
        return 0
    return 1 if len(pages.lengths) >= SEQUENCES_PER_THREAD * jobs else pages.heads


def _rows_of_item(rows: int, others: int, jobs: int) -> int:
    """How many of a key head's rows an item has where there are items of `others` heads and parts: fewer if these are few."""
    shares = -(-JOBS_PER_THREAD * jobs // others)
    return min(max(-(-rows // shares // FEWEST) * FEWEST, FEWEST), ROWS)


def _reach(window: int | None) -> int | None:
    """How far before the first new token a sequence is touched."""
    return None if window is None else max(window - 1, 0)


@cache
def _scratch(width: int) -> int:
    room = padded(width)
    fast = fast_scratch(ROWS, width) + products_nbytes(ROWS, room)
    nbytes = max(exact_scratch(room), fast) + scratch_nbytes(width)
    return -(-nbytes // LINE) * LINE
