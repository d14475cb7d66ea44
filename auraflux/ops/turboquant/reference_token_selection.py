"""Token selection with quantized keys, see `attention/reference_token_selection.py`."""

from torch import Tensor

from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, check_starts
from auraflux.ops.attention.reference_token_selection import (
    TokenSelection,
    check_token_selection,
    empty_selection,
    score,
    select_tokens,
)
from auraflux.ops.turboquant.codebook import codebook
from auraflux.ops.turboquant.pages import RowCodes, unpack
from auraflux.ops.turboquant.reference_codec import encode, rotate


def _check_append_key_codes(k: Tensor, pages: RowCodes, starts: Tensor) -> None:
    check_dense(k=k, starts=starts, pages=pages.table)
    check_dtype("k", k, *DTYPES)
    check_shape("k", k, None, pages.width)
    check_starts(starts, pages)


@op(check=_check_append_key_codes)
def append_key_codes(k: Tensor, pages: RowCodes, starts: Tensor) -> None:
    """Encode the keys of new tokens, one each, and store them at the end of their sequences.

    k       [T, D]
    pages   updated in place; their lengths include the new tokens
    starts  [B + 1]  int32
    """
    batch = pages.spans(starts, k.shape[0], reach=0)
    codes, norms = encode.reference(k, pages.bits, pages.seed)
    for b, start, new, first, length in batch:
        page, slot = pages.rows_of(b, first, length)
        pages.codes[page, slot], pages.norms[page, slot] = codes[start : start + new], norms[start : start + new]


def _check_choose_coded_positions(q: Tensor, weights: Tensor, pages: RowCodes, starts: Tensor, most: int) -> None:
    check_dense(q=q, weights=weights, starts=starts, pages=pages.table)
    check_token_selection(q, weights, pages.width, most)
    check_starts(starts, pages)


@op(check=_check_choose_coded_positions)
def choose_coded_positions(q: Tensor, weights: Tensor, pages: RowCodes, starts: Tensor, most: int) -> TokenSelection:
    """Run `choose_positions` on quantized keys.

    q        [T, H, D]  not rotated
    weights  [T, H]
    starts   [B + 1]  int32
    returns  rows [T, min(most, capacity of the table)] and lengths [T], see `Chosen`
    """
    found = empty_selection(len(q), most, pages.table, pages.pool[1])
    rotated, book = rotate.reference(q.float(), pages.seed), codebook(pages.bits, pages.width, q.device)
    for b, start, new, _, length in pages.spans(starts, len(q), reach=None):
        page, slot = pages.rows_of(b, 0, length)
        mine = slice(start, start + new)
        keys = book[unpack(pages.codes[page, slot], pages.bits, pages.width)]
        scores = score(rotated[mine], weights[mine].float(), keys) * pages.norms[page, slot]
        found.rows[mine], found.lengths[mine] = select_tokens(scores, page * pages.pool[1] + slot, most, found.rows.shape[1])
    return found
