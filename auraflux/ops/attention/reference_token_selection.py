"""Token selection for sparse attention (DSA): small heads score every visible position, and a token attends to the best.

A selection is a table of one-position pages, so attention over it is ordinary paged attention: each token is a separate
sequence, with positions in order. Where all positions are selected, nothing differs from full attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, RowPages, check_starts, rows_of, spans


class TokenSelection(NamedTuple):
    """Positions that tokens attend to, as table and lengths of one-position pages.

    rows     [T, K]  int32, rows of the pool, counted over all pages, in the order of positions; 0 after the last
    lengths  [T]     int32, number of selected positions
    """

    rows: Tensor
    lengths: Tensor


def _check_append_keys(k: Tensor, pages: RowPages, starts: Tensor) -> None:
    check_dense(k=k, pages=pages.rows, starts=starts)
    check_shape("k", k, None, pages.rows.shape[2])
    check_dtype("k", k, *DTYPES)
    check_starts(starts, pages)


@op(check=_check_append_keys)
def append_keys(k: Tensor, pages: RowPages, starts: Tensor) -> None:
    """Write new keys, one per token, to the last positions of their sequences.

    k       [T, D]
    pages   updated in place; its lengths count the new tokens already
    starts  [B + 1]  int32
    """
    for b, start, new, first, length in spans(pages, starts, k.shape[0], 0):
        page, slot = rows_of(pages, b, first, length)
        pages.rows[page, slot] = k[start : start + new].to(pages.rows.dtype)


def check_token_selection(q: Tensor, weights: Tensor, width: int, most: int) -> None:
    """Check that queries fit keys of this width, and that at least one position is selected."""
    check_shape("q", q, None, None, width)
    check_shape("weights", weights, *q.shape[:2])
    check_dtype("q", q, *DTYPES)
    check_dtype("weights", weights, *DTYPES)
    if most < 1:
        raise InputError(f"'most' is {most}; at least one position must be selected.")


def _check_choose_positions(q: Tensor, weights: Tensor, pages: RowPages, starts: Tensor, most: int) -> None:
    check_dense(q=q, weights=weights, pages=pages.rows, starts=starts)
    check_token_selection(q, weights, pages.rows.shape[2], most)
    check_starts(starts, pages)


@op(check=_check_choose_positions)
def choose_positions(q: Tensor, weights: Tensor, pages: RowPages, starts: Tensor, most: int) -> TokenSelection:
    """Select the positions with the largest weighted sums of relu(q . k) over heads; ties go to the earlier position.

    q        [T, H, D]
    weights  [T, H]
    starts   [B + 1]  int32
    most     positions that a token attends to; all visible ones where these are fewer
    returns  rows [T, min(most, capacity of the table)] and lengths [T], see `TokenSelection`
    """
    found = empty_selection(len(q), most, pages.table, pages.pool[1])
    for b, start, new, _, length in spans(pages, starts, len(q), None):
        page, slot = rows_of(pages, b, 0, length)
        mine = slice(start, start + new)
        scores = score(q[mine].float(), weights[mine].float(), pages.rows[page, slot].float())
        found.rows[mine], found.lengths[mine] = select_tokens(scores, page * pages.pool[1] + slot, most, found.rows.shape[1])
    return found


def empty_selection(tokens: int, most: int, table: Tensor, page: int) -> TokenSelection:
    """Allocate the selection of tokens, zeroed."""
    room = min(most, table.shape[1] * page)
    return TokenSelection(
        *(torch.zeros(shape, dtype=torch.int32, device=table.device) for shape in ((tokens, room), (tokens,)))
    )


def score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the score of each position for each token: [n, H, D], [n, H], [t, D] -> [n, t]."""
    return torch.einsum("nh,nht->nt", weights, torch.einsum("nhd,td->nht", q, keys).relu())


def select_tokens(scores: Tensor, rows: Tensor, most: int, room: int) -> TokenSelection:
    """Select for the last n of t positions among those up to each: scores [n, t] and the rows [t] of positions."""
    new, length = scores.shape
    seen = torch.arange(length - new + 1, length + 1, device=rows.device)[:, None]
    positions, counts = torch.arange(length, device=rows.device), seen.clamp(max=most)
    order = scores.masked_fill(positions >= seen, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :room]
    taken = torch.arange(order.shape[1], device=rows.device) < counts
    order = torch.where(taken, order, length).sort(dim=1).values
    named = torch.where(taken, rows[order.clamp(max=length - 1)], 0)
    padded = torch.nn.functional.pad(named, (0, room - named.shape[1]))
    return TokenSelection(padded.int(), counts[:, 0].int())
