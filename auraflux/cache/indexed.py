"""Attention to blocks of positions that each token chooses: keys and values as everywhere, and one index key for every block.

A page holds a block. So what is chosen is a page table, and attention over it is the attention there is, each token being a
sequence of its own. An index key is written when its block is full; positions of the block that is not are always attended to.
"""

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.compressed import Entries, Learned
from auraflux.cache.dense import DenseLayer
from auraflux.cache.sparse import counting
from auraflux.cache.turboquant import CodedLayer
from auraflux.ops.attention.pages import RowPages
from auraflux.ops.attention.reference import choose_positions
from auraflux.ops.attention.reference_choice import Chosen


class IndexedLayer(Layer):
    """Keys and values of one layer, and the keys by which tokens choose blocks of them.

    most  blocks that a token attends to, beside the one that is not full
    """

    def __init__(self, kv: DenseLayer | CodedLayer, keys: Entries, most: int):
        self.kv, self.keys, self.most, self.group = kv, keys, most, kv.group
        self.token_nbytes = kv.token_nbytes + keys.token_nbytes
        self.plain_nbytes = kv.plain_nbytes + keys.plain_nbytes

    def nbytes_at(self, length: int) -> int:
        """Bytes of a sequence of so many tokens."""
        return self.kv.nbytes_at(length) + self.keys.nbytes_at(length)

    def view(self, batch: Batch) -> None:
        """Nothing: its parts have views of their own."""

    def sees_all(self, batch: Batch) -> bool:
        """Whether no token of a step can have more blocks before it than it may choose."""
        return batch.index.reach // self.keys.rate <= self.most

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and rotate queries and keys, then store keys and values: gives the queries [T, Hq, D]."""
        return self.kv.rope_append(batch, q, k, v, rotation, norms, eps)

    def append_keys(self, batch: Batch, k: Tensor, learned: Learned) -> None:
        """Store what index keys are the means of, [T, D] of the batch's new tokens, and write those whose blocks are full."""
        # gates that are all alike
        self.keys.append(batch, torch.cat((k, torch.zeros_like(k)), 1), learned)

    def choose(self, batch: Batch, q: Tensor) -> Chosen:
        """Choose blocks for the batch's new tokens by index queries [T, H, D]: pages, and how many positions are seen."""
        rate, table = self.keys.rate, batch.table(self.group)
        if not batch.single:
            table = table[torch.repeat_interleave(torch.tensor(batch.counts, device=table.device), output_size=len(q))]
        after = batch.positions + 1
        full = after // rate
        weights = torch.ones(q.shape[:2], dtype=q.dtype, device=q.device)
        found = choose_positions(
            q, weights, RowPages(self.keys.entries, table, full.clamp(min=1)), counting(len(q), q.device), self.most
        )
        # a token whose first block is not full has been given one that it does not see
        count, rest = found.lengths.minimum(full), after % rate
        last = table.gather(1, (batch.positions // rate).long()[:, None])
        pages = torch.nn.functional.pad(found.rows, (0, 1)).scatter(1, count.long()[:, None], last)
        return Chosen(pages, count * rate + rest)

    def attend(self, batch: Batch, q: Tensor, scale: float, chosen: Chosen | None) -> Tensor:
        """Attend from the batch's new tokens to what was chosen, None for everything: [T, Hq, D] -> [T, Hq, D]."""
        if chosen is None:
            return self.kv.attend(batch, q, scale)
        return self.kv.attend_pages(*chosen, counting(len(q), q.device), q, scale)
