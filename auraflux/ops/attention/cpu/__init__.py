"""Attention on CPU: torch outside, addresses inside. `routes.py` says which kernels attend; how they compute is in `decode`,
`prefill` and `jobs`.

The cache is read in its own dtype; queries and results are float32 within.
"""

import torch
from torch import Tensor

from auraflux.ops.attention import reference
from auraflux.ops.attention.cpu.dtypes import number_of
from auraflux.ops.attention.cpu.mla_products import HeadProducts
from auraflux.ops.attention.cpu.page_index import NO_WINDOW, append_rows, count_pairs, index_of
from auraflux.ops.attention.cpu.routes import ATTENTION, HEAD_PRODUCTS, Attend, Launch, panels
from auraflux.ops.attention.cpu.token_selection import choose_positions
from auraflux.ops.attention.cpu.work_items import PRODUCTS_PARALLEL, Batch, run
from auraflux.ops.attention.pages import KVPages, LatentPages, Pages, RowPages, causal_only
from auraflux.ops.norm.cpu import rms_norm
from auraflux.ops.rope.cpu import rope
from auraflux.ops.simd.jit import Kernel, arguments, as_float, empty, like, share, threads
from auraflux.ops.simd.softmax import NOTHING, merge_row
from auraflux.quant import QTensor

__all__ = [
    "append_keys",
    "append_kv",
    "append_latent",
    "attention",
    "attention_partials",
    "choose_positions",
    "latent_attention",
    "latent_output",
    "latent_partials",
    "latent_query",
    "merge_partials",
    "rope_append_latent",
]

# below this, waking the threads costs more than the work
SUMS_PARALLEL = 1 << 16


def _attend(
    launches: list[Launch],
    q: Tensor,
    q2: Tensor | None,
    pools: tuple[Tensor, Tensor],
    pages: Pages,
    starts: Tensor,
    scale: float,
    reach: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    ends: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Attend with float32 queries; with q2 the two pools together are the key, and the first the value.

    With `ends` the largest scores and the sums of weights go there, and the result is not divided by the latter.
    """
    (tokens, heads, width), (a, b) = q.shape, pools
    width2 = 0 if q2 is None else q2.shape[2]
    value_width, key_heads = (b.shape[-1], a.shape[1]) if q2 is None else (width, 1)
    pairs = count_pairs(pages, starts, tokens, reach)
    out = empty(tokens, heads, value_width)
    peaks, totals = (0, 0) if ends is None else (ends[0].data_ptr(), ends[1].data_ptr())
    batch = Batch(
        *(q.data_ptr(), 0 if q2 is None else q2.data_ptr(), width, width2, heads),
        *(a.data_ptr(), b.data_ptr(), width, b.shape[-1], key_heads, number_of(a.dtype)),
        *index_of(pages, starts),
        reach=NO_WINDOW if reach is None else reach,
        sinks=0 if sinks is None else sinks.data_ptr(),
        out=out.data_ptr(),
        peaks=peaks,
        totals=totals,
        value_width=value_width,
        scale=float(scale),
        softcap=float(softcap or 0),
    )
    jobs = threads() if pairs * heads * (width + width2 + value_width) >= PRODUCTS_PARALLEL else 1
    for kernel, rows, fewest, most, scratch in launches:
        run(kernel, jobs, batch, rows, fewest, most, scratch)
    return out


def attention(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    causal_only(ends)
    launches = ATTENTION(_attend_call(q, pages, window))
    if not launches:
        count_pairs(pages, starts, q.shape[0], 0)
        return q.new_zeros(*q.shape[:2], pages.v.shape[3])
    reach = None if window is None else window - 1
    return like(_attend(launches, as_float(q), None, (pages.k, pages.v), pages, starts, scale, reach, sinks, softcap), q)


def _attend_call(q: Tensor, pages: KVPages, window: int | None) -> Attend:
    (tokens, heads, width), k = q.shape, pages.k
    return Attend(tokens, heads // k.shape[1], (width, pages.v.shape[3]), k.dtype, window)


def attention_partials(
    q: Tensor,
    pages: KVPages,
    starts: Tensor,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    launches = ATTENTION(_attend_call(q, pages, window))
    rows, width = q.shape[0] * q.shape[1], pages.v.shape[3]
    if not launches:
        count_pairs(pages, starts, q.shape[0], 0)
        o, l = torch.zeros(rows, 1, width), torch.zeros(rows, 1)  # noqa: E741
        if sinks is None:
            return o, torch.full((rows, 1), -torch.inf), l
        return o, sinks.repeat(q.shape[0]).unsqueeze(1), l + 1
    m, l = torch.empty(rows, 1), torch.empty(rows, 1)  # noqa: E741
    reach = None if window is None else window - 1
    o = _attend(launches, as_float(q), None, (pages.k, pages.v), pages, starts, scale, reach, sinks, softcap, (m, l))
    return o.view(rows, 1, width), m, l


def latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    pools, widths = (pages.latent, pages.rope), (q_latent.shape[2], pages.rope.shape[2])
    launches = [panels(q_latent.shape[0], widths, joined=q_rope.shape[2] > 0)]
    q = as_float(q_latent), as_float(q_rope)
    return like(_attend(launches, *q, pools, pages, starts, scale, sinks=sinks), q_latent)


def latent_partials(
    q_latent: Tensor, q_rope: Tensor, pages: LatentPages, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    pools, widths = (pages.latent, pages.rope), (q_latent.shape[2], pages.rope.shape[2])
    launches = [panels(q_latent.shape[0], widths, joined=q_rope.shape[2] > 0)]
    rows = q_latent.shape[0] * q_latent.shape[1]
    m, l = torch.empty(rows, 1), torch.empty(rows, 1)  # noqa: E741
    o = _attend(launches, as_float(q_latent), as_float(q_rope), pools, pages, starts, scale, ends=(m, l))
    return o.view(rows, 1, -1), m, l


def latent_query(q_nope: Tensor, weight: Tensor | QTensor, rows: int) -> Tensor:
    return _by_head(q_nope, weight, rows, 0, q_nope.shape[2], query=True)


def latent_output(v: Tensor, weight: Tensor | QTensor, nope: int) -> Tensor:
    rows = weight.shape[0] // v.shape[1]
    return _by_head(v, weight, rows, nope, rows - nope, query=False)


def _by_head(x: Tensor, weight: Tensor | QTensor, rows: int, skip: int, used: int, query: bool) -> Tensor:
    return like(HEAD_PRODUCTS(HeadProducts(as_float(x).contiguous(), weight, rows, skip, used, query)), x)


def append_kv(k: Tensor, v: Tensor, pages: KVPages, starts: Tensor) -> None:
    append_rows(pages, starts, k.shape[1], [(k, pages.k), (v, pages.v)])


def append_keys(k: Tensor, pages: RowPages, starts: Tensor) -> None:
    append_rows(pages, starts, 1, [(k, pages.rows)])


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


def rope_append_latent(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentPages, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_nope, q_rope, latent, k_rope = reference.split_latent.reference(q, kv, heads, nope)
    rotation = inv_freq, positions, mscale, interleaved
    append_latent(rms_norm(latent, norm, eps), rope(k_rope[:, None], *rotation)[:, 0], pages, starts)
    return q_nope, rope(q_rope, *rotation)
