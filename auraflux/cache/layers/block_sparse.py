"""Block-sparse attention: keys and values as in other layers, and one index key per block that selects blocks.

A page holds a block, so a selection of blocks is a page table, and paged attention runs over it with each token as its own
sequence. An index key is written when its block is full; tokens always attend to the last, partial block.
"""

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.layers.compressed import CompressedEntries, CompressionWeights
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.quantized import QuantizedLayer
from auraflux.cache.layers.sparse_latent import token_starts
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.attention.reference import choose_positions
from auraflux.ops.attention.reference_token_selection import TokenSelection


class BlockSparseLayer(Layer):
    """Keys and values of one layer, and the index keys that select blocks of them.

    top_k  full blocks that a token attends to
    """

    def __init__(self, kv: DenseLayer | QuantizedLayer, keys: CompressedEntries, top_k: int):
        self.kv, self.keys, self.top_k, self.group = kv, keys, top_k, kv.group
        self.token_nbytes = kv.token_nbytes + keys.token_nbytes
        self.full_precision_nbytes = kv.full_precision_nbytes + keys.full_precision_nbytes

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of a sequence of `length` tokens."""
        return self.kv.nbytes_at(length) + self.keys.nbytes_at(length)

    def view(self, batch: Batch) -> None:
        """Do nothing: `kv` and `keys` have their own views."""

    def sees_all(self, batch: Batch) -> bool:
        """Return whether no token of a step can have more than `top_k` blocks before it."""
        return batch.index.length_bucket // self.keys.ratio <= self.top_k

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and rotate queries and keys, then store keys and values; return the queries [T, Hq, D]."""
        return self.kv.rope_append(batch, q, k, v, rotation, norms, eps)

    def append_keys(self, batch: Batch, k: Tensor, weights: CompressionWeights) -> None:
        """Store the keys [T, D] of new tokens, and write the index keys, their means, of the blocks they fill."""
        # equal gates: the softmax over a block is its mean
        self.keys.append(batch, torch.cat((k, torch.zeros_like(k)), 1), weights)

    def select_blocks(self, batch: Batch, q: Tensor) -> TokenSelection:
        """Select blocks for the batch's new tokens by index queries [T, H, D]; return pages and visible positions."""
        size, table = self.keys.ratio, batch.table(self.group)
        if not batch.single:
            table = table[torch.repeat_interleave(torch.tensor(batch.counts, device=table.device), output_size=len(q))]
        after = batch.positions + 1
        full = after // size
        weights = torch.ones(q.shape[:2], dtype=q.dtype, device=q.device)
        found = choose_positions(
            q, weights, RowPages(self.keys.entries, table, full.clamp(min=1)), token_starts(len(q), q.device), self.top_k
        )
        # a token without a full block was given one that it must not attend to
        count, rest = found.lengths.minimum(full), after % size
        last = table.gather(1, (batch.positions // size).long()[:, None])
        pages = torch.nn.functional.pad(found.rows, (0, 1)).scatter(1, count.long()[:, None], last)
        return TokenSelection(pages, count * size + rest)

    def attend(self, batch: Batch, q: Tensor, scale: float, selection: TokenSelection | None) -> Tensor:
        """Attend from the batch's new tokens to the selected blocks, None for all: [T, Hq, D] -> [T, Hq, D]."""
        if selection is None:
            return self.kv.attend(batch, q, scale)
        return self.kv.attend_pages(*selection, token_starts(len(q), q.device), q, scale)
