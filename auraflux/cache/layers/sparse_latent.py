"""Sparse latent attention (DSA): latents, and index keys that select the positions each token attends to.

Both lie in the same pages, so a selection by one layer's index keys is valid in every layer. While the length bucket is at most
`top_k`, every position is selected and attention runs over all latents.
"""

from functools import cache

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.layers.latent import LatentLayer, QuantizedLatentLayer
from auraflux.cache.layers.quantized import NORM_NBYTES
from auraflux.cache.pages import LayerGroup
from auraflux.ops.attention.pages import LatentPages, RowPages
from auraflux.ops.attention.reference import append_keys, choose_positions
from auraflux.ops.attention.reference_token_selection import TokenSelection
from auraflux.ops.turboquant.pages import LatentCodes, RowCodes, row_words
from auraflux.ops.turboquant.reference import append_key_codes, choose_coded_positions


class IndexKeys(Layer):
    """One full-precision index key per token."""

    def __init__(self, group: LayerGroup, width: int, dtype: torch.dtype):
        self.group, self.rows = group, group.zeros(group.size, width, dtype=dtype)
        self.token_nbytes = width * dtype.itemsize

    def view(self, batch: Batch) -> RowPages:
        return RowPages(self.rows, batch.table(self.group), batch.lengths)

    def append(self, batch: Batch, k: Tensor) -> None:
        """Store the keys of the batch's new tokens, [T, D]."""
        append_keys(k, batch.view(self), batch.starts)

    def select_tokens(self, batch: Batch, q: Tensor, weights: Tensor, top_k: int) -> TokenSelection:
        """Select positions for the batch's new tokens by queries [T, H, D] and head weights [T, H]."""
        return choose_positions(q, weights, batch.view(self), batch.starts, top_k)


class QuantizedIndexKeys(Layer):
    """One quantized index key per token."""

    def __init__(self, group: LayerGroup, width: int, bits: int, seed: int):
        self.group, self.width, self.bits, self.seed = group, width, bits, seed
        self.codes = group.zeros(group.size, row_words(bits, width), dtype=torch.int32)
        self.norms = group.zeros(group.size, dtype=torch.float32)
        self.token_nbytes = 4 * row_words(bits, width) + NORM_NBYTES

    def view(self, batch: Batch) -> RowCodes:
        return RowCodes(self.codes, self.norms, batch.table(self.group), batch.lengths, self.bits, self.width, self.seed)

    def append(self, batch: Batch, k: Tensor) -> None:
        """Encode and store the keys of the batch's new tokens, [T, D]."""
        append_key_codes(k, batch.view(self), batch.starts)

    def select_tokens(self, batch: Batch, q: Tensor, weights: Tensor, top_k: int) -> TokenSelection:
        """Select positions for the batch's new tokens by queries [T, H, D] and head weights [T, H]."""
        return choose_coded_positions(q, weights, batch.view(self), batch.starts, top_k)


class SparseLatentLayer(Layer):
    """Latents and index keys of one layer; no keys where the layer uses another's selection.

    top_k  positions that a token attends to
    """

    def __init__(self, latents: LatentLayer | QuantizedLatentLayer, keys: IndexKeys | QuantizedIndexKeys | None, top_k: int):
        self.latents, self.keys, self.top_k, self.group = latents, keys, top_k, latents.group
        self.token_nbytes = latents.token_nbytes + (0 if keys is None else keys.token_nbytes)

    def view(self, batch: Batch) -> LatentPages | LatentCodes:
        return self.latents.view(batch)

    def sees_all(self, batch: Batch) -> bool:
        """Return whether no token of a step can have more than `top_k` positions before it."""
        return batch.index.length_bucket <= self.top_k

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Split projections, normalise latents, rotate queries and keys, and store; return both parts of the queries."""
        return self.latents.rope_append(batch, q, kv, heads, nope, rotation, norm, eps)

    def append_keys(self, batch: Batch, k: Tensor) -> None:
        """Store the index keys of the batch's new tokens, [T, D]."""
        assert self.keys is not None
        self.keys.append(batch, k)

    def select_tokens(self, batch: Batch, q: Tensor, weights: Tensor) -> TokenSelection:
        """Select positions for the batch's new tokens by queries [T, H, D] and head weights [T, H]."""
        assert self.keys is not None
        return self.keys.select_tokens(batch, q, weights, self.top_k)

    def attend(
        self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float, selection: TokenSelection | None,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from the batch's new tokens to the selected positions, None for all: [T, H, C], [T, H, R] -> [T, H, C]."""
        if selection is None:
            return self.latents.attend(batch, q_latent, q_rope, scale, sinks)
        starts = token_starts(len(q_latent), batch.index.device)
        return self.latents.attend_rows(*selection, starts, q_latent, q_rope, scale, sinks)


def token_starts(tokens: int, device: torch.device) -> Tensor:
    """Return `starts` of tokens that are a sequence each: 0, 1, ... `tokens`, int32."""
    return _numbers(1 << tokens.bit_length(), device)[: tokens + 1]


@cache
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)
