"""Cache layers without a model: tokens look up fixed random vectors, and every layer's output is returned."""

from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import (
    AttentionShape,
    Batch,
    Cache,
    CacheSettings,
    ChannelDeltaShape,
    KVSequence,
    LatentShape,
    RecurrentShape,
    ScanShape,
    SparseLatentShape,
)
from auraflux.cache.key_calibration import KeyCalibration, ModelCalibration
from auraflux.ops import delta_gates, scan_gates

VOCABULARY = 11
FULL, WINDOW = AttentionShape(2, 16), AttentionShape(1, 16, window=7)
LATENT, RECURRENT = LatentShape(16, 4), RecurrentShape(12, 2, 4, 6)
SPARSE = SparseLatentShape(16, 4, 16, 5)


@cache
def vectors(seed: int, *shape: int) -> Tensor:
    """Return a read-only random vector or matrix for each token."""
    return torch.randn(VOCABULARY, *shape, generator=torch.Generator().manual_seed(seed))


def attend(layer: Any, shape: AttentionShape, batch: Batch, tokens: Tensor) -> Tensor:
    k, v = vectors(1, shape.heads, shape.width)[tokens], vectors(2, shape.heads, shape.value_width or shape.width)[tokens]
    layer.append(batch, k, v)
    q = vectors(3, 2 * shape.heads, shape.width)[tokens]
    return layer.attend(batch, q, shape.width**-0.5, sinks=torch.linspace(-1, 1, 2 * shape.heads), softcap=20.0)


def attend_latent(layer: Any, shape: LatentShape, batch: Batch, tokens: Tensor) -> Tensor:
    layer.append(batch, vectors(4, shape.width)[tokens], vectors(5, shape.rope)[tokens])
    return layer.attend(batch, vectors(6, 3, shape.width)[tokens], vectors(7, 3, shape.rope)[tokens], 0.2)


def attend_selected(layer: Any, shape: SparseLatentShape, batch: Batch, tokens: Tensor) -> Tensor:
    assert shape.index_width is not None
    layer.latents.append(batch, vectors(4, shape.width)[tokens], vectors(5, shape.rope)[tokens])
    layer.append_keys(batch, vectors(14, shape.index_width)[tokens])
    selection = layer.select_tokens(batch, vectors(15, 3, shape.index_width)[tokens], vectors(16, 3)[tokens])
    return layer.attend(batch, vectors(6, 3, shape.width)[tokens], vectors(7, 3, shape.rope)[tokens], 0.2, selection)


def recur(layer: Any, shape: RecurrentShape, batch: Batch, tokens: Tensor) -> Tensor:
    mixed = layer.convolve(batch, vectors(8, shape.channels)[tokens], vectors(9, shape.channels)[:4])
    unit = torch.nn.functional.normalize(vectors(10, 1, shape.key_width), dim=-1)[tokens]
    rates = torch.zeros(shape.heads), torch.zeros(shape.heads)
    decay, beta = (gate[tokens] for gate in delta_gates(vectors(12, shape.heads), vectors(13, shape.heads), *rates))
    out = layer.update(
        batch, unit, unit.flip(-1).contiguous(), vectors(11, shape.heads, shape.value_width)[tokens], decay, beta
    )
    return torch.cat([out.flatten(1), mixed], 1)


def recur_by_channels(layer: Any, shape: ChannelDeltaShape, batch: Batch, tokens: Tensor) -> Tensor:
    inputs = [vectors(seed, shape.channels)[tokens] for seed in (8, 17, 18)]
    mixed = layer.convolve_each(batch, inputs, [vectors(seed, shape.channels)[:4].contiguous() for seed in (9, 19, 20)])
    unit = torch.nn.functional.normalize(vectors(10, shape.heads, shape.key_width), dim=-1)[tokens]
    decay = vectors(12, shape.heads, shape.key_width)[tokens].sigmoid()
    beta, v = vectors(13, shape.heads)[tokens].sigmoid(), vectors(11, shape.heads, shape.value_width)[tokens]
    out = layer.update(batch, unit, unit.flip(-1).contiguous(), v, decay, beta)
    return torch.cat([out.flatten(1), *mixed], 1)


def scan(layer: Any, shape: ScanShape, batch: Batch, tokens: Tensor) -> Tensor:
    mixed = layer.convolve(
        batch, vectors(8, shape.channels)[tokens], vectors(9, shape.channels)[:4], vectors(17, shape.channels)[0]
    )
    decay, step = (gate[tokens] for gate in scan_gates(vectors(12, shape.heads), *torch.zeros(2, shape.heads)))
    return torch.cat([layer.scan(batch, mixed, decay, step, vectors(13, shape.heads)[0]), mixed], 1)


FORWARDS = {
    AttentionShape: attend,
    LatentShape: attend_latent,
    SparseLatentShape: attend_selected,
    RecurrentShape: recur,
    ChannelDeltaShape: recur_by_channels,
    ScanShape: scan,
}


def random_calibration(shapes: list[Any]) -> ModelCalibration:
    """Return a random calibration of all layers with keys; RoPE rotates half of the channels."""
    generator = torch.Generator().manual_seed(20)
    found = {}
    for number, shape in enumerate(shapes):
        if type(shape) is AttentionShape:
            size = shape.heads, shape.width
            scale, along, across = (torch.randn(*size, generator=generator) for _ in range(3))
            frequencies = 0.3 ** torch.arange(1.0, 1 + shape.width // 4)
            found[number] = KeyCalibration(scale.exp(), along, across, frequencies, interleaved=number % 2 == 1)
    return ModelCalibration(found)


@dataclass
class Toy:
    """Layers and cache settings; `options` are passed to the cache."""

    shapes: list[Any]
    settings: CacheSettings = field(default_factory=lambda: CacheSettings("none"))
    calibrated: bool = False

    def cache(self, **options: Any) -> Cache:
        calibration = random_calibration(self.shapes) if self.calibrated else None
        sizes: dict[str, Any] = {"context": 64, "sequences": 8, "page": 4, "chunk": 32, "rollback_tokens": 3}
        return Cache(self.shapes, self.settings, **{**sizes, "key_calibration": calibration, **options})

    def feed(self, cache: Cache, batch: Batch, tokens: list[list[int]], padding: int | None = None) -> list[Tensor]:
        """Run a step; return for each sequence the outputs of all layers for its tokens, [n, ...]."""
        batch.extend([len(new) for new in tokens], padding)
        stack = torch.tensor([token for new in tokens for token in new], dtype=torch.int64)
        steps = zip(cache.layers, self.shapes, strict=True)
        out = torch.cat([FORWARDS[type(shape)](layer, shape, batch, stack).flatten(1) for layer, shape in steps], 1)
        return [out[a:b] for a, b in pairwise(batch.starts.tolist())]

    def add(self, cache: Cache, sequence: KVSequence, tokens: list[int]) -> Tensor:
        return self.feed(cache, cache.batch([sequence]), [tokens])[0]

    def add_padded(self, cache: Cache, sequence: KVSequence, tokens: list[int], padding: int) -> Tensor:
        """Run a step with `padding` padding tokens after the others."""
        batch = cache.batch([sequence])
        out = self.feed(cache, batch, [tokens + tokens[-1:] * padding], padding)[0]
        batch.drop_padding()
        return out[: len(tokens)]

    def fresh(self, tokens: list[int], **options: Any) -> Tensor:
        """Return the outputs of a new cache for all tokens in one step."""
        cache = self.cache(**options)
        return self.add(cache, cache.open(), tokens)


TOYS = {
    "dense": Toy([FULL]),
    "window": Toy([WINDOW, FULL]),
    "k4v4": Toy([FULL, WINDOW], CacheSettings("k4v4")),
    "k8v3": Toy([FULL, WINDOW], CacheSettings("k8v3", seed=5)),
    "recent-window": Toy([FULL, AttentionShape(1, 16, window=9)], CacheSettings("k2v2", recent_window=5)),
    "recent-window-covers-window": Toy([FULL, WINDOW], CacheSettings("k2v2", recent_window=7)),
    "sinks": Toy([FULL, WINDOW], CacheSettings("k4v2", sink_tokens=3)),
    "calibrated": Toy([FULL, WINDOW], CacheSettings("k4v4", sink_tokens=1, recent_window=5), calibrated=True),
    "latent": Toy([LATENT]),
    "quantized-latent": Toy([LATENT], CacheSettings("k4v4")),
    "k8v4-latent": Toy([LATENT, FULL, LatentShape(32, 4)], CacheSettings("k8v4")),
    "windowed-latent": Toy([LATENT], CacheSettings("k4v4", sink_tokens=1, recent_window=5)),
    "sink-latent": Toy([FULL, LATENT], CacheSettings("k4v4", sink_tokens=3)),
    "sparse": Toy([SPARSE, LATENT]),
    "quantized-sparse": Toy([SPARSE], CacheSettings("k8v4")),
    "recurrent": Toy([RECURRENT, RECURRENT]),
    "channels": Toy(
        [ChannelDeltaShape(12, 2, 4, 6), LATENT], CacheSettings("k8v4", sink_tokens=1, recent_window=3, checkpoint_stride=6)
    ),
    "scan": Toy([ScanShape(20, 2, 4, 6), FULL], CacheSettings("k8v4", sink_tokens=1, recent_window=3, checkpoint_stride=6)),
    "hybrid": Toy([RECURRENT, FULL, RECURRENT, WINDOW, LATENT], CacheSettings("k4v4", skip_last_layers=1, checkpoint_stride=6)),
    "calibrated-hybrid": Toy([RECURRENT, FULL, WINDOW], CacheSettings("k3v3", sink_tokens=2, recent_window=3), calibrated=True),
}
