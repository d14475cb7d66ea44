"""Attention on quantized latents (MLA), and sparse token selection (DSA) by quantized keys.

A block of positions is dequantized once, and serves the heads of many queries as a small product. The panels are those of
attention on full-precision latents (`attention.cpu.mla_panels`); only how a block gets to scratch memory differs. Sink tokens
and recent window are blocks of their own, after the codes of their part.
"""

from typing import Any, NamedTuple, cast

from torch import Tensor

from auraflux.ops.attention.cpu.dtypes import widen_row
from auraflux.ops.attention.cpu.launch_args import flatten, read_args
from auraflux.ops.attention.cpu.mla_panels import (
    BLOCK,
    Rows,
    attend_block,
    begin,
    keys_for,
    lay_out,
    lay_queries,
    rows_for,
    store_rows,
)
from auraflux.ops.attention.cpu.page_index import PageIndex, index_of, place_of
from auraflux.ops.attention.cpu.panel_tiles import TALL
from auraflux.ops.attention.cpu.token_selection import BLOCK as SCORED
from auraflux.ops.attention.cpu.token_selection import (
    IndexerQueries,
    ScoredTokens,
    row_of,
    score_key,
    select,
    transpose_queries,
)
from auraflux.ops.attention.cpu.work_items import (
    Batch,
    Plan,
    end_part,
    ends_of,
    finish,
    open_rows,
    skip_part,
    slot_of,
    span,
    take,
)
from auraflux.ops.attention.reference_token_selection import TokenSelection
from auraflux.ops.simd.jit import Kernel, as_float, floats, jit
from auraflux.ops.simd.softmax import ZERO, fill
from auraflux.ops.turboquant.cpu.codec import levels_for
from auraflux.ops.turboquant.cpu.dequantize import unpack_row
from auraflux.ops.turboquant.cpu.full_precision import FullPrecision, size_of
from auraflux.ops.turboquant.cpu.work_items import StoredRows
from auraflux.ops.turboquant.pages import RowCodes


class LatentFormat(NamedTuple):
    """Quantization of latents: addresses of norms and codebook, and the bits of a code."""

    norms: int
    book: int
    bits: int


class LatentArgs(NamedTuple):
    """The launch arguments of attention on quantized latents."""

    batch: Batch
    plan: Plan
    codes: LatentFormat
    sinks: FullPrecision
    recent: FullPrecision


@jit
def _dequantize(keys, codes, first, count, buffers):
    """Dequantize the latents of some positions, each followed by its RoPE key; pad the last tile with zero rows."""
    words, step = (keys.width_a * codes.bits + 31) // 32, 4 * buffers.key_stride
    for j in range(count):
        row, at = row_of(keys.table, keys.page, first + j), buffers.keys + j * step
        # whole chunks are looked up: the key overwrites their end
        unpack_row(codes.bits, keys.a + 4 * row * words, keys.width_a, codes.book, at)
        latent, norm = floats(at, keys.width_a), floats(codes.norms + 4 * row, 1)[0]
        for d in range(keys.width_a):
            latent[d] *= norm
        _add_key(keys, row, at, buffers)
    fill(buffers.keys + count * step, TALL * buffers.key_stride, ZERO)


@jit
def _widen(keys, pages, b, first, count, buffers):
    """Widen the latents of some full-precision positions, each followed by its RoPE key; pad the last tile with zero rows."""
    step, table = 4 * buffers.key_stride, pages.table + 4 * b * pages.table_width
    for j in range(count):
        row, at = row_of(table, pages.page, first + j), buffers.keys + j * step
        widen_row((pages.element, pages.k + row * keys.width_a * size_of(pages.element), keys.width_a, at))
        _add_key(keys, row_of(keys.table, keys.page, first + j), at, buffers)
    fill(buffers.keys + count * step, TALL * buffers.key_stride, ZERO)


@jit
def _add_key(keys, row, at, buffers):
    """Write a RoPE key after its latent, and zeros after both."""
    source, size = keys.b + row * keys.width_b * size_of(keys.element), keys.width_a + keys.width_b
    widen_row((keys.element, source, keys.width_b, at + 4 * keys.width_a))
    fill(at + 4 * size, buffers.key_stride - size, ZERO)


@jit
def _moved_back(rows, back, reach):
    """Return the same queries, moved `back` positions and seeing `reach` positions before that."""
    q, heads = (rows.q, rows.q2, rows.width, rows.width2), (rows.heads, rows.head, rows.group)
    return Rows(*q, *heads, rows.position - back, rows.first, rows.size, reach)


@jit
def _attend_full_precision(rows, keys, pages, b, first, last, buffers):
    for base in range(first // BLOCK * BLOCK, last, BLOCK):
        origin = max(base, first)
        count = min(base + BLOCK, last) - origin
        _widen(keys, pages, b, origin, count, buffers)
        attend_block(rows, buffers, keys.width_a, origin, count, ZERO)


@jit
def _attend_part(args, rows, keys, b, first, last, buffers):
    """Attend to positions [first, last) of a part: to codes, then to sink tokens, then to the recent window."""
    sinks, recent = args.sinks, args.recent
    near, far = rows.position + rows.first // rows.group, rows.position + (rows.first + rows.size - 1) // rows.group
    coded, end = _moved_back(rows, recent.positions, rows.reach), min(last, far + 1 - recent.positions)
    start = max(first, sinks.positions)
    for base in range(start // BLOCK * BLOCK, end, BLOCK):
        origin = max(base, start)
        count = min(base + BLOCK, end) - origin
        _dequantize(keys, args.codes, origin, count, buffers)
        attend_block(coded, buffers, keys.width_a, origin, count, ZERO)
    _attend_full_precision(rows, keys, sinks, b, first, min(sinks.positions, last), buffers)
    if recent.positions:
        reach = recent.positions - 1
        _attend_full_precision(_moved_back(rows, 0, reach), keys, recent, b, max(start, near - reach), last, buffers)


@Kernel
def attend_latents(args_at, job, jobs):
    """Attend with rotated queries to quantized and full-precision latents; the results stay rotated."""
    args = read_args(LatentArgs, args_at)
    batch, plan = args.batch, args.plan
    item = take(batch, plan, job, 0)
    while item.sequence >= 0:
        where = span(batch, plan, item)
        rows, keys = rows_for(batch, item, where), keys_for(batch, item)
        buffers = lay_out(rows, keys.width_a, keys.width_b, keys.joined, batch.value_width, plan.space + job * plan.nbytes)
        lay_queries(rows, batch.scale, buffers.queries)
        open_rows(batch, plan, item, where, job)
        for part in range(where.begin, where.stop):
            first, last = ends_of(where, part)
            if first >= last:
                skip_part(batch, plan, item, where, part)
                continue
            begin(rows, buffers)
            _attend_part(args, rows, keys, item.sequence, first, last, buffers)
            slot = slot_of(batch, plan, item, where, part)
            store_rows(rows.size, batch.value_width, buffers, slot)
            end_part(batch, plan, item, where, job, slot)
        finish(batch, plan, item, where, job)
        item = take(batch, plan, job, item.sequence)


class ScoreArgs(NamedTuple):
    """The launch arguments of scoring quantized keys."""

    queries: IndexerQueries
    keys: StoredRows
    pages: PageIndex
    tokens: ScoredTokens


@Kernel
def _score_codes(args_at, job, jobs):
    """Score quantized keys for some tokens; a key is dequantized where `token_selection` widens one."""
    args = read_args(ScoreArgs, args_at)
    queries, keys, index, tokens = args.queries, args.keys, args.pages, args.tokens
    heads, width, transposed = queries.heads, queries.width, tokens.space + job * tokens.nbytes
    sums, key = transposed + 4 * heads * width, transposed + 4 * heads * (width + 1)
    blocks, laid, words = (tokens.capacity + SCORED - 1) // SCORED, -1, (width * keys.bits + 31) // 32
    for item in range(job, tokens.size * blocks, jobs):
        token, begin = tokens.first + item // blocks, item % blocks * SCORED
        b, own = place_of(token, index.lengths, index.starts, index.sequences)
        if begin > own:
            continue
        if token != laid:
            transpose_queries(queries.q + 4 * token * heads * width, heads, width, transposed)
            laid = token
        scores = floats(tokens.scores + 4 * (token - tokens.first) * tokens.capacity, tokens.capacity)
        for position in range(begin, min(begin + SCORED, own + 1)):
            row = row_of(index.table + 4 * b * index.table_width, index.page, position)
            unpack_row(keys.bits, keys.codes + 4 * row * words, width, keys.book, key)
            # a norm is not negative, so it may wait for the sum over heads
            found = score_key(key, transposed, queries.weights + 4 * token * heads, heads, width, sums)
            scores[position] = found * floats(keys.norms + 4 * row, 1)[0]


def select_tokens(rotated: Tensor, weights: Tensor, pages: RowCodes, starts: Tensor, most: int) -> TokenSelection:
    """Select the `most` best positions of each token with rotated queries in float32."""
    shares, any_kind = as_float(weights), cast(Any, pages)
    queries = IndexerQueries(rotated.data_ptr(), shares.data_ptr(), *rotated.shape[1:])
    book = levels_for(pages.bits, pages.width, None).book
    keys = StoredRows(pages.codes.data_ptr(), pages.norms.data_ptr(), book, pages.bits)
    index = index_of(pages, starts)

    def score(jobs: int, tokens: ScoredTokens) -> None:
        _score_codes(jobs, *flatten(ScoreArgs(queries, keys, index, tokens)))

    return select(rotated, any_kind, starts, most, score)
