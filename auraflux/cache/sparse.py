"""Sparse latent attention: latents, and beside them the keys by which each token chooses the positions that it attends to.

Both lie in the same pages, so what is chosen by one layer's keys is found in every layer. While an index reaches no further
than a token may choose, every position is chosen, and attention is that over all latents.
"""

from functools import cache

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.latent import CodedLatentLayer, LatentLayer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.turboquant import NORM_NBYTES
from auraflux.ops.attention.pages import LatentPages, RowPages
from auraflux.ops.attention.reference import append_keys, choose_positions
from auraflux.ops.attention.reference_choice import Chosen
from auraflux.ops.turboquant.pages import LatentCodes, RowCodes, row_words
from auraflux.ops.turboquant.reference import append_key_codes, choose_coded_positions


class IndexKeys(Layer):
    """One uncompressed key of each token."""

    def __init__(self, group: LayerGroup, width: int, dtype: torch.dtype):
        self.group, self.rows = group, group.zeros(group.size, width, dtype=dtype)
        self.token_nbytes = width * dtype.itemsize

    def view(self, batch: Batch) -> RowPages:
        return RowPages(self.rows, batch.table(self.group), batch.lengths)

    def append(self, batch: Batch, k: Tensor) -> None:
        """Store the keys of the batch's new tokens, [T, D]."""
        append_keys(k, batch.view(self), batch.starts)

    def choose(self, batch: Batch, q: Tensor, weights: Tensor, most: int) -> Chosen:
        """Choose positions for the batch's new tokens, by queries [T, H, D] and heads' weights [T, H]."""
        return choose_positions(q, weights, batch.view(self), batch.starts, most)


class CodedIndexKeys(Layer):
    """One key of each token, as codes."""

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

    def choose(self, batch: Batch, q: Tensor, weights: Tensor, most: int) -> Chosen:
        """Choose positions for the batch's new tokens, by queries [T, H, D] and heads' weights [T, H]."""
        return choose_coded_positions(q, weights, batch.view(self), batch.starts, most)


class SparseLatentLayer(Layer):
    """Latents and index keys of one layer; no keys where the layer goes by another's choice.

    most  positions that a token attends to
    """

    def __init__(self, latents: LatentLayer | CodedLatentLayer, keys: IndexKeys | CodedIndexKeys | None, most: int):
        self.latents, self.keys, self.most, self.group = latents, keys, most, latents.group
        self.token_nbytes = latents.token_nbytes + (0 if keys is None else keys.token_nbytes)

    def view(self, batch: Batch) -> LatentPages | LatentCodes:
        return self.latents.view(batch)

    def sees_all(self, batch: Batch) -> bool:
        """Whether no token of a step can have more positions before it than it may choose."""
        return batch.index.reach <= self.most

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Take projections apart, normalise latents, rotate queries and keys, and store: gives both parts of the queries."""
        return self.latents.rope_append(batch, q, kv, heads, nope, rotation, norm, eps)

    def append_keys(self, batch: Batch, k: Tensor) -> None:
        """Store the index keys of the batch's new tokens, [T, D]."""
        assert self.keys is not None
        self.keys.append(batch, k)

    def choose(self, batch: Batch, q: Tensor, weights: Tensor) -> Chosen:
        """Choose positions for the batch's new tokens, by queries [T, H, D] and heads' weights [T, H]."""
        assert self.keys is not None
        return self.keys.choose(batch, q, weights, self.most)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float, chosen: Chosen | None) -> Tensor:
        """Attend from the batch's new tokens to what was chosen, None for everything: [T, H, C], [T, H, R] -> [T, H, C]."""
        if chosen is None:
            return self.latents.attend(batch, q_latent, q_rope, scale)
        return self.latents.attend_rows(*chosen, counting(len(q_latent), batch.index.device), q_latent, q_rope, scale)


def counting(tokens: int, device: torch.device) -> Tensor:
    """0, 1, ... up to so many, int32."""
    return _numbers(1 << tokens.bit_length(), device)[: tokens + 1]


@cache
def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int32, device=device)
