"""What the user may choose of the cache, and what each layer makes of it. What cannot be honoured is refused."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from auraflux.defaults import AUTO, FIRST, KV, KV_OF, NEWEST
from auraflux.errors import SettingsError
from auraflux.ops.turboquant.codebook import BITS

Bits = tuple[int, int]
FURTHEST = 1 << 24  # positions


class Shape(Protocol):
    """The shape of a layer, as far as settings care."""

    @property
    def attends(self) -> bool: ...

    def refusal(self, bits: Bits, settings: "CacheSettings") -> str | None:
        """Say why the layer cannot be compressed so; None if it can."""


def parse_kv(name: str) -> Bits | None:
    """Give the bits of keys and values that a name like "k8v4" stands for; None for "none"."""
    if name == "none":
        return None
    name = KV if name == AUTO else name
    found = re.fullmatch(r"k(\d)v(\d)", name)
    if found is None:
        raise SettingsError(f"kv={name!r} is neither 'none' nor a pair of bits such as k8v4, k4v4, k4v2 or k3v3.")
    key, value = int(found[1]), int(found[2])
    if key not in BITS or value not in BITS:
        raise SettingsError(f"kv={name!r} has no codebook: keys and values may have {', '.join(map(str, BITS))} bits.")
    return key, value


@dataclass(frozen=True)
class CacheSettings:
    """How keys and values are kept.

    kv                 "none", or bits of keys and values: "k8v4", "k4v4", "k4v2", "k3v3" or any pair of 2, 3, 4, 6, 8;
                       latents, both at once, take the key's; "auto" for what a model's family bears, see `for_family`
    protect_first      how many of the first attention layers stay uncompressed; recurrent layers are not counted
    protect_last       how many of the last
    first              how many of the first positions are read uncompressed; None for what is usual where keys are coded
    newest             a query reads keys less than this far back uncompressed; None for what is usual likewise
    sparse_v           share of all weights below which a coded value need not be read; 1e-6 loses nothing
    seed               of the rotation; part of the format
    checkpoint_stride  tokens after which a sequence makes a checkpoint by itself; None for never
    checkpoint_nbytes  of all checkpoints together; the oldest go first
    """

    kv: str = KV
    protect_first: int = 0
    protect_last: int = 0
    first: int | None = None
    newest: int | None = None
    sparse_v: float = 0.0
    seed: int = 0
    checkpoint_stride: int | None = None
    checkpoint_nbytes: int = 1 << 30

    def __post_init__(self) -> None:
        parse_kv(self.kv)
        for name in ("protect_first", "protect_last", "first", "newest", "sparse_v", "checkpoint_nbytes"):
            if (getattr(self, name) or 0) < 0:
                raise SettingsError(f"{name}={getattr(self, name)} is negative.")
        for name in ("first", "newest"):
            if (value := getattr(self, name) or 0) > FURTHEST:
                raise SettingsError(f"{name}={value} is more than the {FURTHEST:,} positions that can be kept uncompressed.")
        if not 0 <= self.seed < 1 << 63:
            raise SettingsError(f"seed={self.seed} is not between 0 and 2**63 - 1.")
        if self.checkpoint_stride is not None and self.checkpoint_stride < 1:
            raise SettingsError(f"checkpoint_stride={self.checkpoint_stride} must be at least 1, or None for no checkpoints.")
        if self.kv == "none":
            for name in ("protect_first", "protect_last", "first", "newest", "sparse_v"):
                if getattr(self, name):
                    raise SettingsError(f"{name}={getattr(self, name)} means nothing with kv='none': nothing is compressed.")
        if not self.sparse_v < 1:
            raise SettingsError(f"sparse_v={self.sparse_v} is no share of all weights: it must be below 1.")

    def for_family(self, family: str) -> "CacheSettings":
        """Choose the bits for a family of models, unless they were given."""
        return replace(self, kv=KV_OF.get(family, KV)) if self.kv == AUTO else self

    @property
    def plain_first(self) -> int:
        """How many of the first positions coded layers keep as they are."""
        return FIRST if self.first is None else self.first

    @property
    def plain_newest(self) -> int:
        """How near to a query they keep positions as they are."""
        return NEWEST if self.newest is None else self.newest

    def plan(self, shapes: Sequence[Shape]) -> list[Bits | None]:
        """Give the bits of each layer; None where it stays uncompressed."""
        bits = parse_kv(self.kv)
        attending = [i for i, shape in enumerate(shapes) if shape.attends]
        plan: list[Bits | None] = [None] * len(shapes)
        if bits is None or not attending:
            return plan
        chosen = attending[self.protect_first : len(attending) - self.protect_last]
        if not chosen:
            raise SettingsError(
                f"kv='{self.kv}' would compress nothing: protect_first={self.protect_first} and "
                f"protect_last={self.protect_last} cover all {len(attending)} attention layers."
            )
        for i in chosen:
            reason = shapes[i].refusal(bits, self)
            if reason is not None:
                raise SettingsError(f"kv='{self.kv}' cannot be honoured in layer {i}: {reason}")
            plan[i] = bits
        return plan
