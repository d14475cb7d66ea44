"""A decoder layer: a mixer (attention or a recurrent state), then an MLP or a mixture of experts, each after a norm.

Mixer and MLP return a delta to add to the residual stream. The delta stays pending until the next norm, because one op adds and
normalises: the residual stream and its pending delta travel together, and the delta is None where nothing is pending.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from auraflux.adapters.linears import add_norm_linears, add_norm_scores, linears
from auraflux.cache import Batch, MixedBatch
from auraflux.ops import add_rms_norm, rms_norm
from auraflux.weights.experts.resident import ExpertPredictor
from auraflux.weights.formats.stored import Stored

Biases = Sequence[Tensor | None] | None
Residual = tuple[Tensor, Tensor | None]  # the residual stream and its pending delta, both [T, H]


class LayerInput(NamedTuple):
    """The input of a mixer or an MLP: the residual stream, its pending delta, and the norm over their sum.

    x      [T, H]
    delta  [T, H] or None
    norm   [H]
    """

    x: Tensor
    delta: Tensor | None
    norm: Tensor
    eps: float

    def normed(self) -> tuple[Tensor, Tensor]:
        """Return the sum and its norm."""
        if self.delta is None:
            return self.x, rms_norm(self.x, self.norm, self.eps)
        h, total = add_rms_norm(self.delta, self.x, self.norm, self.eps)
        return total, h

    def linears(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the sum and the projections of its norm, see `add_norm_linears`."""
        return add_norm_linears(*self, weights, biases)

    def scores(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the norm, the sum and the projections of the norm, see `add_norm_scores`."""
        return add_norm_scores(*self, weights, biases)

    def map_parts(self, batch: Batch | MixedBatch, mix: Callable[..., Any]) -> Any:
        """Call `mix` with the rows of each part of a batch and that part."""
        return batch.map_parts(lambda part, x, delta: mix(self._replace(x=x, delta=delta), part), self.x, self.delta)


class PreparedInput(NamedTuple):
    """The input of a mixer or an MLP that the layer has normalised; the result is added to nothing.

    x  [T, H]
    """

    x: Tensor

    def linears(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return x and its projections."""
        return self.x, linears(self.x, weights, biases)

    def scores(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return x, zeros for the sum, and the projections of x."""
        return self.x, torch.zeros_like(self.x), linears(self.x, weights, biases)

    def map_parts(self, batch: Batch | MixedBatch, mix: Callable[..., Any]) -> Any:
        """Call `mix` with the rows of each part of a batch and that part."""
        return batch.map_parts(lambda part, x: mix(PreparedInput(x), part), self.x)


class NormedInput(NamedTuple):
    """The input of a mixer or an MLP that the layer has normalised, and the residual stream.

    x         [T, H]
    residual  [T, H]
    """

    x: Tensor
    residual: Tensor

    def linears(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the residual stream and the projections of x."""
        return self.residual, linears(self.x, weights, biases)

    def scores(self, weights: Sequence[Stored], biases: Biases = None) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return x, the residual stream, and the projections of x."""
        return self.x, self.residual, linears(self.x, weights, biases)

    def map_parts(self, batch: Batch | MixedBatch, mix: Callable[..., Any]) -> Any:
        """Call `mix` with the rows of each part of a batch and that part."""
        return batch.map_parts(lambda part, x, residual: mix(NormedInput(x, residual), part), *self)


class Mixer(ABC):
    """The part of a layer that reads other tokens: attention or a recurrent state.

    supports_mixed_batch  all state of a step is in the cache and the residual stream, so that a step may have two parts
    by_context            its keys depend on the context of the KV cache, see `Rotation.at`
    """

    supports_mixed_batch = True
    by_context = False

    @abstractmethod
    def __call__(self, inputs: Any, batch: Any, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""

    def update_cache(self, inputs: Any, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self(inputs, batch, store)


class PartMixer(Mixer):
    """A mixer that runs once per part of a mixed batch."""

    def __call__(self, inputs: Any, batch: Batch | MixedBatch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""
        return inputs.map_parts(batch, lambda rows, part: self.mix(rows, part, store))

    @abstractmethod
    def mix(self, inputs: Any, batch: Batch, store: Any) -> tuple[Tensor, Tensor]:
        """Return the residual stream with its delta added, and the next delta, both [T, H]."""


class FeedForward(Protocol):
    """The token-wise part of a layer: an MLP or a mixture of experts."""

    def __call__(self, inputs: Any) -> Residual:
        """Return the residual stream with its delta added, and the next delta unless that is added too."""

    def link_prefetch(self, following: ExpertPredictor | None, norm: Tensor, eps: float) -> ExpertPredictor | None:
        """Take the predictor of the next mixture's experts; return that of the first mixture from this layer on."""
        return following


@dataclass(frozen=True, eq=False)
class Layer:
    """A mixer, then an MLP, each after a norm."""

    mixer_norm: Tensor
    mixer: Mixer
    mlp_norm: Tensor
    mlp: FeedForward
    eps: float

    @property
    def supports_mixed_batch(self) -> bool:
        """Return True if a step may have a decode and a prefill part."""
        return self.mixer.supports_mixed_batch

    def __call__(self, x: Tensor, delta: Tensor | None, batch: Batch | MixedBatch, store: Any) -> Residual:
        x, delta = self.mixer(LayerInput(x, delta, self.mixer_norm, self.eps), batch, store)
        return self.mlp(LayerInput(x, delta, self.mlp_norm, self.eps))

    def update_cache(self, x: Tensor, delta: Tensor | None, batch: Batch, store: Any) -> None:
        """Append new tokens to the cache; the output is not needed."""
        self.mixer.update_cache(LayerInput(x, delta, self.mixer_norm, self.eps), batch, store)
