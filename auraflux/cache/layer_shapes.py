"""Shapes of attention layers: what a model declares of each layer, and the cache layer built for it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from auraflux.cache.layers.bidirectional import BidirectionalLayer
from auraflux.cache.layers.chunked import ChunkedLayer
from auraflux.cache.layers.compressed import CompressedEntries, CompressedLayer, WindowLayer
from auraflux.cache.layers.context_parallel import (
    ContextParallelDenseLayer,
    ContextParallelLatentLayer,
    ContextParallelQuantizedLatentLayer,
    ContextParallelQuantizedLayer,
)
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.latent import LatentLayer, LatentRows, QuantizedLatentLayer
from auraflux.cache.layers.quantized import QuantizedLayer
from auraflux.cache.layers.recurrent import StateGroup
from auraflux.cache.layers.sparse_latent import IndexKeys, QuantizedIndexKeys, SparseLatentLayer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.settings import Bits, CacheSettings
from auraflux.errors import SettingsError
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.rotation import NARROWEST, WIDEST

Share = Callable[[int], range]  # the KV heads of a tensor-parallel rank, given their number
RECENT_PAGE = 16  # tokens; windows of a few tokens would leave larger pages mostly empty


class LayerContext(Protocol):
    """The cache that layers are built for, as far as shapes need it."""

    settings: CacheSettings
    dtype: torch.dtype
    device: torch.device

    @property
    def states(self) -> StateGroup: ...

    def group(self, span: int | None, size: int | None = None, limit: int | None = None) -> LayerGroup:
        """Return the group of layers that attend to `span` positions and store the first `limit`, in pages of `size` tokens."""

    def layer_calibration(self, number: int, heads: int, width: int) -> Calibration | None:
        """Return the key calibration of a layer as ops take it; None where keys are not calibrated."""


def width_refusal(width: int) -> str | None:
    if NARROWEST <= width <= WIDEST:
        return None
    return f"vectors of width {width} cannot be quantized: the width must be {NARROWEST} to {WIDEST}."


def _full_precision_groups(cache: LayerContext) -> tuple[LayerGroup | None, LayerGroup | None]:
    """Return the groups of sink tokens and of recent tokens in full precision; None for none."""
    sink_tokens, recent_window = cache.settings.resolved_sink_tokens, cache.settings.resolved_recent_window
    sinks = cache.group(None, sink_tokens, sink_tokens) if sink_tokens else None
    return sinks, cache.group(recent_window, RECENT_PAGE) if recent_window else None


def _window_dtype(cache: LayerContext) -> torch.dtype:
    return torch.bfloat16 if cache.settings.bf16_window else cache.dtype


@dataclass(frozen=True)
class AttentionShape:
    """Attention with keys and values per head.

    heads    number of KV heads
    window   positions that a query attends to, itself included; None for all
    chunked  a query attends to those from a multiple of the window on, not to the last ones
    """

    heads: int
    width: int
    value_width: int | None = None
    window: int | None = None
    chunked: bool = False
    attends = True
    page = None

    def sliced(self, share: Share) -> "AttentionShape":
        """Return the shape with a rank's heads."""
        return replace(self, heads=len(share(self.heads)))

    @property
    def title(self) -> str:
        kind = "attention in chunks of" if self.chunked else "sliding-window attention,"
        return "full attention" if self.window is None else f"{kind} {self.window} tokens"

    @property
    def span(self) -> int | None:
        return self.window

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * self.heads * (self.width + (self.value_width or self.width))

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        if self.value_width not in (None, self.width):
            return f"its keys have width {self.width} and its values {self.value_width}; quantization needs one width."
        return width_refusal(self.width)

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> DenseLayer | QuantizedLayer | ChunkedLayer:
        if self.chunked:
            return self._build_chunked(cache, bits, number)
        settings, group = cache.settings, cache.group(self.window)
        # a window within the recent window would never be read as codes
        if bits is None or (self.window is not None and self.window <= settings.resolved_recent_window):
            dense = ContextParallelDenseLayer if group.page_shard.is_sharded else DenseLayer
            return dense(group, self.heads, self.width, self.value_width or self.width, cache.dtype)
        sizes = self.heads, self.width, self.width, _window_dtype(cache)
        sinks, recent = (None if each is None else DenseLayer(each, *sizes) for each in _full_precision_groups(cache))
        calibration = cache.layer_calibration(number, self.heads, self.width)
        quantized = ContextParallelQuantizedLayer if group.page_shard.is_sharded else QuantizedLayer
        return quantized(group, self.heads, self.width, bits, settings.seed, settings.sparse_v, sinks, recent, calibration)

    def _build_chunked(self, cache: LayerContext, bits: Bits | None, number: int) -> ChunkedLayer:
        """Build the layer of a window, and divide it; later chunks have no sink tokens, so none has."""
        kv, size, page = replace(self, chunked=False).build(cache, bits, number), self.window, cache.group(self.window).size
        assert size is not None
        assert not isinstance(kv, ChunkedLayer)
        if size % page:
            raise SettingsError(f"attention in chunks of {size} tokens does not fit pages of {page}: give a divisor of {size}.")
        kv.drop_sinks()
        return ChunkedLayer(kv, size)


@dataclass(frozen=True)
class BidirectionalShape:
    """Attention to earlier and later tokens of a prompt that is computed in one step; nothing is stored.

    window  a token attends to tokens less than this many positions away; None for all
    """

    window: int | None = None
    attends = False
    span = page = None
    uncompressed_nbytes = 0

    @property
    def title(self) -> str:
        near = "" if self.window is None else f", {self.window - 1} tokens to each side"
        return f"bidirectional attention{near}"

    def sliced(self, share: Share) -> "BidirectionalShape":
        """Return the same shape: it has no heads."""
        return self

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return "bidirectional attention stores no keys and values."

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> BidirectionalLayer:
        return BidirectionalLayer(self.window)


def is_bidirectional(shapes: Iterable[object]) -> bool:
    """Return whether tokens attend to later ones in some layers."""
    return any(isinstance(shape, BidirectionalShape) for shape in shapes)


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention (MLA): a latent of `width` and a RoPE key of `rope`, shared by all heads.

    A latent is key and value at once: it is quantized to the key's bits, which must not be fewer than the value's.
    """

    width: int
    rope: int
    attends = True
    title = "latent attention"
    span = page = None

    def sliced(self, share: Share) -> "LatentShape":
        """Return the same shape: heads share a latent."""
        return self

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * (self.width + self.rope)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        key, value = bits
        if key < value:
            return (
                "a latent is key and value at once and takes the key's bits, which are fewer than the value's; "
                f"use k{value}v{value}."
            )
        if settings.sparse_v:
            return f"sparse_v={settings.sparse_v} skips values, and a latent was already read as a key."
        return width_refusal(self.width)

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> LatentLayer | QuantizedLatentLayer:
        sharded = cache.group(None).page_shard.is_sharded
        if bits is None:
            latents = ContextParallelLatentLayer if sharded else LatentLayer
            return latents(cache.group(None), self.width, self.rope, cache.dtype)
        groups: tuple[LayerGroup | None, LayerGroup | None] = None, None
        if not sharded:
            groups = _full_precision_groups(cache)
        elif cache.settings.sink_tokens or cache.settings.recent_window:
            raise SettingsError(
                "context-parallel latents have no full-precision window: leave out --sink-tokens and --recent-window."
            )
        dtype = _window_dtype(cache)
        sinks, recent = (None if group is None else LatentRows(group, self.width, dtype) for group in groups)
        sizes = self.width, self.rope, bits[0], cache.settings.seed, cache.dtype
        quantized = ContextParallelQuantizedLatentLayer if sharded else QuantizedLatentLayer
        return quantized(cache.group(None), *sizes, sinks, recent)


@dataclass(frozen=True)
class SparseLatentShape(LatentShape):
    """Sparse latent attention (DSA): each token attends to `top_k` positions, selected by index keys.

    index_width  of the index keys, which are quantized to the latents' bits; None where a layer uses another's selection
    """

    index_width: int | None
    top_k: int

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"sparse latent attention, top {self.top_k}"

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return super().uncompressed_nbytes + 2 * (self.index_width or 0)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        reason = super().refusal(bits, settings)
        return reason or (None if self.index_width is None else width_refusal(self.index_width))

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> SparseLatentLayer:  # type: ignore[override]
        group, settings, keys = cache.group(None), cache.settings, None
        if group.page_shard.is_sharded:
            raise SettingsError("sparse latent attention does not support context parallelism.")
        if bits is None:
            if self.index_width is not None:
                keys = IndexKeys(group, self.index_width, cache.dtype)
            return SparseLatentLayer(LatentLayer(group, self.width, self.rope, cache.dtype), keys, self.top_k)
        if settings.sink_tokens or settings.recent_window:
            raise SettingsError(
                "sparse latent attention has no full-precision window: leave out --sink-tokens and --recent-window."
            )
        latents = QuantizedLatentLayer(group, self.width, self.rope, bits[0], settings.seed, cache.dtype)
        quantized = None
        if self.index_width is not None:
            quantized = QuantizedIndexKeys(group, self.index_width, bits[0], settings.seed)
        return SparseLatentLayer(latents, quantized, self.top_k)


@dataclass(frozen=True)
class CompressedShape:
    """Compressed attention: a sliding window, and one compressed entry for each `ratio` positions.

    width        of a token's vector and of an entry, key and value at once
    ratio        tokens per entry; None where there are no entries
    overlap      an entry also reads the tokens of the one before
    index_width  of the keys that select entries; None where tokens attend to all entries
    top_k        entries that a token attends to
    """

    width: int
    window: int
    ratio: int | None = None
    overlap: bool = False
    index_width: int | None = None
    top_k: int = 0
    attends = True
    page = None

    def sliced(self, share: Share) -> "CompressedShape":
        """Return the same shape: heads share a vector."""
        return self

    @property
    def title(self) -> str:
        if self.ratio is None:
            return f"sliding-window attention, {self.window} tokens"
        return f"compressed attention, window {self.window}, {self.top_k or 'all'} entries of {self.ratio} tokens"

    @property
    def span(self) -> int | None:
        return self.window

    @property
    def uncompressed_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * self.width

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return "compressed attention cannot be quantized; use kv='none'."

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> WindowLayer | CompressedLayer:
        window = WindowLayer(cache.group(self.window), self.width, cache.dtype)
        if self.ratio is None:
            return window
        group, pending = cache.group(None), cache.group(self.ratio * (1 + self.overlap), RECENT_PAGE)
        if group.page_shard.is_sharded:
            raise SettingsError("compressed attention does not support context parallelism.")
        if group.size % self.ratio and self.ratio % group.size:
            raise SettingsError(f"entries of {self.ratio} tokens do not fit pages of {group.size}: one must divide the other.")
        sizes = self.ratio, self.overlap, cache.dtype
        keys = None if self.index_width is None else CompressedEntries(group, pending, self.index_width, *sizes)
        return CompressedLayer(window, CompressedEntries(group, pending, self.width, *sizes), keys, self.top_k)
