"""What multi-head latent attention keeps of a token: one vector for all heads, plain or as codes, and one rotated key."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache.batch import Batch
from auraflux.cache.pages import LayerGroup
from auraflux.cache.turboquant import NORM_NBYTES
from auraflux.ops.attention.pages import LatentPages, rows_of, spans
from auraflux.ops.attention.reference import append_latent, latent_attention
from auraflux.ops.turboquant.pages import row_words
from auraflux.ops.turboquant.reference import decode, encode


class LatentLayer:
    """The uncompressed latents and rotated keys of one layer."""

    def __init__(self, group: LayerGroup, width: int, rope: int, dtype: torch.dtype):
        self.group = group
        self.latent = group.zeros(group.size, width, dtype=dtype)
        self.rope = group.zeros(group.size, rope, dtype=dtype)
        self.token_nbytes = (width + rope) * dtype.itemsize

    def view(self, batch: Batch) -> LatentPages:
        return LatentPages(self.latent, self.rope, batch.table(self.group), batch.lengths)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        """Store the latents [T, C] and rotated keys [T, R] of the batch's new tokens."""
        append_latent(latent, k_rope, batch.view(self), batch.starts)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
        """Attend from the batch's new tokens: [T, H, C], [T, H, R] -> [T, H, C]."""
        return latent_attention(q_latent, q_rope, batch.view(self), batch.starts, scale)


@dataclass(frozen=True)
class LatentCodes:
    """Pages of coded latents.

    codes    [P, page, words]  int32
    norms    [P, page]         float32
    rope     [P, page, R]
    table    [B, M]            int32
    lengths  [B]               int32
    """

    codes: Tensor
    norms: Tensor
    rope: Tensor
    table: Tensor
    lengths: Tensor

    @property
    def pool(self) -> tuple[int, int]:
        return self.rope.shape[0], self.rope.shape[1]


class CodedLatentLayer:
    """Latents as codes; the rotated keys stay as they are."""

    def __init__(self, group: LayerGroup, width: int, rope: int, bits: int, seed: int, dtype: torch.dtype):
        self.group, self.width, self.bits, self.seed = group, width, bits, seed
        self.codes = group.zeros(group.size, row_words(bits, width), dtype=torch.int32)
        self.norms = group.zeros(group.size, dtype=torch.float32)
        self.rope = group.zeros(group.size, rope, dtype=dtype)
        self.token_nbytes = 4 * row_words(bits, width) + NORM_NBYTES + rope * dtype.itemsize

    def view(self, batch: Batch) -> LatentCodes:
        return LatentCodes(self.codes, self.norms, self.rope, batch.table(self.group), batch.lengths)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        """Encode and store the latents [T, C], store the rotated keys [T, R] of the batch's new tokens."""
        pages: Any = batch.view(self)
        codes, norms = encode(latent, self.bits, self.seed)
        for b, start, new, first, length in spans(pages, batch.starts, len(latent), 0):
            page, slot = rows_of(pages, b, first, length)
            mine = slice(start, start + new)
            self.codes[page, slot], self.norms[page, slot] = codes[mine], norms[mine]
            self.rope[page, slot] = k_rope[mine].to(self.rope.dtype)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
        """Attend from the batch's new tokens: [T, H, C], [T, H, R] -> [T, H, C]."""
        return latent_attention(q_latent, q_rope, self.decoded(batch), batch.starts, scale)

    def decoded(self, batch: Batch) -> LatentPages:
        """Decode all pages of the batch's sequences into new ones: no op attends to coded latents themselves."""
        held = [batch.pages_of(b, self.group) for b in range(len(batch.sequences))]
        pages = torch.tensor([page for row in held for page in row], dtype=torch.int64, device=self.rope.device)
        latent = decode(self.codes[pages], self.norms[pages], self.bits, self.width, self.seed)
        table = torch.zeros_like(batch.table(self.group))
        start = 0
        for b, row in enumerate(held):
            table[b, : len(row)] = torch.arange(start, start + len(row), device=table.device)
            start += len(row)
        return LatentPages(latent, self.rope[pages].float(), table, batch.lengths)
