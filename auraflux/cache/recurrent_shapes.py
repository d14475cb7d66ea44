"""Shapes of recurrent layers: what a model declares of each layer, and the cache layer built for it."""

from dataclasses import dataclass, replace

import torch

from auraflux.cache.layer_shapes import LayerContext, Share
from auraflux.cache.layers.ngram import NGramLayer
from auraflux.cache.layers.recurrent import ChannelDeltaLayer, ConvLayer, RecurrentLayer, ScanLayer
from auraflux.cache.settings import Bits, CacheSettings


@dataclass(frozen=True)
class RecurrentShape:
    """Gated delta rule: a short convolution over `channels` and a state of [heads, key_width, value_width].

    dtype  of the convolution's inputs; None for the cache's
    """

    channels: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype | None = None
    attends = False
    title = "recurrent"
    span = page = None
    uncompressed_nbytes = 0

    def sliced(self, share: Share) -> "RecurrentShape":
        """Return the shape with a rank's key heads and the value heads that read them."""
        values = self.heads * self.value_width
        keys = (self.channels - values) // (2 * self.key_width)
        mine = len(share(keys))
        return replace(self, channels=self.channels // keys * mine, heads=self.heads // keys * mine)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return "a recurrent state cannot be quantized."

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> RecurrentLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return RecurrentLayer(cache.states, *sizes, self.dtype or cache.dtype)


@dataclass(frozen=True)
class ChannelDeltaShape(RecurrentShape):
    """Delta rule with a decay per channel (KDA): three short convolutions over `channels` each, and a state."""

    def sliced(self, share: Share) -> "ChannelDeltaShape":
        """Return the same shape: every rank has all heads."""
        return self

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> ChannelDeltaLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return ChannelDeltaLayer(cache.states, *sizes, self.dtype or cache.dtype)


@dataclass(frozen=True)
class ScanShape(RecurrentShape):
    """Mamba-2: a short convolution over `channels` and a selective-scan state."""

    def sliced(self, share: Share) -> "ScanShape":
        """Return the same shape: every rank has all heads."""
        return self

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> ScanLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return ScanLayer(cache.states, *sizes, self.dtype or cache.dtype)


@dataclass(frozen=True)
class ConvShape(RecurrentShape):
    """A short convolution over `channels` without SiLU, and no other state."""

    heads: int = 0
    key_width: int = 0
    value_width: int = 0

    def sliced(self, share: Share) -> "ConvShape":
        """Return the same shape: every rank has all channels."""
        return self

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> ConvLayer:
        return ConvLayer(cache.states, self.channels, self.dtype or cache.dtype)


@dataclass(frozen=True)
class NGramShape(RecurrentShape):
    """Gated delta rule with n-gram embeddings.

    history_tokens  previous tokens that an n-gram reads
    conv_inputs     inputs that the dilated convolution over n-gram embeddings looks back
    conv_width      of each of these inputs
    """

    history_tokens: int = 0
    conv_inputs: int = 0
    conv_width: int = 0

    def build(self, cache: LayerContext, bits: Bits | None, number: int) -> NGramLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        history = self.history_tokens, self.conv_inputs, self.conv_width
        return NGramLayer(cache.states, sizes, self.dtype or cache.dtype, *history)
