"""Attention on CPU: torch outside, addresses inside. How it computes is in `_decode`, `_panels` and `_jobs`.

The cache is read in its own dtype; queries and results are float32 within.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._jit import Kernel, arguments, as_float, int32s, jit, like, octets, share, threads
from auraflux.ops.attention._decode import decode_kernel, decode_scratch
from auraflux.ops.attention._jobs import Batch, run, survey
from auraflux.ops.attention._latent_weight import latent_output, latent_query
from auraflux.ops.attention._panel_tiles import PANEL
from auraflux.ops.attention._panels import ROWS, attend_panels, panel_scratch
from auraflux.ops.attention._softmax import NOTHING, merge_row
from auraflux.ops.attention._tiles import LANES, number_of
from auraflux.ops.attention.pages import KVPages, LatentPages, Pages, spans

__all__ = ["append_kv", "append_latent", "attention", "latent_attention", "latent_output", "latent_query", "merge_partials"]

# below these, waking the threads costs more than the work
PRODUCTS_PARALLEL = 1 << 18
BYTES_PARALLEL = 1 << 18
SUMS_PARALLEL = 1 << 16
EVERYTHING = 1 << 40  # positions; further back than any sequence is long


def _pairs(pages: Pages, starts: Tensor, tokens: int, reach: int | None) -> int:
    """Count the pairs of a query and a key, once it is sure that no kernel will leave the pages."""
    (count, size), (sequences, width) = pages.pool, pages.table.shape
    index = pages.table.data_ptr(), width, pages.lengths.data_ptr(), starts.data_ptr()
    found = survey(*index, sequences, tokens, size, count, EVERYTHING if reach is None else reach)
    if found < 0:
        spans(pages, starts, tokens, reach)
        raise InputError("the page table, lengths and starts do not fit each other.")
    return found


def _attend(
    q: Tensor,
    q2: Tensor | None,
    pools: tuple[Tensor, Tensor],
    pages: Pages,
    starts: Tensor,
    scale: float,
    reach: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend with float32 queries; with q2 the two pools together are the key, and the first the value."""
    (tokens, heads, width), (a, b) = q.shape, pools
    width2 = 0 if q2 is None else q2.shape[2]
    value_width, key_heads = (b.shape[-1], a.shape[1]) if q2 is None else (width, 1)
    pairs = _pairs(pages, starts, tokens, reach)
    out = torch.empty(tokens, heads, value_width)
    sequences, table_width = pages.table.shape
    batch = Batch(
        q=q.data_ptr(),
        q2=0 if q2 is None else q2.data_ptr(),
        width=width,
        width2=width2,
        heads=heads,
        a=a.data_ptr(),
        b=b.data_ptr(),
        width_a=width,
        width_b=b.shape[-1],
        key_heads=key_heads,
        element=number_of(a.dtype),
        page=a.shape[-2],
        table=pages.table.data_ptr(),
        table_width=table_width,
        lengths=pages.lengths.data_ptr(),
        starts=starts.data_ptr(),
        sequences=sequences,
        reach=EVERYTHING if reach is None else reach,
        sinks=0 if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        value_width=value_width,
        scale=float(scale),
        softcap=float(softcap or 0),
    )
    jobs = threads() if pairs * heads * (width + width2 + value_width) >= PRODUCTS_PARALLEL else 1
    group = heads // key_heads
    one_by_one = q2 is None and min(width, value_width) >= LANES and group < PANEL
    if one_by_one:
        run(decode_kernel(a.dtype), jobs, batch, group, 1, 1, decode_scratch(group, width, value_width))
    if tokens > 1 or not one_by_one:
        scratch = panel_scratch(batch.width_a, batch.width_b, int(width2 > 0))
        run(attend_panels, jobs, batch, ROWS, 2 if one_by_one else 1, tokens, scratch)
    return out


def attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    if window == 0:
        _pairs(pages, starts, q.shape[0], 0)
        return q.new_zeros(*q.shape[:2], pages.v.shape[3])
    reach = None if window is None else window - 1
    return like(_attend(as_float(q), None, (pages.k, pages.v), pages, starts, scale, reach, sinks, softcap), q)


def latent_attention(q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float) -> Tensor:
    pools = pages.latent, pages.rope
    return like(_attend(as_float(q_latent), as_float(q_rope), pools, pages, starts, scale), q_latent)


@jit
def _append(token, source, target, nbytes, heads, page, table, table_width, lengths_at, starts_at, sequences):
    """Copy one token's rows, one for each head, to its place in the pages."""
    starts, lengths = int32s(starts_at, sequences + 1), int32s(lengths_at, sequences)
    low, high = 0, sequences
    while high - low > 1:
        middle = (low + high) // 2
        if starts[middle] <= token:
            low = middle
        else:
            high = middle
    position = lengths[low] - starts[low + 1] + token
    number = int32s(table + 4 * low * table_width, table_width)[position // page]
    for head in range(heads):
        row = (number * heads + head) * page + position % page
        old, new = octets(target + row * nbytes, nbytes), octets(source + (token * heads + head) * nbytes, nbytes)
        for i in range(nbytes):
            old[i] = new[i]


@Kernel
def _append_all(args, job, jobs):
    tokens, source, target, nbytes, heads, page, table, table_width, lengths, starts, sequences = arguments(args, 11)
    for token in share(tokens, job, jobs):
        _append(token, source, target, nbytes, heads, page, table, table_width, lengths, starts, sequences)


def append_rows(pages: Pages, starts: Tensor, heads: int, pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Copy new rows to the pools they belong to, in the pools' dtype."""
    tokens, table = pairs[0][0].shape[0], pages.table
    _pairs(pages, starts, tokens, 0)
    sequences, table_width = table.shape
    index = pages.pool[1], table.data_ptr(), table_width, pages.lengths.data_ptr(), starts.data_ptr(), sequences
    for new, pool in pairs:
        rows = new if new.dtype is pool.dtype else new.to(pool.dtype)
        nbytes = pool.shape[-1] * pool.element_size()
        jobs = threads() if tokens * heads * nbytes >= BYTES_PARALLEL else 1
        _append_all(jobs, tokens, rows.data_ptr(), pool.data_ptr(), nbytes, heads, *index)


def append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    append_rows(pages, starts, k.shape[1], [(k, pages.k), (v, pages.v)])


def append_latent(latent: Tensor, k_rope: Tensor, pages: LatentPages, starts: Tensor) -> None:
    append_rows(pages, starts, 1, [(latent, pages.latent), (k_rope, pages.rope)])


@Kernel
def _merge(args, job, jobs):
    o, m, l, rows, blocks, width, out = arguments(args, 7)  # noqa: E741
    for row in share(rows, job, jobs):
        ends = 4 * row * blocks
        merge_row(o + ends * width, 4 * width, m + ends, l + ends, 4, blocks, width, NOTHING, out + 4 * row * width)


def merge_partials(o: Tensor, m: Tensor, l: Tensor) -> Tensor:  # noqa: E741
    rows, blocks, width = o.shape
    out = o.new_empty(rows, width)
    _merge(
        threads() if o.numel() >= SUMS_PARALLEL else 1,
        o.data_ptr(),
        m.data_ptr(),
        l.data_ptr(),
        rows,
        blocks,
        width,
        out.data_ptr(),
    )
    return out
