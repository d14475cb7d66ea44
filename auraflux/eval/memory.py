"""What a setting's cache takes, with everything that is not compressed in 16 bits."""

from typing import Any

import torch

from auraflux.cache import Cache
from auraflux.eval.setting import Setting


def cache_of(setting: Setting, shapes: list[Any]) -> Cache:
    """A setting's cache without memory; refuses what a model's layers cannot have."""
    return Cache(setting.shapes(shapes), setting.cache, context=1, dtype=torch.bfloat16, device="meta")


def nbytes_at(cache: Cache, length: int) -> int:
    """Bytes of one sequence of so many tokens: windows, what is kept twice, and recurrent states too."""
    states = cache.states.slot_nbytes if cache.moves else 0
    return states + sum(layer.nbytes_at(length) for layer in cache.layers)
