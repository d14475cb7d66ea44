"""What multi-head latent attention keeps of a token: one vector for all heads, plain or as codes, and one rotated key.

Beside codes, the latents of the first and the newest positions are kept as they are, as keys and values of other layers are.
They are coded whole: without their mean over random tokens, and scales, a trained model is farther off (docs/quality.md).
"""

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.pages import LayerGroup
from auraflux.cache.settings import FURTHEST
from auraflux.cache.turboquant import NORM_NBYTES
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.attention.reference import append_latent, latent_attention, rope_append_latent
from auraflux.ops.turboquant.pages import LatentCodes, row_words
from auraflux.ops.turboquant.plain import PlainLatents, RowPages
from auraflux.ops.turboquant.reference import append_latent_codes, rope_append_latent_codes, turboquant_latent_attention


class LatentLayer(Layer):
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

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Take projections apart, normalise latents, rotate queries and keys, and store: gives both parts of the queries."""
        rotating = rotation.frequencies, batch.positions, rotation.mscale, rotation.interleaved
        return rope_append_latent(q, kv, heads, nope, batch.view(self), batch.starts, norm, eps, *rotating)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
        """Attend from the batch's new tokens: [T, H, C], [T, H, R] -> [T, H, C]."""
        return latent_attention(q_latent, q_rope, batch.view(self), batch.starts, scale)

    def attend_rows(
        self, rows: Tensor, lengths: Tensor, starts: Tensor, q_latent: Tensor, q_rope: Tensor, scale: float
    ) -> Tensor:
        """Attend from tokens that are a sequence each to rows of the pool, [T, K], of which each token has so many."""
        latent, rope = (store.view(-1, 1, store.shape[-1]) for store in (self.latent, self.rope))
        return latent_attention(q_latent, q_rope, LatentPages(latent, rope, rows, lengths), starts, scale)


class LatentRows(Layer):
    """Latents alone, beside a layer's codes; that layer's ops read and write them."""

    def __init__(self, group: LayerGroup, width: int, dtype: torch.dtype):
        self.group, self.rows = group, group.zeros(group.size, width, dtype=dtype)
        self.token_nbytes = width * dtype.itemsize

    def view(self, batch: Batch) -> RowPages:
        return RowPages(self.rows, batch.table(self.group), batch.lengths)


class CodedLatentLayer(Layer):
    """Latents as codes; the rotated keys stay as they are.

    head    latents of the first positions as they are; None for none
    recent  those of the newest ones, whose group's span is how near they are; None for none
    """

    def __init__(
        self,
        group: LayerGroup,
        width: int,
        rope: int,
        bits: int,
        seed: int,
        dtype: torch.dtype,
        head: LatentRows | None = None,
        recent: LatentRows | None = None,
    ):
        self.group, self.width, self.bits, self.seed = group, width, bits, seed
        self.head, self.recent = head, recent
        self.codes = group.zeros(group.size, row_words(bits, width), dtype=torch.int32)
        self.norms = group.zeros(group.size, dtype=torch.float32)
        self.rope = group.zeros(group.size, rope, dtype=dtype)
        self.token_nbytes = 4 * row_words(bits, width) + NORM_NBYTES + rope * dtype.itemsize
        self.plain_nbytes = self._plain_at(FURTHEST)

    def nbytes_at(self, length: int) -> int:
        """Codes and rotated keys, and what is kept as it is beside them."""
        return super().nbytes_at(length) + self._plain_at(length)

    def _plain_at(self, length: int) -> int:
        return sum(layer.nbytes_at(length) for layer in (self.head, self.recent) if layer is not None)

    def view(self, batch: Batch) -> LatentCodes:
        index = batch.table(self.group), batch.lengths
        return LatentCodes(self.codes, self.norms, self.rope, *index, self.bits, self.width, self.seed, self._plain(batch))

    def _plain(self, batch: Batch) -> PlainLatents | None:
        if self.head is None and self.recent is None:
            return None
        head, recent = (None if layer is None else layer.view(batch) for layer in (self.head, self.recent))
        return PlainLatents(head, recent, 0 if self.recent is None else self.recent.group.span or 0)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        """Encode and store the latents [T, C], store the rotated keys [T, R] of the batch's new tokens."""
        append_latent_codes(latent, k_rope, batch.view(self), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Take projections apart, normalise latents, rotate queries and keys, and store: gives both parts of the queries."""
        rotating = rotation.frequencies, batch.positions, rotation.mscale, rotation.interleaved
        return rope_append_latent_codes(q, kv, heads, nope, batch.view(self), batch.starts, norm, eps, *rotating)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float) -> Tensor:
        """Attend from the batch's new tokens: [T, H, C], [T, H, R] -> [T, H, C]."""
        return turboquant_latent_attention(q_latent, q_rope, batch.view(self), batch.starts, scale)

    def attend_rows(
        self, rows: Tensor, lengths: Tensor, starts: Tensor, q_latent: Tensor, q_rope: Tensor, scale: float
    ) -> Tensor:
        """Attend from tokens that are a sequence each to rows of the pool, [T, K], of which each token has so many."""
        codes, rope = (store.view(-1, 1, store.shape[-1]) for store in (self.codes, self.rope))
        pages = LatentCodes(codes, self.norms.view(-1, 1), rope, rows, lengths, self.bits, self.width, self.seed)
        return turboquant_latent_attention(q_latent, q_rope, pages, starts, scale)
