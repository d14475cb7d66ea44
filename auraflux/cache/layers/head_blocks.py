"""Block-sparse attention with a selection of blocks for each group of KV heads.

A page holds a block, so a selection of blocks is a page table. A token's index queries, one for each group, score all index
keys; the score of a block is its best token's. The groups have their own stores in the same pages, since each reads
other pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.quantized import QuantizedLayer
from auraflux.cache.layers.sparse_latent import IndexKeys, token_starts
from auraflux.ops.attention.pages import RowPages, rows_of, spans
from auraflux.ops.attention.reference_token_selection import TokenSelection

TOGETHER = 32  # tokens whose scores are computed at a time


class HeadBlocksLayer(Layer):
    """Keys and values of groups of KV heads, and the index keys that select blocks of them.

    top_k  blocks that a token attends to
    local  of which are the last ones, the token's own included
    """

    def __init__(self, kv: Sequence[DenseLayer | QuantizedLayer], keys: IndexKeys, top_k: int, local: int):
        self.kv, self.keys, self.top_k, self.local, self.group = kv, keys, top_k, local, keys.group
        self.token_nbytes = keys.token_nbytes + sum(each.token_nbytes for each in kv)

    def view(self, batch: Batch) -> None:
        """Do nothing: `kv` and `keys` have their own views."""

    def sees_all(self, batch: Batch) -> bool:
        """Return whether no token of a step can have more than `top_k` blocks."""
        return batch.index.length_bucket <= self.top_k * self.group.size

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and rotate queries and keys, then store keys and values; return the queries [T, Hq, D]."""
        parts = zip(self.kv, *(self._groups(each) for each in (q, k, v)), strict=True)
        return torch.cat([layer.rope_append(batch, *part, rotation, norms, eps) for layer, *part in parts], 1)

    def append_keys(self, batch: Batch, k: Tensor) -> None:
        """Store the index keys of the batch's new tokens, [T, D]."""
        self.keys.append(batch, k)

    def select_blocks(self, batch: Batch, q: Tensor) -> list[TokenSelection]:
        """Select blocks for each group by index queries [T, G, D]; return pages and visible positions."""
        return choose_blocks(q, batch.view(self.keys), batch.starts, self.top_k, self.local)

    def attend(self, batch: Batch, q: Tensor, scale: float, selections: Sequence[TokenSelection] | None) -> Tensor:
        """Attend from the batch's new tokens to the blocks of each group, None for all: [T, Hq, D] -> [T, Hq, D]."""
        queries = self._groups(q)
        if selections is None:
            return torch.cat([layer.attend(batch, part, scale) for layer, part in zip(self.kv, queries, strict=True)], 1)
        starts = token_starts(len(q), q.device)
        parts = zip(self.kv, selections, queries, strict=True)
        return torch.cat([layer.attend_pages(*chosen, starts, part, scale) for layer, chosen, part in parts], 1)

    def _groups(self, x: Tensor) -> list[Tensor]:
        """Split heads into groups: [T, H, D] -> [T, H/G, D] each."""
        return [each.contiguous() for each in x.chunk(len(self.kv), 1)]


def choose_blocks(q: Tensor, pages: RowPages, starts: Tensor, most: int, local: int) -> list[TokenSelection]:
    """Select, for each head of q [T, H, D], the blocks with the best tokens by q . k, and the last `local` ones.

    returns  pages [T, min(most, M)] in the order of positions and positions [T] visible in them, of each head
    """
    (tokens, heads), room = q.shape[:2], min(most, pages.table.shape[1])
    rows = torch.zeros(heads, tokens, room, dtype=torch.int32, device=q.device)
    lengths = torch.zeros(heads, tokens, dtype=torch.int32, device=q.device)
    for b, start, new, _, length in spans(pages, starts, tokens, None):
        page, slot = rows_of(pages, b, 0, length)
        keys, positions = pages.rows[page, slot].float(), torch.arange(length - new, length, device=q.device)
        for some in positions.split(TOGETHER):
            first = start + int(some[0]) - (length - new)
            mine = slice(first, first + len(some))
            scores = _block_scores(q[mine].float(), keys, some, pages.pool[1], local)
            found, lengths[:, mine] = _best(scores, some, pages.pool[1], room)
            rows[:, mine] = torch.where(found < 0, 0, pages.table[b][found])
    return [TokenSelection(*each) for each in zip(rows, lengths, strict=True)]


def _block_scores(q: Tensor, keys: Tensor, positions: Tensor, size: int, local: int) -> Tensor:
    """Return the best score of each block's visible tokens, infinite for local blocks: [n, H, D], [t, D] -> [H, n, blocks]."""
    blocks = -(-len(keys) // size)
    scores = torch.einsum("nhd,td->hnt", q, keys)
    scores.masked_fill_(torch.arange(len(keys), device=q.device) > positions[:, None], -torch.inf)
    scores = pad(scores, (0, blocks * size - len(keys)), value=-torch.inf).unflatten(-1, (blocks, size)).amax(-1)
    block, own = torch.arange(blocks, device=q.device), positions[:, None] // size
    return scores.masked_fill((block <= own) & (block > own - local), torch.inf)


def _best(scores: Tensor, positions: Tensor, size: int, room: int) -> tuple[Tensor, Tensor]:
    """Return the best blocks of each token in order, -1 after the last, [H, n, room], and the positions visible in them."""
    blocks = scores.shape[-1]
    values, order = scores.sort(dim=-1, descending=True, stable=True)
    taken = values[..., :room] > -torch.inf
    order = torch.where(taken, order[..., :room], blocks).sort(-1).values
    count = taken.sum(-1)
    last = order.gather(-1, (count - 1).clamp(min=0)[..., None])[..., 0]
    # a token's own block ends with the token
    missing = torch.where(last == positions // size, size - 1 - positions % size, 0)
    order = pad(torch.where(order < blocks, order, -1), (0, room - order.shape[-1]), value=-1)
    return order, (count * size - missing).int()
