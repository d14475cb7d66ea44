"""Multi-head latent attention (MLA): one latent per token for all heads, full-precision or quantized, and one RoPE key.

The latents of sink and recent tokens are also stored in full precision, as in `quantized.py`. Latents are not calibrated: with
the mean over random tokens removed, and scales, a trained model loses quality (docs/quality.md).
"""

import torch
from torch import Tensor

from auraflux.cache.batch import Batch, Layer, Rotation
from auraflux.cache.layers.quantized import NORM_NBYTES
from auraflux.cache.pages import LayerGroup
from auraflux.cache.settings import MAX_FULL_PRECISION
from auraflux.ops.attention.pages import LatentPages
from auraflux.ops.attention.reference import append_latent, latent_attention, rope_append_latent
from auraflux.ops.turboquant.full_precision import FullPrecisionLatents, RowPages
from auraflux.ops.turboquant.pages import LatentCodes, row_words
from auraflux.ops.turboquant.reference import append_latent_codes, rope_append_latent_codes, turboquant_latent_attention


class LatentLayer(Layer):
    """The full-precision latents and RoPE keys of one layer."""

    def __init__(self, group: LayerGroup, width: int, rope: int, dtype: torch.dtype):
        self.group = group
        self.latent = group.zeros(group.size, width, dtype=dtype)
        self.rope = group.zeros(group.size, rope, dtype=dtype)
        self.token_nbytes = (width + rope) * dtype.itemsize

    def view(self, batch: Batch) -> LatentPages:
        return LatentPages(self.latent, self.rope, batch.table(self.group), batch.lengths)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        """Store the latents [T, C] and RoPE keys [T, R] of the batch's new tokens."""
        append_latent(latent, k_rope, batch.view(self), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Split projections, normalise latents, rotate queries and keys, and store; return both parts of the queries."""
        rotating = rotation.frequencies, batch.positions, rotation.mscale, rotation.interleaved
        return rope_append_latent(q, kv, heads, nope, batch.view(self), batch.starts, norm, eps, *rotating)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attend from the batch's new tokens: [T, H, C], [T, H, R] -> [T, H, C]."""
        return latent_attention(q_latent, q_rope, batch.view(self), batch.starts, scale, sinks)

    def attend_rows(
        self, rows: Tensor, lengths: Tensor, starts: Tensor, q_latent: Tensor, q_rope: Tensor, scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from each token, as its own sequence, to the first `lengths` of its selected rows [T, K] of the pool."""
        latent, rope = (store.view(-1, 1, store.shape[-1]) for store in (self.latent, self.rope))
        return latent_attention(q_latent, q_rope, LatentPages(latent, rope, rows, lengths), starts, scale, sinks)


class LatentRows(Layer):
    """The full-precision latents of a quantized layer's sink or recent tokens; that layer's ops read and write them."""

    def __init__(self, group: LayerGroup, width: int, dtype: torch.dtype):
        self.group, self.rows = group, group.zeros(group.size, width, dtype=dtype)
        self.token_nbytes = width * dtype.itemsize

    def view(self, batch: Batch) -> RowPages:
        return RowPages(self.rows, batch.table(self.group), batch.lengths)


class QuantizedLatentLayer(Layer):
    """The quantized latents and full-precision RoPE keys of one layer.

    sinks   latents of sink tokens in full precision; None for none
    recent  latents of recent tokens in full precision, the span of whose group is the window; None for none
    """

    def __init__(
        self,
        group: LayerGroup,
        width: int,
        rope: int,
        bits: int,
        seed: int,
        dtype: torch.dtype,
        sinks: LatentRows | None = None,
        recent: LatentRows | None = None,
    ):
        self.group, self.width, self.bits, self.seed = group, width, bits, seed
        self.sinks, self.recent = sinks, recent
        self.codes = group.zeros(group.size, row_words(bits, width), dtype=torch.int32)
        self.norms = group.zeros(group.size, dtype=torch.float32)
        self.rope = group.zeros(group.size, rope, dtype=dtype)
        self.token_nbytes = 4 * row_words(bits, width) + NORM_NBYTES + rope * dtype.itemsize
        self.full_precision_nbytes = self._full_precision_at(MAX_FULL_PRECISION)

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of codes, RoPE keys and the full-precision window."""
        return super().nbytes_at(length) + self._full_precision_at(length)

    def _full_precision_at(self, length: int) -> int:
        return sum(layer.nbytes_at(length) for layer in (self.sinks, self.recent) if layer is not None)

    def view(self, batch: Batch) -> LatentCodes:
        index = batch.table(self.group), batch.lengths
        return LatentCodes(
            self.codes, self.norms, self.rope, *index, self.bits, self.width, self.seed, self._full_precision(batch)
        )

    def _full_precision(self, batch: Batch) -> FullPrecisionLatents | None:
        if self.sinks is None and self.recent is None:
            return None
        sinks, recent = (None if layer is None else layer.view(batch) for layer in (self.sinks, self.recent))
        return FullPrecisionLatents(sinks, recent, 0 if self.recent is None else self.recent.group.span or 0)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        """Encode and store the latents [T, C], store the RoPE keys [T, R] of the batch's new tokens."""
        append_latent_codes(latent, k_rope, batch.view(self), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, kv: Tensor, heads: int, nope: int, rotation: Rotation, norm: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Split projections, normalise latents, rotate queries and keys, and store; return both parts of the queries."""
        rotating = rotation.frequencies, batch.positions, rotation.mscale, rotation.interleaved
        return rope_append_latent_codes(q, kv, heads, nope, batch.view(self), batch.starts, norm, eps, *rotating)

    def attend(self, batch: Batch, q_latent: Tensor, q_rope: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
        """Attend from the batch's new tokens: [T, H, C], [T, H, R] -> [T, H, C]."""
        return turboquant_latent_attention(q_latent, q_rope, batch.view(self), batch.starts, scale, sinks)

    def attend_rows(
        self, rows: Tensor, lengths: Tensor, starts: Tensor, q_latent: Tensor, q_rope: Tensor, scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend from each token, as its own sequence, to the first `lengths` of its selected rows [T, K] of the pool."""
        codes, rope = (store.view(-1, 1, store.shape[-1]) for store in (self.codes, self.rope))
        pages = LatentCodes(codes, self.norms.view(-1, 1), rope, rows, lengths, self.bits, self.width, self.seed)
        return turboquant_latent_attention(q_latent, q_rope, pages, starts, scale, sinks)
