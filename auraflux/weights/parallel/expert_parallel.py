"""Expert parallelism: each rank runs its own experts over all tokens, and an all-reduce sums the results.

All ranks have all tokens, so only sums are exchanged: one row per token and layer. They are summed in rank order, so that
results are reproducible.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from auraflux.ops import combine, route
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.experts.resident import ExpertPredictor, LayerExperts, MixtureInput
from auraflux.weights.parallel.balanced_experts import ExpertBalancer
from auraflux.weights.parallel.expert_placement import Placement
from auraflux.weights.parallel.tensor_slices import Slices


@dataclass(frozen=True)
class ExpertSharding:
    """Experts of every layer on one rank.

    placement   of experts on ranks, see `expert_placement.py`
    all_reduce  sums over ranks: [T, H] -> [T, H]
    balancer    assigns offloaded experts in every step, see `balanced_experts.py`; None for a fixed placement
    """

    placement: Placement
    all_reduce: Callable[[Tensor], Tensor]
    balancer: ExpertBalancer | None = None


def whole_expert_sharding(slices: Slices) -> ExpertSharding:
    """Return a sharding by whole experts for tensor parallel ranks, whose sums are reduced with the rest of the layer."""
    return ExpertSharding(Placement(slices.rank, slices.size), no_reduce)


def no_reduce(mine: Tensor) -> Tensor:
    """Return a partial sum unchanged: it is reduced later."""
    return mine


class PartialExperts(Protocol):
    """Experts that can run some of every token's experts."""

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None: ...

    def fetch(self, ids: Tensor) -> None:
        """Start to read the misses of the next call: [T, k]."""

    def partial_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts whose ids are not negative: [T, H] float32."""


# loads experts into the slots of others, and returns the slot of each
LoadInto = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


def load_nothing(experts: Sequence[int], slots: Sequence[int]) -> Sequence[int]:
    """Return experts as their slots: all can be read on this rank."""
    return experts


class ExpertParallelExperts:
    """Experts of one layer on this rank; `Placement` may exchange them between steps.

    load_into  loads other experts; by default all can be read on this rank, by their ids
    """

    def __init__(
        self,
        experts: PartialExperts,
        sharding: ExpertSharding,
        name: str,
        count: int,
        device: torch.device,
        load_into: LoadInto = load_nothing,
    ):
        self.experts, self.all_reduce, self._load_into = experts, sharding.all_reduce, load_into
        local = sharding.placement.local_experts(name, count)
        # CUDA graphs hold its address: updated in place
        self._slots = torch.full((count,), -1, dtype=torch.int32, device=device)
        self._set_slots(local, local if load_into is load_nothing else range(len(local)))
        self._uses, self._one = (
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.ones((), dtype=torch.int64, device=device),
        )
        sharding.placement.layers[name] = self

    def _set_slots(self, experts: Sequence[int], slots: Sequence[int]) -> None:
        self._slots[list(experts)] = torch.tensor(list(slots), dtype=torch.int32, device=self._slots.device)

    @property
    def use_counts(self) -> list[int]:
        """Uses of each expert of the layer, on any rank, in steps outside CUDA graphs."""
        return self._uses.tolist()

    def reset_counts(self) -> None:
        """Set all use counts to zero."""
        self._uses.zero_()

    def replace_experts(self, local: Sequence[int]) -> None:
        """Load the experts that this rank should have in place of those it gives away; change nothing if that raises."""
        slots = self._slots.tolist()
        gained = [expert for expert in local if slots[expert] < 0]
        lost = [expert for expert, slot in enumerate(slots) if slot >= 0 and expert not in set(local)]
        if not gained:
            return
        loaded = self._load_into(gained, [slots[expert] for expert in lost])
        self._set_slots(lost, [-1] * len(lost))
        self._set_slots(gained, loaded)

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Set the predictor of the next mixture's experts; None if there is no next mixture."""
        self.experts.prefetch_with(None if predictor is None else lambda residual: self._local_ids(predictor(residual)))

    def forward(self, inputs: MixtureInput) -> Tensor:
        """Route tokens, run their experts on all ranks and add the result to the residual stream: [T, H]."""
        ids, weights = route(inputs.scores, inputs.routing, inputs.bias)
        local_ids = self._local_ids(ids)
        self.experts.fetch(local_ids)
        self._count(ids)
        shared = shared_result(inputs.x, inputs.shared)
        return combine(inputs.residual, self._sum(inputs.x, local_ids, weights), shared, inputs.gate)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        self._count(ids)
        return self._sum(x, self._local_ids(ids), weights)

    def _sum(self, x: Tensor, local_ids: Tensor, weights: Tensor) -> Tensor:
        return self.all_reduce(self.experts.partial_sum(x, local_ids, weights)).to(x.dtype)

    def _local_ids(self, ids: Tensor) -> Tensor:
        """Return the slots of experts on this rank, and -1 for the others."""
        return self._slots.index_select(0, ids.flatten()).view(ids.shape)

    def _count(self, ids: Tensor) -> None:
        # in a CUDA graph it would run in every decode step; prefill gives the same distribution
        if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._uses.index_add_(0, ids.flatten(), self._one.expand(ids.numel()))


@dataclass(frozen=True, eq=False)
class TensorParallelExperts:
    """Experts sharded by columns, or by whole experts, under tensor parallelism, reduced together with the shared expert."""

    experts: LayerExperts
    all_reduce: Callable[[Tensor], Tensor]

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Set the predictor of the next mixture's experts; None if there is no next mixture."""
        self.experts.prefetch_with(predictor)

    def forward(self, inputs: MixtureInput) -> Tensor:
        """Route tokens, run their experts on all ranks and add the result to the residual stream: [T, H]."""
        mine = self.experts.forward(replace(inputs, residual=torch.zeros_like(inputs.residual)))
        return combine(inputs.residual, self.all_reduce(mine))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        return self.all_reduce(self.experts(x, ids, weights))
