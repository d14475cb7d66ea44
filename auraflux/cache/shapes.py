"""What a model says of its layers, and which kind of cache each gets."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from auraflux.cache.compressed import CompressedLayer, Entries, WindowLayer
from auraflux.cache.dealt import DealtCodedLatentLayer, DealtCodedLayer, DealtDenseLayer, DealtLatentLayer
from auraflux.cache.dense import DenseLayer
from auraflux.cache.indexed import IndexedLayer
from auraflux.cache.latent import CodedLatentLayer, LatentLayer, LatentRows
from auraflux.cache.ngram import NGramLayer
from auraflux.cache.pages import LayerGroup
from auraflux.cache.recurrent import ChannelDeltaLayer, RecurrentLayer, ScanLayer, StateGroup
from auraflux.cache.settings import Bits, CacheSettings
from auraflux.cache.sparse import CodedIndexKeys, IndexKeys, SparseLatentLayer
from auraflux.cache.turboquant import CodedLayer
from auraflux.errors import SettingsError
from auraflux.ops.turboquant.calibration import Calibration
from auraflux.ops.turboquant.rotation import NARROWEST, WIDEST

Share = Callable[[int], range]  # which of so many heads of keys a rank has, where ranks have some heads each
RECENT_PAGE = 16  # tokens; a sequence keeps few as they are, so that large pages would be mostly empty


class Room(Protocol):
    """Where layers are built: a cache, as far as shapes know it."""

    settings: CacheSettings
    dtype: torch.dtype
    device: torch.device

    @property
    def states(self) -> StateGroup: ...

    def group(self, span: int | None, size: int | None = None, limit: int | None = None) -> LayerGroup:
        """The group of layers whose queries see `span` positions, of the first `limit`, in pages of `size` tokens."""

    def calibration(self, number: int, heads: int, width: int) -> Calibration | None:
        """What the codes of a layer's keys leave out."""


def _width_refusal(width: int) -> str | None:
    if NARROWEST <= width <= WIDEST:
        return None
    return f"vectors of width {width} have no codes; {NARROWEST} to {WIDEST} is needed."


def _plain_groups(room: Room) -> tuple[LayerGroup | None, LayerGroup | None]:
    """Whose pages hold the first positions as they are, and the newest."""
    first, newest = room.settings.plain_first, room.settings.plain_newest
    head = room.group(None, first, first) if first else None
    return head, room.group(newest, RECENT_PAGE) if newest else None


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
    page = None

    def sliced(self, share: Share) -> "AttentionShape":
        """The same with a rank's heads."""
        return replace(self, heads=len(share(self.heads)))

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

    def build(self, room: Room, bits: Bits | None, number: int) -> DenseLayer | CodedLayer:
        settings, group = room.settings, room.group(self.window)
        # a window that is newest as a whole is never read as codes
        if bits is None or (self.window is not None and self.window <= settings.plain_newest):
            dense = DealtDenseLayer if group.deal.among_others else DenseLayer
            return dense(group, self.heads, self.width, self.value_width or self.width, room.dtype)
        plain = self.heads, self.width, self.width, room.dtype
        head, recent = (None if kept is None else DenseLayer(kept, *plain) for kept in _plain_groups(room))
        kept = head, recent, room.calibration(number, self.heads, self.width)
        coded = DealtCodedLayer if group.deal.among_others else CodedLayer
        return coded(group, self.heads, self.width, bits, settings.seed, settings.sparse_v, *kept)


@dataclass(frozen=True)
class LatentShape:
    """Multi-head latent attention: a latent of `width` and a rotated key of `rope`, for all heads.

    A latent is key and value at once: it is held at the key's bits, of which there must be no fewer than the value's.
    """

    width: int
    rope: int
    attends = True
    title = "latent attention"
    span = page = None

    def sliced(self, share: Share) -> "LatentShape":
        """The same: heads share a latent."""
        return self

    @property
    def plain_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * (self.width + self.rope)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        key, value = bits
        if key < value:
            return f"a latent is key and value at once and is held at the key's bits, too few here; use k{value}v{value}."
        if settings.sparse_v:
            return f"sparse_v={settings.sparse_v} skips values, and a latent has been read as a key already."
        return _width_refusal(self.width)

    def build(self, room: Room, bits: Bits | None, number: int) -> LatentLayer | CodedLatentLayer:
        dealt = room.group(None).deal.among_others
        if bits is None:
            latents = DealtLatentLayer if dealt else LatentLayer
            return latents(room.group(None), self.width, self.rope, room.dtype)
        groups: tuple[LayerGroup | None, LayerGroup | None] = None, None
        if not dealt:
            groups = _plain_groups(room)
        elif room.settings.first or room.settings.newest:
            raise SettingsError("latents keep no positions as they are among ranks: leave --first and --newest out.")
        head, recent = (None if group is None else LatentRows(group, self.width, room.dtype) for group in groups)
        sizes = self.width, self.rope, bits[0], room.settings.seed, room.dtype
        coded = DealtCodedLatentLayer if dealt else CodedLatentLayer
        return coded(room.group(None), *sizes, head, recent)


@dataclass(frozen=True)
class SparseLatentShape(LatentShape):
    """Latent attention to at most `most` positions, which tokens choose by keys of their own, held at the latents' bits.

    index  width of these keys; None where a layer goes by another's choice
    """

    index: int | None
    most: int

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"latent attention to {self.most} chosen positions"

    @property
    def plain_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return super().plain_nbytes + 2 * (self.index or 0)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        reason = super().refusal(bits, settings)
        return reason or (None if self.index is None else _width_refusal(self.index))

    def build(self, room: Room, bits: Bits | None, number: int) -> SparseLatentLayer:  # type: ignore[override]
        group, settings, keys = room.group(None), room.settings, None
        if bits is None:
            if self.index is not None:
                keys = IndexKeys(group, self.index, room.dtype)
            return SparseLatentLayer(LatentLayer(group, self.width, self.rope, room.dtype), keys, self.most)
        if settings.first or settings.newest:
            raise SettingsError("latents that are chosen by others' keys are all coded: leave --first and --newest out.")
        latents = CodedLatentLayer(group, self.width, self.rope, bits[0], settings.seed, room.dtype)
        coded = None if self.index is None else CodedIndexKeys(group, self.index, bits[0], settings.seed)
        return SparseLatentLayer(latents, coded, self.most)


@dataclass(frozen=True)
class CompressedShape:
    """Attention to the newest `window` positions, and to entries that stand for `rate` positions each.

    width  of a position's vector and of an entry, key and value at once
    rate   None where there are no entries
    twice  whether an entry is made of the window before its own, too
    index  width of the keys by which tokens choose entries; None where they attend to all
    most   entries that a token attends to
    """

    width: int
    window: int
    rate: int | None = None
    twice: bool = False
    index: int | None = None
    most: int = 0
    attends = True
    page = None

    def sliced(self, share: Share) -> "CompressedShape":
        """The same: heads share a vector."""
        return self

    @property
    def title(self) -> str:
        if self.rate is None:
            return f"attention to {self.window} positions"
        return f"attention to {self.window} positions and {self.most or 'all'} entries of {self.rate}"

    @property
    def span(self) -> int | None:
        return self.window

    @property
    def plain_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 2 * self.width

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return "a vector that is key and value, of which one stands for a window of tokens, has no codes; use kv='none'."

    def build(self, room: Room, bits: Bits | None, number: int) -> WindowLayer | CompressedLayer:
        window = WindowLayer(room.group(self.window), self.width, room.dtype)
        if self.rate is None:
            return window
        group, opened = room.group(None), room.group(self.rate * (1 + self.twice), RECENT_PAGE)
        if group.deal.among_others:
            raise SettingsError("entries that stand for many positions cannot be dealt to several ranks.")
        if group.size % self.rate and self.rate % group.size:
            raise SettingsError(
                f"entries of {self.rate} tokens have no place in pages of {group.size}; either must divide the other."
            )
        sizes = self.rate, self.twice, room.dtype
        keys = None if self.index is None else Entries(group, opened, self.index, *sizes)
        return CompressedLayer(window, Entries(group, opened, self.width, *sizes), keys, self.most)


@dataclass(frozen=True)
class IndexedShape:
    """Attention with keys and values per head, to at most `most` blocks of `rate` positions and to the block that is not full.

    heads  of keys
    index  width of the keys by which tokens choose blocks
    """

    heads: int
    width: int
    rate: int
    index: int
    most: int
    attends = True
    span = None

    def sliced(self, share: Share) -> "IndexedShape":
        """The same with a rank's heads; all ranks choose blocks."""
        return replace(self, heads=len(share(self.heads)))

    @property
    def page(self) -> int:
        """Tokens of a page: a block's, so that what is chosen is a page table."""
        return self.rate

    @property
    def title(self) -> str:
        return f"attention to {self.most} chosen blocks of {self.rate} positions"

    @property
    def plain_nbytes(self) -> int:
        """Bytes of one token in bf16."""
        return 4 * self.heads * self.width + 2 * self.index // self.rate

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return _width_refusal(self.width)

    def build(self, room: Room, bits: Bits | None, number: int) -> IndexedLayer:
        group, settings = room.group(None, self.rate), room.settings
        if group.deal.among_others:
            raise SettingsError("positions that are chosen by blocks cannot be dealt to several ranks.")
        keys = Entries(group, room.group(self.rate, RECENT_PAGE), self.index, self.rate, False, room.dtype)
        if bits is None:
            return IndexedLayer(DenseLayer(group, self.heads, self.width, self.width, room.dtype), keys, self.most)
        if settings.first or settings.newest:
            raise SettingsError("keys and values that are chosen by blocks are all coded: leave --first and --newest out.")
        coded = CodedLayer(group, self.heads, self.width, bits, settings.seed, settings.sparse_v)
        return IndexedLayer(coded, keys, self.most)


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
    span = page = None
    plain_nbytes = 0

    def sliced(self, share: Share) -> "RecurrentShape":
        """The same with a rank's heads: those of keys and all that read them."""
        values = self.heads * self.value_width
        keys = (self.channels - values) // (2 * self.key_width)
        mine = len(share(keys))
        return replace(self, channels=self.channels // keys * mine, heads=self.heads // keys * mine)

    def refusal(self, bits: Bits, settings: CacheSettings) -> str | None:
        return "a recurrent state has no codes."

    def build(self, room: Room, bits: Bits | None, number: int) -> RecurrentLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return RecurrentLayer(room.states, *sizes, self.dtype or room.dtype)


@dataclass(frozen=True)
class ChannelDeltaShape(RecurrentShape):
    """Three short convolutions over `channels` each, and a delta memory whose channels fade by themselves."""

    def sliced(self, share: Share) -> "ChannelDeltaShape":
        """The same: every rank has all of it."""
        return self

    def build(self, room: Room, bits: Bits | None, number: int) -> ChannelDeltaLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return ChannelDeltaLayer(room.states, *sizes, self.dtype or room.dtype)


@dataclass(frozen=True)
class ScanShape(RecurrentShape):
    """A short convolution over `channels` and a memory of Mamba-2's rule."""

    def sliced(self, share: Share) -> "ScanShape":
        """The same: every rank has all of it."""
        return self

    def build(self, room: Room, bits: Bits | None, number: int) -> ScanLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return ScanLayer(room.states, *sizes, self.dtype or room.dtype)


@dataclass(frozen=True)
class NGramShape(RecurrentShape):
    """A delta layer's, and beside it the last `before` tokens and `reach` inputs of a convolution, `wide` each."""

    before: int = 0
    reach: int = 0
    wide: int = 0

    def build(self, room: Room, bits: Bits | None, number: int) -> NGramLayer:
        sizes = self.channels, self.heads, self.key_width, self.value_width
        return NGramLayer(room.states, sizes, self.dtype or room.dtype, self.before, self.reach, self.wide)
