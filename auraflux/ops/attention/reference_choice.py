"""Sparse attention: small heads score every position a token sees, and the token attends to the best of them.

What is chosen is an index of pages that hold one position each, so attention over it is attention as everywhere else: each
token is a sequence of its own, and positions lie in their order. Where all are chosen, nothing differs from full attention.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, RowPages, check_starts, rows_of, spans


class Chosen(NamedTuple):
    """The positions that tokens attend to, a table and lengths as pages of one position have them.

    rows     [T, K]  int32, rows of the pool, counted over all pages, in the order of positions; after the last of them 0
    lengths  [T]     int32, how many there are
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
    """Write new keys, one of each token, to the last positions of their sequences.

    k       [T, D]
    pages   updated in place; its lengths count the new tokens already
    starts  [B + 1]  int32
    """
    for b, start, new, first, length in spans(pages, starts, k.shape[0], 0):
        page, slot = rows_of(pages, b, first, length)
        pages.rows[page, slot] = k[start : start + new].to(pages.rows.dtype)


def check_choice(q: Tensor, weights: Tensor, width: int, most: int) -> None:
    """Refuse queries that do not fit keys of such a width, and a choice of nothing."""
    check_shape("q", q, None, None, width)
    check_shape("weights", weights, *q.shape[:2])
    check_dtype("q", q, *DTYPES)
    check_dtype("weights", weights, *DTYPES)
    if most < 1:
        raise InputError(f"'most' is {most}; at least one position must be chosen.")


def _check_choose_positions(q: Tensor, weights: Tensor, pages: RowPages, starts: Tensor, most: int) -> None:
    check_dense(q=q, weights=weights, pages=pages.rows, starts=starts)
    check_choice(q, weights, pages.rows.shape[2], most)
    check_starts(starts, pages)


@op(check=_check_choose_positions)
def choose_positions(q: Tensor, weights: Tensor, pages: RowPages, starts: Tensor, most: int) -> Chosen:
    """Choose the positions with the largest weighted sums of what is positive of the heads' products; of equals the earlier.

    q        [T, H, D]
    weights  [T, H]
    starts   [B + 1]  int32
    most     positions that a token attends to; it gets all that it sees where these are fewer
    returns  rows [T, min(most, what the table has room for)] and lengths [T], see `Chosen`
    """
    found = nothing_chosen(len(q), most, pages.table, pages.pool[1])
    for b, start, new, _, length in spans(pages, starts, len(q), None):
        page, slot = rows_of(pages, b, 0, length)
        mine = slice(start, start + new)
        scores = score(q[mine].float(), weights[mine].float(), pages.rows[page, slot].float())
        found.rows[mine], found.lengths[mine] = choice(scores, page * pages.pool[1] + slot, most, found.rows.shape[1])
    return found


def nothing_chosen(tokens: int, most: int, table: Tensor, page: int) -> Chosen:
    """Room for the choices of tokens, filled with zeros."""
    room = min(most, table.shape[1] * page)
    return Chosen(*(torch.zeros(shape, dtype=torch.int32, device=table.device) for shape in ((tokens, room), (tokens,))))


def score(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """The score of each position for each token: [n, H, D], [n, H], [t, D] -> [n, t]."""
    return torch.einsum("nh,nht->nt", weights, torch.einsum("nhd,td->nht", q, keys).relu())


def choice(scores: Tensor, rows: Tensor, most: int, room: int) -> Chosen:
    """Choose for the last n of t positions among those up to each: scores [n, t] and the rows [t] of positions."""
    new, length = scores.shape
    seen = torch.arange(length - new + 1, length + 1, device=rows.device)[:, None]
    positions, counts = torch.arange(length, device=rows.device), seen.clamp(max=most)
    order = scores.masked_fill(positions >= seen, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :room]
    taken = torch.arange(order.shape[1], device=rows.device) < counts
    order = torch.where(taken, order, length).sort(dim=1).values
    named = torch.where(taken, rows[order.clamp(max=length - 1)], 0)
    padded = torch.nn.functional.pad(named, (0, room - named.shape[1]))
    return Chosen(padded.int(), counts[:, 0].int())
