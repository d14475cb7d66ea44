"""Keys and values as codes: a norm and a few bits for each coordinate. The codec is in `ops/turboquant`."""

from torch import Tensor, float32, int32

from auraflux.cache.batch import AttentionLayer, Batch, Turn
from auraflux.cache.pages import LayerGroup
from auraflux.ops.turboquant.arrangement import arrangement_for
from auraflux.ops.turboquant.pages import CodePages, row_words
from auraflux.ops.turboquant.reference import append_codes, rope_append_codes, rotate, turboquant_attention, turboquant_partials

NORM_NBYTES = 4


class CodedLayer(AttentionLayer):
    """The compressed keys and values of one layer. What is attended to is what the codes stand for, also within a step."""

    def __init__(self, group: LayerGroup, heads: int, width: int, bits: tuple[int, int], seed: int, threshold: float = 0.0):
        self.group, self.width, self.seed, self.threshold = group, width, seed, threshold
        self.key_bits, self.value_bits = bits
        self.arrangement = arrangement_for(group.device, *bits, width, group.size)
        words = [row_words(b, width) for b in bits]
        self.key_codes, self.value_codes = (group.zeros(heads, group.size, n, dtype=int32) for n in words)
        self.key_norms, self.value_norms = (group.zeros(heads, group.size, dtype=float32) for _ in words)
        self.token_nbytes = heads * sum(4 * n + NORM_NBYTES for n in words)

    def view(self, batch: Batch) -> CodePages:
        stores = self.key_codes, self.key_norms, self.value_codes, self.value_norms
        index = batch.table(self.group), batch.lengths
        return CodePages(*stores, *index, self.key_bits, self.value_bits, self.width, self.seed, self.arrangement)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Encode and store the keys and values of the batch's new tokens: [T, Hkv, D] both."""
        append_codes(k, v, batch.view(self), batch.starts)

    def append_turned(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, turn: Turn, norms: tuple[Tensor, Tensor] | None, eps: float
    ) -> Tensor:
        """Normalise and turn queries and keys, encode and store keys and values: gives the queries [T, Hq, D]."""
        turning = turn.frequencies, batch.positions, norms, eps, turn.mscale, turn.interleaved
        return rope_append_codes(q, k, v, batch.view(self), batch.starts, *turning)

    def attend(
        self, batch: Batch, q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, D]."""
        options = self.group.span, sinks, softcap, self.threshold
        return turboquant_attention(q, batch.view(self), batch.starts, scale, *options)

    def partials(
        self, pages: CodePages, q: Tensor, starts: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Attend without the division, see `turboquant_partials`; what it found is rotated back."""
        options = window, None, softcap, self.threshold
        o, m, l = turboquant_partials(q, pages, starts, scale, pages.capacity, *options)  # noqa: E741
        return rotate(o, pages.seed, inverse=True), m, l
