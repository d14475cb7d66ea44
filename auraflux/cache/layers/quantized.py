"""Quantized keys and values: a norm per vector and a few bits per coordinate. The codec is in `ops/turboquant`.

Sink tokens and the tokens of the recent window are also stored, and read, in full precision. Which copy a query reads depends
on the two positions only, so results do not depend on how tokens were split into steps.
"""

from torch import Tensor, float32, int32

from auraflux.cache.batch import AttentionLayer, Batch, Rotation
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.settings import MAX_FULL_PRECISION
from auraflux.ops.fake_gpu import is_gpu
from auraflux.ops.turboquant.arrangement import arrangement_for
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.full_precision import FullPrecisionKV
from auraflux.ops.turboquant.pages import CodePages, row_words
from auraflux.ops.turboquant.reference import append_codes, rope_append_codes, turboquant_attention
from auraflux.ops.turboquant.reference_new_token import AttentionOptions, NormRope, rope_append_attention

NORM_NBYTES = 4


class QuantizedLayer(AttentionLayer):
    """The quantized keys and values of one layer. New tokens attend to stored codes, also to those of the same step.

    sinks        sink tokens in full precision; None for none
    recent       recent tokens in full precision, the span of whose group is the window; None for none
    calibration  per-channel mean and scale removed from keys before quantization; None for none
    """

    def __init__(
        self,
        group: LayerGroup,
        heads: int,
        width: int,
        bits: tuple[int, int],
        seed: int,
        threshold: float = 0.0,
        sinks: DenseLayer | None = None,
        recent: DenseLayer | None = None,
        calibration: Calibration | None = None,
    ):
        self.group, self.width, self.seed, self.threshold = group, width, seed, threshold
        self.sinks, self.recent, self.calibration = sinks, recent, calibration
        self.key_bits, self.value_bits = bits
        self.arrangement = arrangement_for(group.device, *bits, width, group.size)
        words = [row_words(b, width) for b in bits]
        self.key_codes, self.value_codes = (group.zeros(heads, group.size, n, dtype=int32) for n in words)
        self.key_norms, self.value_norms = (group.zeros(heads, group.size, dtype=float32) for _ in words)
        self.token_nbytes = heads * sum(4 * n + NORM_NBYTES for n in words)
        self.full_precision_nbytes = self._full_precision_at(MAX_FULL_PRECISION)

    def drop_sinks(self) -> None:
        """Read sink tokens as codes from now on."""
        self.sinks = None
        self.full_precision_nbytes = self._full_precision_at(MAX_FULL_PRECISION)

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of codes and of the full-precision window."""
        return super().nbytes_at(length) + self._full_precision_at(length)

    def _full_precision_at(self, length: int) -> int:
        return sum(layer.nbytes_at(length) for layer in (self.sinks, self.recent) if layer is not None)

    def view(self, batch: Batch) -> CodePages:
        return self._pages(batch.table(self.group), batch.lengths, self.calibration, self._full_precision(batch))

    def _pages(
        self,
        table: Tensor,
        lengths: Tensor,
        calibration: Calibration | None = None,
        full_precision: FullPrecisionKV | None = None,
    ) -> CodePages:
        stores = self.key_codes, self.key_norms, self.value_codes, self.value_norms
        sizes = self.key_bits, self.value_bits, self.width, self.seed
        return CodePages(*stores, table, lengths, *sizes, self.arrangement, calibration, full_precision)

    def _full_precision(self, batch: Batch) -> FullPrecisionKV | None:
        if self.sinks is None and self.recent is None:
            return None
        sinks, recent = (None if layer is None else layer.view(batch) for layer in (self.sinks, self.recent))
        return FullPrecisionKV(sinks, recent, 0 if self.recent is None else self.recent.group.span or 0)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Encode and store the keys and values of the batch's new tokens: [T, Hkv, D] both."""
        append_codes(k, v, batch.view(self), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and rotate queries and keys, encode and store keys and values; return the queries [T, Hq, D]."""
        if batch.positions.dim() == 2:
            # the fused op takes one position per token
            return super().rope_append(batch, q, k, v, rotation, norms, eps)
        rotating = rotation.frequencies, batch.positions, norms, eps, rotation.mscale, rotation.interleaved
        return rope_append_codes(q, k, v, batch.view(self), batch.starts, *rotating)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, D]."""
        options = self.group.span, sinks, softcap, self.threshold, batch.ends(self.group)
        return turboquant_attention(q, batch.view(self), batch.starts, scale, *options)

    def rope_append_attend(
        self,
        batch: Batch,
        rows: tuple[Tensor, Tensor, Tensor],
        rotation: Rotation,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        scale: float,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        """Append the new tokens and attend from them, on a GPU in one op."""
        # CPU kernels are recorded and replayed one by one
        if batch.positions.dim() == 2 or not is_gpu(self.group.device):
            return super().rope_append_attend(batch, rows, rotation, norms, eps, scale, sinks, softcap)
        rotating = NormRope(rotation.frequencies, batch.positions, norms, eps, rotation.mscale, rotation.interleaved)
        options = AttentionOptions(scale, self.group.span, sinks, softcap, self.threshold, batch.ends(self.group))
        return rope_append_attention(*rows, batch.view(self), batch.starts, rotating, options)

    def attend_pages(self, table: Tensor, lengths: Tensor, starts: Tensor, q: Tensor, scale: float) -> Tensor:
        """Attend from each token, as its own sequence, to the first `lengths` positions of its pages [T, M]."""
        return turboquant_attention(q, self._pages(table, lengths), starts, scale, None, None, None, self.threshold)
