"""`PooledExperts`: the experts of one layer of a `GpuExpertPool`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from auraflux.ops import (
    ExpertPool,
    Experts,
    combine,
    expert_mlp,
    expert_parts,
    fetch_experts,
    mixture,
    pooled_mixture,
    route,
    sum_parts,
)
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.experts.pool.prefetch import Prefetch
from auraflux.weights.experts.resident import ExpertPredictor, MixtureInput


class Stream(Protocol):
    """The stream of experts of long prefill steps, as layers and pool see it; see `LayerStream`."""

    @property
    def single_pass(self) -> bool: ...

    def begin(self, tokens: int, parts: int = 1) -> None: ...

    def run(self, layer: int, tokens: int, work: Callable[[Experts], None]) -> None: ...


class Store(Protocol):
    """A `GpuExpertPool` as its layers see it."""

    @property
    def resident(self) -> bool: ...
    @property
    def pinned(self) -> bool: ...
    @property
    def layers(self) -> list[Experts]: ...
    @property
    def pool(self) -> ExpertPool: ...
    @property
    def stream(self) -> Stream: ...
    @property
    def on_disk(self) -> bool: ...
    @property
    def prefetch(self) -> Prefetch | None: ...

    def check(self) -> None: ...

    def streams(self, pairs: int) -> bool: ...

    def end_stream(self) -> None: ...


@dataclass(eq=False)
class PooledExperts:
    """Experts of one layer of a pool."""

    store: Store
    layer: int
    _predictor: ExpertPredictor | None = None

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Set the predictor of the next mixture's experts; None if there is no next mixture."""
        self._predictor = predictor

    def forward(self, inputs: MixtureInput) -> Tensor:
        """Route tokens, run their experts and add the result to the residual stream: [T, H]."""
        store, layer = self.store, self.layer
        given = inputs.x, inputs.scores, inputs.routing
        added = inputs.residual, inputs.bias, inputs.shared, inputs.gate
        if store.resident:
            return mixture(*given, store.layers[layer], *added)
        if store.streams(len(inputs.x) * inputs.routing.k):
            return self._stream(inputs)
        store.end_stream()
        if not store.pinned:
            fetch_experts.reference(route(inputs.scores, inputs.routing, inputs.bias)[0], store.pool, layer)
            store.check()
            return mixture(*given, store.pool.layers[layer], *added)
        prefetch = store.prefetch
        if prefetch is not None and self._predictor is not None:
            prefetch.predict(self._predictor, inputs.residual, layer + 1)
        found = pooled_mixture(*given, store.pool, layer, *added)
        if prefetch is not None:
            prefetch.after_fetch()
        self._check()
        return found

    def _stream(self, inputs: MixtureInput) -> Tensor:
        store, results = self.store, []
        if not store.stream.single_pass:
            ids, weights = route(inputs.scores, inputs.routing, inputs.bias)
            shared = shared_result(inputs.x, inputs.shared)
            return combine(inputs.residual, self(inputs.x, ids, weights), shared, inputs.gate)

        def work(experts: Experts) -> None:
            added = inputs.residual, inputs.bias, inputs.shared, inputs.gate
            results.append(mixture(inputs.x, inputs.scores, inputs.routing, experts, *added))

        store.stream.run(self.layer, len(inputs.x), work)
        return results[0]

    def fetch(self, ids: Tensor) -> None:
        """Do nothing: missing experts are fetched when they are used."""

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        if self.store.streams(ids.numel()):
            return self._partial_sum(x, ids, weights, x.dtype)
        return expert_mlp(x, ids, weights, self._fetched(ids))

    def partial_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts whose ids are not negative: [T, H] float32."""
        return self._partial_sum(x, ids, weights, torch.float32)

    def _partial_sum(self, x: Tensor, ids: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
        parts = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        if self.store.streams(ids.numel()):
            work: Callable[[Experts], None] = lambda experts: expert_parts(x, _present(ids, experts), experts, parts)  # noqa: E731
            self.store.stream.run(self.layer, len(x), work)
        else:
            expert_parts(x, ids, self._fetched(ids), parts)
        return sum_parts(parts, weights, dtype)

    def _fetched(self, ids: Tensor) -> Experts:
        """Bring experts into slots and return the layer's."""
        store = self.store
        if store.resident:
            return store.layers[self.layer]
        store.end_stream()
        (fetch_experts if store.pinned else fetch_experts.reference)(ids, store.pool, self.layer)
        self._check()
        return store.pool.layers[self.layer]

    def _check(self) -> None:
        """Raise if an expert could not be read; a captured step is checked after its replay."""
        if self.store.on_disk and not (self.store.pinned and torch.cuda.is_current_stream_capturing()):
            self.store.check()


def _present(ids: Tensor, experts: Experts) -> Tensor:
    """Return the ids of experts that are in slots, and -1 for the others."""
    assert experts.slots is not None
    return torch.where(experts.slots[ids.clamp_min(0).long()] >= 0, ids, -1)
