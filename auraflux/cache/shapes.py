"""What a model says of its layers, and which kind of cache each gets."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from auraflux.cache.dense import DenseLayer
from auraflux.cache.latent import CodedLatentLayer, LatentLayer
from auraflux.cache.recent import RecentLayer
from auraflux.cache.recurrent import RecurrentLayer
from auraflux.cache.settings import Bits, CacheSettings
from auraflux.cache.turboquant import CodedLayer
from auraflux.ops.turboquant.rotation import NARROWEST, WIDEST

if TYPE_CHECKING:
    from auraflux.cache.cache import Cache


def _width_refusal(width: int) -> str | None:
    if NARROWEST <= width <= WIDEST:
        return None
    return f"vectors of width {width} have no codes; {NARROWEST} to {WIDEST} is needed."


@dataclass(frozen=True)
class AttentionShape:
    """Attention with keys and values per head.

    heads   of keys
    window  how many positions a query sees, its own among them; None for all
    """

    heads: int
    width: int
    value_width: int | None = None
    window: int | None = None
    attends = True

    @property
    def title(self) -> str:
        return "full attention" if self.window is None else f"attention to {self.window} positions"

    @property
    def span(self) -> int | None:
        return self.window

    @property
    def plain_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * self.heads * (self.width + (self.value_width or self.width))

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        if self.value_width not in (None, self.width):
            return f"its keys are {self.width} wide and its values {self.value_width}, and codes need one width."
        return _width_refusal(self.width)

    def build(self, cache: "Cache", bits: Bits | None) -> DenseLayer | CodedLayer | RecentLayer:
        group, newest = cache.group(self.window), cache.settings.newest
        # a window that is newest as a whole is never read as codes
        if bits is None or (self.window is not None and self.window <= newest):
            return DenseLayer(group, self.heads, self.width, self.value_width or self.width, cache.dtype)
        coded = CodedLayer(group, self.heads, self.width, bits, cache.settings.seed, cache.settings.sparse_v)
        if newest == 0:
            return coded
        return RecentLayer(coded, DenseLayer(cache.group(newest), self.heads, self.width, self.width, cache.dtype))


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: a latent of `width` and a rotated key of `rope`, for all heads.

    A latent is key and value at once: it is held at the key's bits, of which there must be no fewer than the value's.
    """

    width: int
    rope: int
    attends = True
    title = "latent attention"
    span = None

    @property
    def plain_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * (self.width + self.rope)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        key, value = bits
        if key < value:
            return f"a latent is key and value at once and is held at the key's bits, too few here; use k{value}v{value}."
        if settings.newest:
            return f"newest={settings.newest} needs an uncompressed copy, which latent layers do not keep."
        if settings.sparse_v:
            return f"sparse_v={settings.sparse_v} skips values, and a latent has been read as a key already."
        return _width_refusal(self.width)

    def build(self, cache: "Cache", bits: Bits | None) -> LatentLayer | CodedLatentLayer:
        if bits is None:
            return LatentLayer(cache.group(None), self.width, self.rope, cache.dtype)
        return CodedLatentLayer(cache.group(None), self.width, self.rope, bits[0], cache.settings.seed, cache.dtype)


@dataclass(frozen=True)
class RecurrentShape:
    """A short convolution over `channels` and a delta memory of [heads, key_width, value_width].

    dtype  of what goes into the convolution; None for the cache's
    """

    channels: int
    heads: int
    key_width: int
    value_width: int
    dtype: torch.dtype | None = None
    attends = False
    title = "recurrent"
    span = None
    plain_nbytes = 0

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return "a recurrent state has no codes."

    def build(self, cache: "Cache", bits: Bits | None) -> RecurrentLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return RecurrentLayer(cache.states, *sizes, self.dtype or cache.dtype)
