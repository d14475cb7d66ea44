"""Keys and values as codes: a norm and a few bits for each coordinate. The codec is in `ops/turboquant`.

Some positions are kept as they are as well, and read so: the first ones, and those nearer to a query than `newest`. That
depends on no more than two positions, so a result does not depend on how the tokens were cut into steps.
"""

from torch import Tensor, float32, int32

from auraflux.cache.batch import AttentionLayer, Batch, Rotation
from auraflux.cache.dense import DenseLayer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.settings import FURTHEST
from auraflux.ops.turboquant.arrangement import arrangement_for
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.pages import CodePages, row_words
from auraflux.ops.turboquant.plain import PlainPages
from auraflux.ops.turboquant.reference import append_codes, rope_append_codes, turboquant_attention

NORM_NBYTES = 4


class CodedLayer(AttentionLayer):
    """The compressed keys and values of one layer. What is attended to is what is kept, also within a step.

    head         the first positions as they are; None for none
    recent       the newest ones, whose group's span is how near they are; None for none
    calibration  what the codes of keys leave out; None for nothing
    """

    def __init__(
        self,
        group: LayerGroup,
        heads: int,
        width: int,
        bits: tuple[int, int],
        seed: int,
        threshold: float = 0.0,
        head: DenseLayer | None = None,
        recent: DenseLayer | None = None,
        calibration: Calibration | None = None,
    ):
        self.group, self.width, self.seed, self.threshold = group, width, seed, threshold
        self.head, self.recent, self.calibration = head, recent, calibration
        self.key_bits, self.value_bits = bits
        self.arrangement = arrangement_for(group.device, *bits, width, group.size)
        words = [row_words(b, width) for b in bits]
        self.key_codes, self.value_codes = (group.zeros(heads, group.size, n, dtype=int32) for n in words)
        self.key_norms, self.value_norms = (group.zeros(heads, group.size, dtype=float32) for _ in words)
        self.token_nbytes = heads * sum(4 * n + NORM_NBYTES for n in words)
        self.plain_nbytes = self._plain_at(FURTHEST)

    def nbytes_at(self, length: int) -> int:
        """Codes, and what is kept as it is beside them."""
        return super().nbytes_at(length) + self._plain_at(length)

    def _plain_at(self, length: int) -> int:
        return sum(layer.nbytes_at(length) for layer in (self.head, self.recent) if layer is not None)

    def view(self, batch: Batch) -> CodePages:
        return self._pages(batch.table(self.group), batch.lengths, self.calibration, self._plain(batch))

    def _pages(
        self, table: Tensor, lengths: Tensor, calibration: Calibration | None = None, plain: PlainPages | None = None
    ) -> CodePages:
        stores = self.key_codes, self.key_norms, self.value_codes, self.value_norms
        sizes = self.key_bits, self.value_bits, self.width, self.seed
        return CodePages(*stores, table, lengths, *sizes, self.arrangement, calibration, plain)

    def _plain(self, batch: Batch) -> PlainPages | None:
        if self.head is None and self.recent is None:
            return None
        head, recent = (None if layer is None else layer.view(batch) for layer in (self.head, self.recent))
        return PlainPages(head, recent, 0 if self.recent is None else self.recent.group.span or 0)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Encode and store the keys and values of the batch's new tokens: [T, Hkv, D] both."""
        append_codes(k, v, batch.view(self), batch.starts)

    def rope_append(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and rotate queries and keys, encode and store keys and values: gives the queries [T, Hq, D]."""
        rotating = rotation.frequencies, batch.positions, norms, eps, rotation.mscale, rotation.interleaved
        return rope_append_codes(q, k, v, batch.view(self), batch.starts, *rotating)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, D]."""
        options = self.group.span, sinks, softcap, self.threshold
        return turboquant_attention(q, batch.view(self), batch.starts, scale, *options)

    def attend_pages(self, table: Tensor, lengths: Tensor, starts: Tensor, q: Tensor, scale: float) -> Tensor:
        """Attend from tokens that are a sequence each to pages of the pool, [T, M], of which each token sees so much."""
        return turboquant_attention(q, self._pages(table, lengths), starts, scale, None, None, None, self.threshold)
