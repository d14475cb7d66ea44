"""The KV cache: pages of keys and values, full-precision or quantized, latents, recurrent states, and prefix reuse.

Names are imported on first use: settings are checked before torch is imported.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from auraflux.cache.batch import Batch, Logits
    from auraflux.cache.block_shapes import BlockSparseShape, HeadBlocksShape
    from auraflux.cache.cache import Cache
    from auraflux.cache.kv_sequence import KVSequence, Snapshot
    from auraflux.cache.layer_shapes import (
        AttentionShape,
        BidirectionalShape,
        CompressedShape,
        LatentShape,
        SparseLatentShape,
    )
    from auraflux.cache.mixed_batch import MixedBatch
    from auraflux.cache.recurrent_shapes import ChannelDeltaShape, ConvShape, NGramShape, RecurrentShape, ScanShape
    from auraflux.cache.settings import CacheSettings

__all__ = [
    "AttentionShape",
    "Batch",
    "BidirectionalShape",
    "BlockSparseShape",
    "Cache",
    "CacheSettings",
    "ChannelDeltaShape",
    "CompressedShape",
    "ConvShape",
    "HeadBlocksShape",
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

_HOMES = {
    "AttentionShape": "auraflux.cache.layer_shapes",
    "Batch": "auraflux.cache.batch",
    "BidirectionalShape": "auraflux.cache.layer_shapes",
    "BlockSparseShape": "auraflux.cache.block_shapes",
    "Cache": "auraflux.cache.cache",
    "CacheSettings": "auraflux.cache.settings",
    "ChannelDeltaShape": "auraflux.cache.recurrent_shapes",
    "CompressedShape": "auraflux.cache.layer_shapes",
    "ConvShape": "auraflux.cache.recurrent_shapes",
    "HeadBlocksShape": "auraflux.cache.block_shapes",
    "KVSequence": "auraflux.cache.kv_sequence",
    "LatentShape": "auraflux.cache.layer_shapes",
    "Logits": "auraflux.cache.batch",
    "MixedBatch": "auraflux.cache.mixed_batch",
    "NGramShape": "auraflux.cache.recurrent_shapes",
    "RecurrentShape": "auraflux.cache.recurrent_shapes",
    "ScanShape": "auraflux.cache.recurrent_shapes",
    "Snapshot": "auraflux.cache.kv_sequence",
    "SparseLatentShape": "auraflux.cache.layer_shapes",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'auraflux.cache' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
