"""Codes on CPU: torch outside, addresses inside. Rows are coded in `_codec`, attended to in `_exact` and `_fast`."""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import is_exact
from auraflux.ops._jit import LINE, as_float, like, threads, workspace
from auraflux.ops.attention._jobs import survey
from auraflux.ops.turboquant._attend import build_attend, build_finish, build_queries
from auraflux.ops.turboquant._codec import CHUNK
from auraflux.ops.turboquant._codec_kernels import (
    build_append,
    build_decode,
    build_encode,
    build_rotate,
    levels_for,
    scratch_nbytes,
    turn_for,
)
from auraflux.ops.turboquant._exact import ROWS, exact_scratch, padded, sum_values
from auraflux.ops.turboquant._fast import fast_scratch
from auraflux.ops.turboquant._fast_tiles import FAST_KEY_BITS
from auraflux.ops.turboquant.pages import CodePages, row_words

PARALLEL_FROM = 1 << 14  # coordinates; below this, waking the threads costs more than the work
JOBS_PER_THREAD = 4
POSITIONS_PER_JOB = 256  # at least, where positions are split
EVERYTHING = 1 << 40  # positions; further back than any sequence is long


def rotate(x: Tensor, seed: int, inverse: bool = False) -> Tensor:
    wide, width, turn = as_float(x), x.shape[-1], turn_for(x.shape[-1], seed)
    out = torch.empty_like(wide)
    jobs, scratch = _jobs(x.numel()), scratch_nbytes(width)
    table = turn.back if inverse else turn.forward
    rows = x.numel() // width
    build_rotate(width, int(inverse))(jobs, wide.data_ptr(), rows, table, out.data_ptr(), workspace(jobs * scratch), scratch)
    return like(out, x)


def encode(x: Tensor, bits: int, seed: int) -> tuple[Tensor, Tensor]:
    wide, width = as_float(x), x.shape[-1]
    codes = torch.empty(*x.shape[:-1], row_words(bits, width), dtype=torch.int32)
    norms = torch.empty(x.shape[:-1])
    jobs, scratch = _jobs(x.numel()), scratch_nbytes(width)
    source = wide.data_ptr(), x.numel() // width, turn_for(width, seed).forward
    target = codes.data_ptr(), norms.data_ptr(), workspace(jobs * scratch), scratch
    build_encode(width)(jobs, *source, bits, *levels_for(bits, width), *target)
    return codes, norms


def decode(codes: Tensor, norms: Tensor, bits: int, width: int, seed: int) -> Tensor:
    out = torch.empty(*norms.shape, width)
    jobs, scratch = _jobs(out.numel()), scratch_nbytes(width)
    source = codes.data_ptr(), norms.data_ptr(), norms.numel(), turn_for(width, seed).back
    build_decode(width)(jobs, *source, bits, levels_for(bits, width).book, out.data_ptr(), workspace(jobs * scratch), scratch)
    return out


def append_codes(k: Tensor, v: Tensor, pages: CodePages, starts: Tensor) -> None:
    tokens, heads, width = k.shape
    _pairs(pages, starts, tokens, 0)
    jobs, scratch = _jobs(k.numel()), scratch_nbytes(width)
    space, turn, append = workspace(jobs * scratch), turn_for(width, pages.seed).forward, build_append(width)
    for x, bits, codes, norms in (
        (k, pages.key_bits, pages.key_codes, pages.key_norms),
        (v, pages.value_bits, pages.value_codes, pages.value_norms),
    ):
        wide = as_float(x)
        source = wide.data_ptr(), tokens, heads, turn, bits, *levels_for(bits, width)
        append(jobs, *source, codes.data_ptr(), norms.data_ptr(), *_index(pages, starts), space, scratch)


def _jobs(coordinates: int) -> int:
    return threads() if coordinates >= PARALLEL_FROM else 1


def _index(pages: CodePages, starts: Tensor) -> tuple[int, ...]:
    """Rows in a page, addresses of the table, its width, addresses of lengths and starts, how many sequences."""
    sequences, width = pages.table.shape
    return pages.pool[1], pages.table.data_ptr(), width, pages.lengths.data_ptr(), starts.data_ptr(), sequences


def _pairs(pages: CodePages, starts: Tensor, tokens: int, reach: int | None) -> int:
    """Count the pairs of a query and a key, once it is sure that no kernel will leave the pages."""
    (count, size), (sequences, width) = pages.pool, pages.table.shape
    index = pages.table.data_ptr(), width, pages.lengths.data_ptr(), starts.data_ptr()
    found = survey(*index, sequences, tokens, size, count, EVERYTHING if reach is None else reach)
    if found < 0:
        pages.spans(starts, tokens, reach)
        raise InputError("the page table, lengths and starts do not fit each other.")
    return found


def turboquant_values(weights: Tensor, codes: Tensor, norms: Tensor, bits: int, width: int, threshold: float = 0.0) -> Tensor:
    wide, (heads, tokens) = as_float(weights), norms.shape
    jobs = _jobs(weights.shape[0] * tokens * width)
    parts = 1 if jobs == 1 else max(1, min(-(-JOBS_PER_THREAD * jobs // heads), tokens // POSITIONS_PER_JOB))
    out, scratch = torch.empty(parts, weights.shape[0], width), _scratch(width)
    source = wide.data_ptr(), codes.data_ptr(), norms.data_ptr(), levels_for(bits, width).book, bits, width, heads
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
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, heads, width = q.shape
    pairs = _pairs(pages, starts, tokens, _reach(window))
    parts = max(1, -(-pages.capacity // block))
    slots = parts + (sinks is not None)
    o, m, l = (torch.empty(tokens, heads, slots, *tail) for tail in ((width,), (), ()))  # noqa: E741
    jobs, scratch = _jobs(pairs * heads * width), _scratch(width)
    rows = tokens * heads * padded(width) * 4
    space = workspace(rows + jobs * scratch)
    _attend(q, pages, starts, scale, window, softcap, block, parts, o, m, l, slots, jobs, space, scratch)
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
) -> Tensor:
    tokens, heads, width = q.shape
    pairs = _pairs(pages, starts, tokens, _reach(window))
    jobs, scratch = _jobs(pairs * heads * width), _scratch(width)
    parts = 1
    if jobs > 1:
        items = pages.heads * -(-tokens * heads // pages.heads // ROWS)
        parts = max(1, min(-(-JOBS_PER_THREAD * jobs // items), pairs // tokens // POSITIONS_PER_JOB))
    o, m, l = (torch.empty(tokens * heads * parts * n) for n in (width, 1, 1))  # noqa: E741
    space = workspace(tokens * heads * padded(width) * 4 + jobs * scratch)
    _attend(q, pages, starts, scale, window, softcap, 0, parts, o, m, l, parts, jobs, space, scratch)
    out = torch.empty(tokens, heads, width)
    sums = o.data_ptr(), m.data_ptr(), l.data_ptr(), tokens * heads, heads, parts, 0 if sinks is None else sinks.data_ptr()
    table = turn_for(width, pages.seed).back
    build_finish(width)(_jobs(o.numel()), *sums, table, out.data_ptr(), space, scratch)
    return like(out, q)


def _attend(
    q: Tensor,
    pages: CodePages,
    starts: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    block: int,
    parts: int,
    o: Tensor,
    m: Tensor,
    l: Tensor,  # noqa: E741
    slots: int,
    jobs: int,
    space: int,
    scratch: int,
) -> None:
    """Leave each part's sums, highest scores and sums of weights in o, m and l; parts are of `block` positions, or equal."""
    (tokens, heads, width), wide = q.shape, as_float(q)
    room = padded(width)
    work = space + tokens * heads * room * 4
    turn, rows = turn_for(width, pages.seed).forward, tokens * heads
    build_queries(width)(_jobs(q.numel()), wide.data_ptr(), rows, turn, float(scale), space, work, scratch)
    key_book, value_book = levels_for(pages.key_bits, width).book, levels_for(pages.value_bits, width).book
    keys = pages.key_codes.data_ptr(), pages.key_norms.data_ptr(), key_book, pages.key_bits
    values = pages.value_codes.data_ptr(), pages.value_norms.data_ptr(), value_book, pages.value_bits
    # a window of 0 leaves out even the position of the query
    reach = EVERYTHING if window is None else window - 1
    options = reach, float(softcap or 0.0), block, parts
    out = o.data_ptr(), m.data_ptr(), l.data_ptr(), slots
    build_attend(int(_fast(pages)))(
        jobs, space, heads, width, *_index(pages, starts), pages.heads, *keys, *values, *options, *out, work, scratch
    )


def _reach(window: int | None) -> int | None:
    """How far before the first new token a sequence is touched."""
    return None if window is None else max(window - 1, 0)


def _fast(pages: CodePages) -> bool:
    """Whether the fast contract is in force, and there are instructions for these codes."""
    return not is_exact() and pages.key_bits in FAST_KEY_BITS and pages.value_bits == 4 and pages.width % CHUNK == 0


def _scratch(width: int) -> int:
    nbytes = max(exact_scratch(padded(width)), fast_scratch(ROWS, width)) + scratch_nbytes(width)
    return -(-nbytes // LINE) * LINE
