"""Hyper-connections of DeepSeek V4 and Hunyuan 4: several residual streams per token.

Mixer and MLP read one vector that is mixed from the streams, and add their output to all of them, by weights that depend on the
token. `ops/streams/reference.py` defines the weights.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from auraflux.adapters.linears import linear
from auraflux.cache import Batch
from auraflux.models.layer import Layer, LayerInput, Residual
from auraflux.ops import collapse_streams, expand_streams, read_streams, rms_norm, sum_streams
from auraflux.weights.loader import Weights


@dataclass(frozen=True)
class Hyper:
    """The number of residual streams, and the eps of their weights.

    rounds  of Sinkhorn normalisation, where streams mix; None where they do not
    most    the largest weight for writing, where they do not mix
    """

    count: int
    rounds: int | None
    eps: float
    most: float = 2.0


def _mixes(x: Tensor, ones: Tensor, eps: float, weight: Tensor) -> Tensor:
    """Return the logits of the stream weights, float32."""
    return linear(rms_norm(x.flatten(1).float(), ones, eps), weight)


class Connection:
    """The connection from the residual streams into a mixer or an MLP, and back."""

    def __init__(self, hyper: Hyper, hidden: int, eps: float, weights: Weights, name: str):
        self.hyper, self.eps = hyper, eps
        parts = 2 if hyper.rounds is None else 3
        rows, wide = hyper.count * (2 if hyper.rounds is None else hyper.count + 2), hyper.count * hidden
        self.ones = torch.ones(wide, device=weights.device)
        self.weight = weights.vector(f"{name}.fn", rows, wide)
        self.base, self.scale = weights.vector(f"{name}.base", rows), weights.vector(f"{name}.scale", parts)

    def __call__(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the input of the mixer or MLP, [T, H], and the weights of its output, for `expand_streams`."""
        hyper, given = self.hyper, (x, _mixes(x, self.ones, self.eps, self.weight), self.base, self.scale)
        if hyper.rounds is None:
            return read_streams(*given, hyper.eps, hyper.most)
        return collapse_streams(*given, hyper.eps, hyper.rounds)


class Readout:
    """The weighted sum of the residual streams after the last layer."""

    def __init__(self, hyper: Hyper, hidden: int, eps: float, weights: Weights, name: str):
        self.hyper, self.eps, wide = hyper, eps, hyper.count * hidden
        self.ones = torch.ones(wide, device=weights.device)
        self.weight = weights.vector(f"{name}.hc_fn", hyper.count, wide)
        self.base = weights.vector(f"{name}.hc_base", hyper.count)
        self.scale = weights.vector(f"{name}.hc_scale", 1)

    def __call__(self, x: Tensor) -> Tensor:
        """Sum the streams: [T, N, H] -> [T, H]."""
        return sum_streams(x, _mixes(x, self.ones, self.eps, self.weight), self.base, self.scale, self.hyper.eps)


@dataclass(frozen=True, eq=False, kw_only=True)
class HyperLayer(Layer):
    """A layer with several residual streams, [T, N, H], and no pending delta."""

    around: tuple[Connection, Connection]

    @classmethod
    def around_parts(cls, made: Layer, hyper: Hyper, hidden: int, weights: Weights, name: str) -> "HyperLayer":
        """Make the layer under a name such as model.layers.3, with the parts of a layer with one stream."""
        mixer, mlp = (Connection(hyper, hidden, made.eps, weights, f"{name}.{part}_hc") for part in ("attn", "ffn"))
        return cls(**vars(made), around=(mixer, mlp))

    @property
    def supports_mixed_batch(self) -> bool:
        """Refuse mixed batches: hash-routed mixtures read the ids of all tokens of a step, indexers their positions."""
        return False

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> Residual:  # type: ignore[override]
        one, *back = self.around[0](x)
        x = expand_streams(x, self.mixer(LayerInput(one, None, self.mixer_norm, self.eps), batch, store)[1], *back)
        one, *back = self.around[1](x)
        found = self.mlp(LayerInput(one, None, self.mlp_norm, self.eps))[1]
        assert found is not None
        return expand_streams(x, found, *back), None

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(LayerInput(self.around[0](x)[0], None, self.mixer_norm, self.eps), batch, store)
