"""DeepSeek V4's hyper-connections: a residual stream of several vectors for each token.

Each part of a layer reads one vector that is mixed from them, and adds its result to all of them, by weights that depend on the
token. `ops/streams/reference.py` says how these are made.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch
from auraflux.models.decoder import Layer, Residual, Stream
from auraflux.ops import collapse_streams, expand_streams, linear, rms_norm, sum_streams
from auraflux.weights.loader import Weights


@dataclass(frozen=True)
class Hyper:
    """The sizes of the stream: vectors of a token, how often their mixing is balanced, and what is added to its weights."""

    count: int
    rounds: int
    eps: float


def _mixes(x: Tensor, ones: Tensor, eps: float, weight: Tensor) -> Tensor:
    """What weights of a token's streams are made of, float32."""
    return linear(rms_norm(x.flatten(1).float(), ones, eps), weight)


class Connection:
    """What leads from the stream into a part of a layer, and back."""

    def __init__(self, hyper: Hyper, hidden: int, eps: float, weights: Weights, name: str):
        self.hyper, self.eps = hyper, eps
        rows, wide = hyper.count * (hyper.count + 2), hyper.count * hidden
        self.ones = torch.ones(wide, device=weights.device)
        self.weight = weights.vector(f"{name}.fn", rows, wide)
        self.base, self.scale = weights.vector(f"{name}.base", rows), weights.vector(f"{name}.scale", 3)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the part reads, [T, H], and the weights by which its result goes back, see `collapse_streams`."""
        mixes = _mixes(x, self.ones, self.eps, self.weight)
        return collapse_streams(x, mixes, self.base, self.scale, self.hyper.eps, self.hyper.rounds)


class Readout:
    """What makes one vector of the stream after the last layer."""

    def __init__(self, hyper: Hyper, hidden: int, eps: float, weights: Weights, name: str):
        self.hyper, self.eps, wide = hyper, eps, hyper.count * hidden
        self.ones = torch.ones(wide, device=weights.device)
        self.weight = weights.vector(f"{name}.hc_fn", hyper.count, wide)
        self.base = weights.vector(f"{name}.hc_base", hyper.count)
        self.scale = weights.vector(f"{name}.hc_scale", 1)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, N, H] -> [T, H]"""
        return sum_streams(x, _mixes(x, self.ones, self.eps, self.weight), self.base, self.scale, self.hyper.eps)


@dataclass(frozen=True, eq=False, kw_only=True)
class HyperLayer(Layer):
    """A layer around a stream of several vectors, [T, N, H]; nothing waits to be added to it."""

    around: tuple[Connection, Connection]

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> Residual:  # type: ignore[override]
        one, *back = self.around[0](x)
        x = expand_streams(x, self.mixer(Stream(one, None, self.mixer_norm, self.eps), batch, store)[1], *back)
        one, *back = self.around[1](x)
        found = self.mlp(Stream(one, None, self.mlp_norm, self.eps))[1]
        assert found is not None
        return expand_streams(x, found, *back), None

    def remember(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Run only the part that stores something."""
        self.mixer.remember(Stream(self.around[0](x)[0], None, self.mixer_norm, self.eps), batch, store)
