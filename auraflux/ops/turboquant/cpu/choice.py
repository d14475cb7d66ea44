"""Choosing positions by coded keys: a key is looked up where a plain one is read, see `attention/cpu/choice.py`."""

from typing import Any, cast

from torch import Tensor

from auraflux.ops.attention.cpu.choice import BLOCK, choose, row_of, score_key, transpose_queries
from auraflux.ops.attention.cpu.page_index import index_of, place_of
from auraflux.ops.attention.reference_choice import Chosen
from auraflux.ops.simd.jit import Kernel, arguments, as_float, floats
from auraflux.ops.turboquant.cpu.codec import unpack_row
from auraflux.ops.turboquant.cpu.codec_kernels import levels_for
from auraflux.ops.turboquant.pages import RowCodes


@Kernel
def _score_codes(args, job, jobs):
    (
        q, weights, heads, width, codes, norms_at, book, bits,
        page, table, table_width, lengths, starts, sequences,
        first, count, capacity, out, space, scratch,
    ) = arguments(args, 20)  # fmt: skip
    turned = space + job * scratch
    sums, key = turned + 4 * heads * width, turned + 4 * heads * (width + 1)
    blocks, laid, words = (capacity + BLOCK - 1) // BLOCK, -1, (width * bits + 31) // 32
    for item in range(job, count * blocks, jobs):
        token, begin = first + item // blocks, item % blocks * BLOCK
        b, own = place_of(token, lengths, starts, sequences)
        if begin > own:
            continue
        if token != laid:
            transpose_queries(q + 4 * token * heads * width, heads, width, turned)
            laid = token
        scores = floats(out + 4 * (token - first) * capacity, capacity)
        for position in range(begin, min(begin + BLOCK, own + 1)):
            row = row_of(table + 4 * b * table_width, page, position)
            unpack_row(bits, codes + 4 * row * words, width, book, key)
            # a norm is not negative, so it may wait for the sum over heads
            found = score_key(key, turned, weights + 4 * token * heads, heads, width, sums)
            scores[position] = found * floats(norms_at + 4 * row, 1)[0]


def choose_codes(rotated: Tensor, weights: Tensor, pages: RowCodes, starts: Tensor, most: int) -> Chosen:
    """Choose with rotated queries in float32."""
    shares, any_kind = as_float(weights), cast(Any, pages)
    asked = rotated.data_ptr(), shares.data_ptr(), *rotated.shape[1:]
    stored = pages.codes.data_ptr(), pages.norms.data_ptr(), levels_for(pages.bits, pages.width, None).book, pages.bits
    place = index_of(pages, starts)
    return choose(rotated, any_kind, starts, most, lambda jobs, *piece: _score_codes(jobs, *asked, *stored, *place, *piece))
