"""What a model remembers of its sequences: pages of keys and values, plain or compressed, and recurrent states."""

from auraflux.cache.batch import Batch
from auraflux.cache.beside import Beside
from auraflux.cache.cache import Cache
from auraflux.cache.sequence import Sequence, Snapshot
from auraflux.cache.settings import CacheSettings
from auraflux.cache.shapes import (
    AttentionShape,
    ChannelDeltaShape,
    CompressedShape,
    IndexedShape,
    LatentShape,
    NGramShape,
    RecurrentShape,
    ScanShape,
    SparseLatentShape,
)

__all__ = [
    "AttentionShape",
    "Batch",
    "Beside",
    "Cache",
    "CacheSettings",
    "ChannelDeltaShape",
    "CompressedShape",
    "IndexedShape",
    "LatentShape",
    "NGramShape",
    "RecurrentShape",
    "ScanShape",
    "Sequence",
    "Snapshot",
    "SparseLatentShape",
]
