"""`QuantizedKVCache`: the quantized KV cache for models of mlx-lm.

    cache = make_prompt_cache(model, "k4v4")
    generate(model, tokenizer, prompt, prompt_cache=cache)

Everything is MLX operations, without a kernel of its own. Sink tokens and the recent window stay in full precision; older
tokens become codes of the same format as elsewhere in this package. Scores are computed between the rotated query and the
levels of the codes, and values are summed in the rotated space.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache as cached
from typing import Any

import mlx.core as mx
from mlx_lm.models import base
from mlx_lm.models import cache as mlx_cache

from auraflux.cache.settings import parse_kv
from auraflux.defaults import KV, RECENT_WINDOW, SINK_TOKENS
from auraflux.errors import InputError, SettingsError
from auraflux.ops.turboquant.codebook import boundaries, codebook
from auraflux.ops.turboquant.rotation import rotation

BITS = (2, 4, 8)  # codes of 3 and 6 bits cross words
PAGE = 64  # tokens that become codes at a time
SMALLEST = 1e-30

_quantized_attention: Callable[..., mx.array] = base.quantized_scaled_dot_product_attention


@dataclass(frozen=True)
class Rows:
    """Keys or values of one layer, oldest first: sink tokens, codes, recent tokens.

    sinks, recent  [B, H, T, D]
    codes          [B, H, T, words]  uint32
    norms          [B, H, T]         float32
    """

    sinks: mx.array
    codes: mx.array
    norms: mx.array
    recent: mx.array
    bits: int
    seed: int

    @property
    def tokens(self) -> int:
        return self.sinks.shape[2] + self.codes.shape[2] + self.recent.shape[2]

    @property
    def arrays(self) -> tuple[mx.array, ...]:
        return self.sinks, self.codes, self.norms, self.recent

    def with_arrays(self, sinks: mx.array, codes: mx.array, norms: mx.array, recent: mx.array) -> "Rows":
        return Rows(sinks, codes, norms, recent, self.bits, self.seed)

    @classmethod
    def empty(cls, x: mx.array, bits: int, seed: int) -> "Rows":
        """Return rows without tokens for keys or values like `x`."""
        batch, heads, _, width = x.shape
        none = mx.zeros((batch, heads, 0, width), x.dtype)
        codes = mx.zeros((batch, heads, 0, width * bits // 32), mx.uint32)
        return cls(none, codes, mx.zeros((batch, heads, 0)), none, bits, seed)

    def append(self, x: mx.array, sink_tokens: int) -> "Rows":
        """Return the rows with more tokens at the end."""
        room = sink_tokens - self.sinks.shape[2] if self.recent.shape[2] == 0 else 0
        sinks = mx.concatenate([self.sinks, x[:, :, :room]], axis=2)
        return self.with_arrays(sinks, self.codes, self.norms, mx.concatenate([self.recent, x[:, :, max(0, room) :]], axis=2))

    def encode(self, recent_window: int) -> "Rows":
        """Return the rows with the oldest recent tokens as codes, in whole pages."""
        full = max(0, (self.recent.shape[2] - recent_window) // PAGE * PAGE)
        if full == 0:
            return self
        codes, norms = encode(self.recent[:, :, :full], self.bits, self.seed)
        codes, norms = (mx.concatenate(pair, axis=2) for pair in ([self.codes, codes], [self.norms, norms]))
        return self.with_arrays(self.sinks, codes, norms, self.recent[:, :, full:])

    def truncate(self, tokens: int) -> "Rows":
        """Return the first tokens; the rest of a page is dequantized."""
        first, second = self.sinks.shape[2], self.sinks.shape[2] + self.codes.shape[2]
        if tokens >= second:
            return self.with_arrays(self.sinks, self.codes, self.norms, self.recent[:, :, : tokens - second])
        coded = max(0, tokens - first)
        whole = coded // PAGE * PAGE
        rest = rotate(self._levels(slice(whole, coded)), self.seed, inverse=True).astype(self.recent.dtype)
        return self.with_arrays(self.sinks[:, :, :tokens], self.codes[:, :, :whole], self.norms[:, :, :whole], rest)

    def scores(self, q: mx.array) -> mx.array:
        """Return the inner products with queries: [B, H, G, L, D] -> [B, H, G, L, T]."""
        rotated = rotate(q, self.seed)
        parts = (q, self.sinks), (rotated, self._levels()), (q, self.recent)
        found = [x @ mx.expand_dims(rows.astype(mx.float32), 2).swapaxes(-1, -2) for x, rows in parts if rows.shape[2]]
        return mx.concatenate(found, axis=-1)

    def sum(self, weights: mx.array) -> mx.array:
        """Return the weighed sum of all rows: [B, H, G, L, T] -> [B, H, G, L, D]."""
        first, second = self.sinks.shape[2], self.sinks.shape[2] + self.codes.shape[2]
        coded = weights[..., first:second] @ mx.expand_dims(self._levels(), 2)
        total = rotate(coded, self.seed, inverse=True)
        for part, rows in ((weights[..., :first], self.sinks), (weights[..., second:], self.recent)):
            total = total + part @ mx.expand_dims(rows.astype(mx.float32), 2)
        return total

    def _levels(self, part: slice = slice(None)) -> mx.array:
        """Return the levels of codes times their norms, in the rotated space: [B, H, T, D] float32."""
        codes, width = self.codes[:, :, part], self.recent.shape[-1]
        per_word = 32 // self.bits
        shifts = mx.arange(0, 32, self.bits, dtype=mx.uint32)
        unpacked = (mx.expand_dims(codes, -1) >> shifts) & ((1 << self.bits) - 1)
        levels, _, _ = _codebook(self.bits, width)
        rows = levels[unpacked.reshape(*codes.shape[:-1], codes.shape[-1] * per_word)]
        return rows * mx.expand_dims(self.norms[:, :, part], -1)


class QuantizedKVCache(mlx_cache._BaseCache):
    """The quantized keys and values of one layer.

    kv             bits of keys and values: "k8v8", "k8v4", "k4v4" or any pair of 2, 4, 8
    sink_tokens    first tokens of a sequence that stay in full precision
    recent_window  most recent tokens that stay in full precision
    """

    def __init__(self, kv: str = KV, *, sink_tokens: int = SINK_TOKENS, recent_window: int = RECENT_WINDOW, seed: int = 0):
        bits = parse_kv(kv)
        if bits is None or not set(bits) <= set(BITS):
            raise SettingsError(
                f"kv={kv!r} is not supported with MLX: keys and values may have {', '.join(map(str, BITS))} bits."
            )
        if sink_tokens < 0 or recent_window < 1:
            raise SettingsError(f"sink_tokens={sink_tokens} and recent_window={recent_window}: at least 0 and 1 are needed.")
        self.kv_bits, self.sink_tokens, self.recent_window, self.seed = bits, sink_tokens, recent_window, seed
        self.keys: Rows | None = None
        self.values: Rows | None = None
        # mlx-lm takes the path of quantized caches where these are present
        self.bits, self.group_size = bits[0], PAGE
        base.quantized_scaled_dot_product_attention = _attention

    @property
    def offset(self) -> int:
        return 0 if self.keys is None else self.keys.tokens

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Rows, Rows]:
        """Store the keys and values of new tokens, [B, H, T, D]; these are read in full precision in their own step."""
        found = []
        for old, new, bits in zip((self.keys, self.values), (keys, values), self.kv_bits, strict=True):
            if new.shape[-1] % 32:
                raise InputError(f"heads of {new.shape[-1]} channels are not supported with MLX; a multiple of 32 is needed.")
            rows = Rows.empty(new, bits, self.seed) if old is None else old.encode(self.recent_window)
            found.append(rows.append(new, self.sink_tokens))
        self.keys, self.values = found
        return found[0], found[1]

    @property
    def state(self) -> list[mx.array]:
        return [x for rows in (self.keys, self.values) if rows is not None for x in rows.arrays]

    @state.setter
    def state(self, arrays: list[mx.array]) -> None:
        half = len(arrays) // 2
        for name, part in (("keys", arrays[:half]), ("values", arrays[half:])):
            rows = getattr(self, name)
            setattr(self, name, None if rows is None else rows.with_arrays(*part))

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self.keys is None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Remove the last tokens; return how many there were."""
        if self.keys is None or self.values is None:
            return 0
        removed = min(n, self.offset)
        keep = self.offset - removed
        self.keys, self.values = self.keys.truncate(keep), self.values.truncate(keep)
        return removed

    def make_mask(self, new: int, **options: Any) -> Any:
        return mlx_cache.create_attention_mask(new, offset=self.offset, **options)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in self.state)


def make_prompt_cache(model: Any, kv: str = KV, **options: Any) -> list[Any]:
    """Return a cache for a model of mlx-lm; layers that do not keep all tokens have mlx-lm's own.

    options  see `QuantizedKVCache`
    """
    made = mlx_cache.make_prompt_cache(model)
    found = [QuantizedKVCache(kv, **options) if type(each) is mlx_cache.KVCache else each for each in made]
    if not any(isinstance(each, QuantizedKVCache) for each in found):
        raise SettingsError("no layer of the model keeps all tokens: there is nothing to quantize.")
    return found


def rotate(x: mx.array, seed: int, inverse: bool = False) -> mx.array:
    """Rotate vectors by the rotation of a seed, or back: [..., D] -> [..., D] float32."""
    signs, matrix = _rotation(x.shape[-1], seed)
    x = x.astype(mx.float32)
    if x.size == 0:
        return x
    if signs is None:
        assert matrix is not None, "a rotation has signs or a matrix"
        return x @ (matrix if inverse else matrix.T)
    return mx.hadamard_transform(x) * signs if inverse else mx.hadamard_transform(x * signs)


def encode(x: mx.array, bits: int, seed: int) -> tuple[mx.array, mx.array]:
    """Quantize vectors: [..., D] -> codes uint32 [..., D * bits / 32], norms float32 [...]."""
    levels, bounds, by_rank = _codebook(bits, x.shape[-1])
    length = mx.linalg.norm(x.astype(mx.float32), axis=-1, keepdims=True)
    unit = rotate(x.astype(mx.float32) / mx.maximum(length, SMALLEST), seed)
    rank = mx.zeros(unit.shape, mx.uint32)
    # binary search among the bounds between levels
    for bit in reversed(range(bits)):
        further = rank + (1 << bit)
        rank = mx.where(unit > bounds[further - 1], further, rank)
    codes = by_rank[rank]
    norms = length.squeeze(-1) / mx.maximum(mx.linalg.norm(levels[codes], axis=-1), SMALLEST)
    words = codes.reshape(*codes.shape[:-1], -1, 32 // bits) << mx.arange(0, 32, bits, dtype=mx.uint32)
    return words.sum(-1).astype(mx.uint32), norms


def _attention(
    queries: mx.array, q_keys: Any, q_values: Any, scale: float, mask: Any, group_size: int = 64, bits: int = 8
) -> mx.array:
    """Attend to our rows; mlx-lm's own quantized keys go to mlx-lm's function."""
    if not isinstance(q_keys, Rows):
        return _quantized_attention(queries, q_keys, q_values, scale=scale, mask=mask, group_size=group_size, bits=bits)
    batch, heads, length, width = queries.shape
    q = (queries.astype(mx.float32) * scale).reshape(batch, q_keys.codes.shape[1], -1, length, width)
    scores = q_keys.scores(q).reshape(batch, heads, length, -1)
    if mask is not None:
        if isinstance(mask, str):
            mask = mx.arange(q_keys.tokens - length, q_keys.tokens)[:, None] >= mx.arange(q_keys.tokens)[None]
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    weights = mx.softmax(scores, axis=-1).reshape(*q.shape[:-1], -1)
    return q_values.sum(weights).reshape(batch, heads, length, width).astype(queries.dtype)


@cached
def _codebook(bits: int, width: int) -> tuple[mx.array, mx.array, mx.array]:
    """Return the level of each code, the bounds between neighbouring levels, and the codes of ascending levels."""
    levels = codebook(bits, width)
    return (
        mx.array(levels.numpy()),
        mx.array(boundaries(bits, width).numpy()),
        mx.array(levels.argsort().numpy().astype("uint32")),
    )


@cached
def _rotation(width: int, seed: int) -> tuple[mx.array | None, mx.array | None]:
    found = rotation(width, seed)
    return tuple(None if x is None else mx.array(x.numpy()) for x in (found.signs, found.matrix))  # type: ignore[return-value]
