"""Bidirectional attention, of models that embed a prompt: each token attends to earlier and to later ones.

Nothing is stored. A step holds all tokens of its sequences, so keys and values live from `append` to `attend` only.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from auraflux.cache.batch import AttentionLayer, Batch
from auraflux.errors import InputError

BLOCK = 256  # least queries that share the keys of their windows


class BidirectionalLayer(AttentionLayer):
    """Attention among the tokens of each sequence of one step.

    window  a token attends to tokens less than this many positions away; None for all
    """

    group: Any = None
    token_nbytes = 0

    def __init__(self, window: int | None):
        self.window = window
        self._kv: tuple[Tensor, Tensor] | None = None

    def nbytes_at(self, length: int) -> int:
        return 0

    def view(self, batch: Batch) -> None:
        """Do nothing: no op of the cache reads this layer."""

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Take the keys and values of the step: [T, Hkv, D] and [T, Hkv, Dv]."""
        if any(sequence.length > new for sequence, new in zip(batch.sequences, batch.counts, strict=True)):
            raise InputError("bidirectional attention needs all tokens of a sequence in one step.")
        self._kv = k, v

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from each token to those of its sequence: [T, Hq, D] -> [T, Hq, Dv]."""
        assert self._kv is not None, "keys and values come first"
        assert sinks is None, "no bidirectional model has attention sinks"
        assert softcap is None, "no bidirectional model caps its scores"
        (k, v), self._kv = self._kv, None
        parts = zip(q.split(batch.counts), k.split(batch.counts), v.split(batch.counts), strict=True)
        return torch.cat([attend_both_ways(*part, scale, self.window) for part in parts])


def attend_both_ways(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Attend from the tokens of one sequence to earlier and later ones, see `BidirectionalLayer`.

    q        [T, Hq, D]
    k        [T, Hkv, D]
    v        [T, Hkv, Dv]
    returns  [T, Hq, Dv]
    """
    shared = q.shape[1] // k.shape[1]
    # not every backend of torch's function knows grouped heads
    queries, keys, values = q.transpose(0, 1), *(x.transpose(0, 1).repeat_interleave(shared, 0) for x in (k, v))
    if window is None or window >= len(q):
        return _attend(queries, keys, values, scale).transpose(0, 1)
    found, at, block = [], torch.arange(len(q), device=q.device), max(window, BLOCK)
    for first in range(0, len(q), block):
        rows = slice(first, first + block)
        seen = slice(max(0, first - window + 1), first + block + window - 1)
        near = (at[rows, None] - at[seen]).abs() < window
        found.append(_attend(queries[:, rows], keys[:, seen], values[:, seen], scale, near))
    return torch.cat(found, 1).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Return the attention output of all heads: [H, T, D] -> [H, T, Dv]."""
    return scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask, scale=scale)[0]
