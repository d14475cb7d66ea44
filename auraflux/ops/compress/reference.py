"""Windows of tokens compressed to one key each, for attention beyond the uncompressed window.

Every `rate` tokens a window closes. Each channel of its entry is a weighted mean of that channel over the window's tokens, the
weights a softmax of gates. Entries may also cover the previous window: tokens then have two rows, one for each window.
"""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.attention.pages import DTYPES, RowPages, check_pages, check_starts, rows_of, spans
from auraflux.ops.attention.reference_token_selection import append_keys
from auraflux.ops.norm.reference import rms_norm
from auraflux.ops.rope.reference import rope


def _check_compress(
    x: Tensor, rows: RowPages, starts: Tensor, entries: RowPages, bias: Tensor, norm: Tensor, eps: float, inv_freq: Tensor,
    interleaved: bool = True,
) -> None:  # fmt: skip
    check_dense(x=x, rows=rows.rows, starts=starts, entries=entries.rows, bias=bias, norm=norm, inv_freq=inv_freq)
    check_starts(starts, rows)
    check_shape("table", entries.table, rows.table.shape[0], None)
    width = entries.rows.shape[2]
    check_shape("bias", bias, None, None)
    check_shape("norm", norm, width)
    check_shape("inv_freq", inv_freq, None)
    if 2 * inv_freq.shape[0] > width:
        raise InputError(f"'inv_freq' rotates {2 * inv_freq.shape[0]} channels; an entry has {width}.")
    for name, tensor in (("bias", bias), ("norm", norm), ("inv_freq", inv_freq)):
        check_dtype(name, tensor, torch.float32)
    if bias.shape[0] < 1 or bias.shape[1] not in (width, 2 * width):
        raise InputError(f"'bias' has shape {list(bias.shape)}; [rate, {width}] or [rate, {2 * width}] is needed.")
    check_shape("rows", rows.rows, None, None, 2 * bias.shape[1])
    check_shape("x", x, None, 2 * bias.shape[1])
    check_dtype("x", x, *DTYPES)


@op(check=_check_compress)
def compress_windows(
    x: Tensor, rows: RowPages, starts: Tensor, entries: RowPages, bias: Tensor, norm: Tensor, eps: float, inv_freq: Tensor,
    interleaved: bool = True,
) -> None:  # fmt: skip
    """Store the values and gates of new tokens, and compute the entries of all windows that they close.

    x            [T, 2 W]   values and gates of new tokens; W is an entry's width D, or 2 D, the first half for the next window
    rows         pages of the same, updated in place; their lengths count the new tokens already
    starts       [B + 1]    int32
    entries      pages of entries, D wide, updated in place; their lengths are ignored
    bias         [rate, W]  float32, added to the gates of a window's tokens
    norm         [D]        float32, the weight of the entries' RMS norm
    inv_freq     [R/2]      float32; an entry is rotated by the position of its window's first token
    interleaved  see `rope`
    """
    rate, wide = bias.shape
    width = entries.rows.shape[2]
    append_keys.reference(x, rows, starts)
    for b, _, new, _, length in spans(rows, starts, len(x), 0):
        first, last = (length - new) // rate, length // rate
        if first == last:
            continue
        before = min(first, wide // width - 1)
        page, slot = rows_of(rows, b, (first - before) * rate, last * rate)
        values, gates = rows.rows[page, slot].float().unflatten(0, (-1, rate)).split(wide, -1)
        made = _mean(values, gates + bias, width, before)
        numbers = torch.arange(first, last, device=bias.device)
        heads = rms_norm.reference(made, norm, eps)[:, None]
        turned = rope.reference(heads, inv_freq, numbers * rate, 1.0, interleaved)[:, 0]
        room = entries.pool[1]
        check_pages(entries, b, first, last)
        entries.rows[entries.table[b, numbers // room].long(), numbers % room] = turned.to(entries.rows.dtype)


def _mean(values: Tensor, gates: Tensor, width: int, before: int) -> Tensor:
    """Average windows, and the previous ones where tokens have two rows: [n, rate, W] -> [n - before, D].

    before  the first window only serves as the previous one of the second
    """
    if values.shape[2] > width:
        # the first window of a sequence has no previous one
        early = [torch.nn.functional.pad(part[..., :width], (0, 0, 0, 0, 1, 0), value=fill)[:-1]
                 for part, fill in ((values, 0.0), (gates, -torch.inf))]  # fmt: skip
        values, gates = (
            torch.cat((first, part[..., width:]), 1)[before:] for first, part in zip(early, (values, gates), strict=True)
        )
    return (values * gates.softmax(1)).sum(1)
