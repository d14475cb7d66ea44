"""TurboQuant on CPU: the functions of the ops. torch outside, addresses inside.

To follow one attention call, read `turboquant_attention` below, then `attend` (its three kernels and their launch arguments),
`work_items` (how threads divide it) and `int8/attend` or `attend_float32` (the blocks of one item). `codec` encodes and decodes
rows, `append` encodes into pages, `mla` attends to latents; `routes` chooses the kernel.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.attention.cpu.dtypes import number_of
from auraflux.ops.attention.cpu.mla_panels import ROWS, panel_scratch
from auraflux.ops.attention.cpu.page_index import NO_WINDOW, append_rows, count_pairs, index_of
from auraflux.ops.attention.cpu.row_tiles import PART
from auraflux.ops.attention.cpu.work_items import PRODUCTS_PARALLEL, Batch, run
from auraflux.ops.attention.pages import causal_only
from auraflux.ops.attention.reference_latent import split_latent
from auraflux.ops.attention.reference_token_selection import TokenSelection
from auraflux.ops.norm.cpu import rms_norm
from auraflux.ops.rope.cpu import norm_rope, rope
from auraflux.ops.simd.jit import as_float, empty, like, threads, workspace
from auraflux.ops.turboquant.codebook import Codebook
from auraflux.ops.turboquant.cpu.append import launch_append
from auraflux.ops.turboquant.cpu.attend import attend, finish, scratch_of, split_work
from auraflux.ops.turboquant.cpu.attend_float32 import sum_values
from auraflux.ops.turboquant.cpu.codec import build_decode, build_encode, levels_for, scratch_nbytes, threads_for
from auraflux.ops.turboquant.cpu.full_precision import check_full_precision, full_precision_of
from auraflux.ops.turboquant.cpu.key_calibration import calibration_of
from auraflux.ops.turboquant.cpu.mla import LatentFormat, attend_latents, select_tokens
from auraflux.ops.turboquant.cpu.rotate_rows import build_rotate, rotation_for
from auraflux.ops.turboquant.cpu.routes import ATTEND, Attend, not_rows
from auraflux.ops.turboquant.cpu.work_items import Partials
from auraflux.ops.turboquant.pages import CodePages, LatentCodes, RowCodes, row_words


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    wide, width, rotation = as_float(x), x.shape[-1], rotation_for(x.shape[-1], seed)
    out = torch.empty_like(wide)
    jobs, scratch = threads_for(x.numel()), scratch_nbytes(width)
    table = rotation.back if inverse else rotation.forward
    rows = x.numel() // width
    build_rotate(width, int(inverse))(jobs, wide.data_ptr(), rows, table, out.data_ptr(), workspace(jobs * scratch), scratch)
    return like(out, x)


def encode(x: Tensor, bits: int, seed: int, levels: Codebook | None = None) -> tuple[Tensor, Tensor]:
    wide, width = as_float(x), x.shape[-1]
    codes = torch.empty(*x.shape[:-1], row_words(bits, width), dtype=torch.int32)
    norms = torch.empty(x.shape[:-1])
    jobs, scratch = threads_for(x.numel()), scratch_nbytes(width)
    source = wide.data_ptr(), x.numel() // width, rotation_for(width, seed).forward
    target = codes.data_ptr(), norms.data_ptr(), workspace(jobs * scratch), scratch
    build_encode(width)(jobs, *source, bits, *levels_for(bits, width, levels), *target)
    return codes, norms


def decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int, levels: Codebook | None = None) -> Tensor:
    out = torch.empty(*norms.shape, width)
    jobs, scratch = threads_for(out.numel()), scratch_nbytes(width)
    source = codes.data_ptr(), norms.data_ptr(), norms.numel(), rotation_for(width, seed).back
    book = levels_for(bits, width, levels).book
    build_decode(width)(jobs, *source, bits, book, out.data_ptr(), workspace(jobs * scratch), scratch)
    return out


def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    _check_rows(pages)
    count_pairs(pages, starts, k.shape[0], 0)
    check_full_precision(pages, starts, k.shape[0], 0)
    keys = k, pages.key_codes, pages.key_norms, pages.key_bits, pages.key_book
    values = v, pages.value_codes, pages.value_norms, pages.value_bits, pages.value_book
    launch_append([keys, values], pages, starts, calibration_of(pages), full_precision_of(pages))


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


def append_latent_codes(latent: Tensor, k_rope: Tensor, pages: LatentCodes, starts: Tensor) -> None:
    rotated_keys: Any = pages
    check_full_precision(pages, starts, latent.shape[0], 0)
    append_rows(rotated_keys, starts, 1, [(k_rope, pages.rope)])
    latents = latent, pages.codes, pages.norms, pages.bits, pages.book
    launch_append([latents], pages, starts, full_precision=full_precision_of(pages))


def append_key_codes(k: Tensor, pages: RowCodes, starts: Tensor) -> None:
    count_pairs(pages, starts, k.shape[0], 0)
    launch_append([(k, pages.codes, pages.norms, pages.bits, None)], pages, starts)


def choose_coded_positions(q: Tensor, weights: Tensor, pages: RowCodes, starts: Tensor, most: int) -> TokenSelection:
    return select_tokens(rotate(as_float(q), pages.seed), weights, pages, starts, most)


def rope_append_latent_codes(
    q: Tensor, kv: Tensor, heads: int, nope: int, pages: LatentCodes, starts: Tensor, norm: Tensor, eps: float,
    inv_freq: Tensor, positions: Tensor, mscale: float = 1.0, interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    q_nope, q_rope, latent, k_rope = split_latent.reference(q, kv, heads, nope)
    turning = inv_freq, positions, mscale, interleaved
    append_latent_codes(rms_norm(latent, norm, eps), rope(k_rope[:, None], *turning)[:, 0], pages, starts)
    return q_nope, rope(q_rope, *turning)


def turboquant_latent_attention(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    found = _attend_latents(q_latent, q_rope, pages, starts, scale, sinks)
    return like(rotate(found, pages.seed, inverse=True), q_latent)


def turboquant_latent_partials(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    rows = q_latent.shape[0] * q_latent.shape[1]
    m, l = torch.empty(rows, 1), torch.empty(rows, 1)  # noqa: E741
    o = _attend_latents(q_latent, q_rope, pages, starts, scale, ends=(m.data_ptr(), l.data_ptr()))
    return o.view(rows, 1, -1), m, l


def _attend_latents(
    q_latent: Tensor, q_rope: Tensor, pages: LatentCodes, starts: Tensor, scale: float,
    logits: Tensor | None = None, ends: tuple[int, int] = (0, 0),
) -> Tensor:  # fmt: skip
    """Attend in the rotated space; with `ends`, write highest scores and sums of weights there and divide nothing."""
    (tokens, heads, width), rope = q_latent.shape, q_rope.shape[2]
    pairs, (sinks, recent) = count_pairs(pages, starts, tokens, None), full_precision_of(pages)
    check_full_precision(pages, starts, tokens, recent.positions - 1)
    q, q2 = rotate(as_float(q_latent), pages.seed), as_float(q_rope)
    out = torch.empty_like(q)
    batch = Batch(
        *(q.data_ptr(), q2.data_ptr(), width, rope, heads),
        *(pages.codes.data_ptr(), pages.rope.data_ptr(), width, rope, 1, number_of(pages.rope.dtype)),
        *index_of(pages, starts),
        reach=NO_WINDOW,
        sinks=0 if logits is None else logits.data_ptr(),
        out=out.data_ptr(),
        peaks=ends[0],
        totals=ends[1],
        value_width=width,
        scale=float(scale),
        softcap=0.0,
    )
    jobs = threads() if pairs * heads * (2 * width + rope) >= PRODUCTS_PARALLEL else 1
    codes = LatentFormat(pages.norms.data_ptr(), levels_for(pages.bits, width, pages.book).book, pages.bits)
    run(attend_latents, jobs, batch, ROWS, 1, tokens, panel_scratch(width, rope, 1), codes, sinks, recent)
    return out


def turboquant_values(
    weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0,
    levels: Codebook | None = None,
) -> Tensor:  # fmt: skip
    wide, (heads, tokens) = as_float(weights), norms.shape
    jobs, parts = threads_for(weights.shape[0] * tokens * width), max(1, tokens // PART)
    out, scratch = torch.empty(parts, weights.shape[0], width), scratch_of(width)
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
    ends: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    causal_only(ends)
    kernel = ATTEND(Attend(q.shape[0], pages))
    tokens, heads, width = q.shape
    jobs = threads_for(count_pairs(pages, starts, tokens, _reach(window)) * heads * width)
    parts = max(1, -(-pages.capacity // block))
    slots = parts + (pages.full_precision is not None) + (sinks is not None)
    o, m, l = (torch.empty(tokens, heads, slots, *tail) for tail in ((width,), (), ()))  # noqa: E741
    partials = Partials(o.data_ptr(), m.data_ptr(), l.data_ptr(), slots)
    if kernel is not None:
        split = block, parts, parts, 0, ROWS
        attend(kernel, q, pages, starts, (scale, window, softcap, threshold), split, partials, jobs)
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
    ends: Tensor | None = None,
) -> Tensor:
    causal_only(ends)
    kernel = ATTEND(Attend(q.shape[0], pages))
    tokens, heads, width = q.shape
    jobs = threads_for(count_pairs(pages, starts, tokens, _reach(window)) * heads * width)
    parts, runs, rows = split_work(q, pages, jobs)
    slots = parts + (pages.full_precision is not None)
    states = tokens * heads * slots
    found = empty(states * (width + 2))
    o = found.data_ptr()
    partials = Partials(o, o + 4 * states * width, o + 4 * states * (width + 1), slots)
    if kernel is not None:
        split = PART, parts, runs, int(runs == 1), rows
        attend(kernel, q, pages, starts, (scale, window, softcap, threshold), split, partials, jobs)
    return like(finish(q, pages, partials, sinks), q)


def _reach(window: int | None) -> int | None:
    """Return how far before the first new token a sequence is touched."""
    return None if window is None else max(window - 1, 0)
