"""Simulated KV caches of other engines: uncompressed memory with rounded contents.

Keys and values are quantized and dequantized when they are stored; the rest of the model is unchanged. The simulation measures
quality and counts the bytes of the quantized cache, but not its speed.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import AttentionShape, Batch
from auraflux.cache.layer_shapes import CompressedShape, LatentShape, LayerContext, SparseLatentShape
from auraflux.cache.layers.dense import DenseLayer
from auraflux.cache.layers.latent import LatentLayer
from auraflux.errors import SettingsError
from auraflux.eval.peers import Peer
from auraflux.eval.recent import Partials, RecentLayer
from auraflux.ops.attention.pages import KVPages
from auraflux.ops.attention.reference import attention_partials


@dataclass(frozen=True)
class RoundedShape(AttentionShape):
    """Attention with the simulated cache of a peer."""

    peer: Peer | None = None

    def build(self, cache: LayerContext, bits: Any, number: int) -> Any:
        assert self.peer is not None
        dense = self.heads, self.width, self.value_width or self.width, cache.dtype
        recent = self.peer.recent_window
        if self.window is not None and self.window <= recent:
            return DenseLayer(cache.group(self.window), *dense)
        rounded = RoundedLayer(self.peer, cache.group(self.window), *dense)
        return RecentLayer(rounded, DenseLayer(cache.group(recent), *dense)) if recent else rounded


def rounded_shapes(shapes: Sequence[Any], peer: Peer) -> list[Any]:
    """Return the layer shapes of a model with a peer's cache; recurrent layers are unchanged."""
    return [_rounded_shape(shape, peer, index) for index, shape in enumerate(shapes)]


def _rounded_shape(shape: Any, peer: Peer, index: int) -> Any:
    if not shape.attends:
        return shape
    if type(shape) in (SparseLatentShape, CompressedShape) or getattr(shape, "chunked", False):
        raise SettingsError(f"{peer.title} cannot be simulated in layer {index}: it is {shape.title}.")
    latent = type(shape) is LatentShape
    if latent and (peer.over is not None or peer.recent_window):
        raise SettingsError(f"{peer.title} is simulated for keys and values of heads, and layer {index} is {shape.title}.")
    for width in {shape.width, shape.rope} if latent else {shape.width, shape.value_width or shape.width}:
        if reason := peer.refusal(width):
            raise SettingsError(f"{peer.title} cannot be simulated in layer {index}: {reason}")
    if latent:
        return RoundedLatentShape(shape.width, shape.rope, peer)
    return RoundedShape(shape.heads, shape.width, shape.value_width, shape.window, peer=peer)


@dataclass(frozen=True)
class RoundedLatentShape(LatentShape):
    """Latent attention with the simulated cache of a peer."""

    peer: Peer | None = None

    def build(self, cache: LayerContext, bits: Any, number: int) -> Any:
        assert self.peer is not None
        return RoundedLatentLayer(self.peer, cache.group(None), self.width, self.rope, cache.dtype)


class RoundedLatentLayer(LatentLayer):
    """Latents and RoPE keys as a peer would dequantize them, rounded per token like the keys of heads."""

    def __init__(self, peer: Peer, group: Any, width: int, rope: int, dtype: torch.dtype):
        super().__init__(group, width, rope, dtype)
        self.peer = peer
        self.token_nbytes = round((width + rope) * peer.bits / 8)

    def append(self, batch: Batch, latent: Tensor, k_rope: Tensor) -> None:
        """Round and store the latents [T, C] and RoPE keys [T, R] of the batch's new tokens."""
        super().append(batch, self.peer.round(latent), self.peer.round(k_rope))

    def rope_append(self, batch: Batch, *given: Any) -> tuple[Tensor, Tensor]:
        """Store latents and RoPE keys uncompressed, then round them in place."""
        queries = super().rope_append(batch, *given)
        table, size = batch.table(self.group), self.group.size
        for b, (sequence, new) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
            positions = torch.arange(sequence.length - new, sequence.length, device=table.device)
            place = table[b, positions // size].long(), positions % size
            for stored in (self.latent, self.rope):
                stored[place] = self.peer.round(stored[place])
        return queries


class RoundedLayer(DenseLayer):
    """Keys and values as a peer would dequantize them."""

    def __init__(self, peer: Peer, group: Any, heads: int, width: int, value_width: int, dtype: torch.dtype):
        super().__init__(group, heads, width, value_width, dtype)
        self.peer = peer
        self.token_nbytes = round(heads * (width + value_width) * peer.bits / 8)

    def append(self, batch: Batch, k: Tensor, v: Tensor) -> None:
        """Round and store the keys and values of the batch's new tokens: [T, Hkv, D] and [T, Hkv, Dv]."""
        by_token = self.peer.over is None
        super().append(batch, self.peer.round(k) if by_token else k, self.peer.round(v))
        if not by_token:
            self._round_channels(batch)

    def _round_channels(self, batch: Batch) -> None:
        """Round the keys of every completed run of `over` tokens, per channel."""
        over, table = self.peer.over, batch.table(self.group)
        assert over is not None
        assert self.group.size % over == 0, "a run lies within a page"
        for b, (sequence, new) in enumerate(zip(batch.sequences, batch.counts, strict=True)):
            for start in range((sequence.length - new) // over * over, sequence.length // over * over, over):
                slot = start % self.group.size
                keys = self.k[int(table[b, start // self.group.size]), :, slot : slot + over]  # [Hkv, over, D]
                keys.copy_(self.peer.round(keys.transpose(1, 2)).transpose(1, 2))

    def partials(
        self, pages: KVPages, q: Tensor, starts: Tensor, scale: float, window: int | None, softcap: float | None
    ) -> Partials:
        """Attend without the division, see `attention_partials`."""
        return attention_partials(q, pages, starts, scale, window, None, softcap)
