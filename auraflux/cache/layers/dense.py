"""Keys and values in full precision."""

import torch
from torch import Tensor

from auraflux.cache.batch import AttentionLayer, Batch
from auraflux.cache.pages import LayerGroup
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import append_kv, attention


class DenseLayer(AttentionLayer):
    """The full-precision keys and values of one layer."""

    def __init__(self, group: LayerGroup, heads: int, width: int, value_width: int, dtype: torch.dtype):
        self.group = group
        self.k = group.zeros(heads, group.size, width, dtype=dtype)
        self.v = group.zeros(heads, group.size, value_width, dtype=dtype)
        self.token_nbytes = heads * (width + value_width) * dtype.itemsize

    def drop_sinks(self) -> None:
        """Do nothing: no tokens are stored twice."""

    def view(self, batch: Batch) -> KVPages:
        return KVPages(self.k, self.v, batch.table(self.group), batch.lengths)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the batch's new tokens.

        k  [T, Hkv, D]
        v  [T, Hkv, Dv]
        """
        append_kv(k, v, batch.view(self), batch.starts)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, Dv]."""
        options = self.group.span, sinks, softcap, batch.ends(self.group)
        return attention(q, batch.view(self), batch.starts, scale, *options)

    def attend_pages(self, table: Tensor, lengths: Tensor, starts: Tensor, q: Tensor, scale: float) -> Tensor:
        """Attend from each token, as its own sequence, to the first `lengths` positions of its pages [T, M]."""
        return attention(q, KVPages(self.k, self.v, table, lengths), starts, scale)
