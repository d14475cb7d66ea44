"""The KV cache: pages of keys and values, full-precision or quantized, latents, recurrent states, and prefix reuse."""

from auraflux.cache.batch import Batch, Logits
from auraflux.cache.cache import Cache
from auraflux.cache.kv_sequence import KVSequence, Snapshot
from auraflux.cache.layer_shapes import AttentionShape, BlockSparseShape, CompressedShape, LatentShape, SparseLatentShape
from auraflux.cache.mixed_batch import MixedBatch
from auraflux.cache.recurrent_shapes import ChannelDeltaShape, NGramShape, RecurrentShape, ScanShape
from auraflux.cache.settings import CacheSettings

__all__ = [
    "AttentionShape",
    "Batch",
    "BlockSparseShape",
    "Cache",
    "CacheSettings",
    "ChannelDeltaShape",
    "CompressedShape",
    "KVSequence",
    "LatentShape",
    "Logits",
    "MixedBatch",
    "NGramShape",
    "RecurrentShape",
    "ScanShape",
    "Snapshot",
    "SparseLatentShape",
]
