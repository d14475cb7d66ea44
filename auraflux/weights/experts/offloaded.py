"""`OffloadedExperts`: experts on disk behind a cache, with prefetch.

Which experts are cached never changes a result: each runs once over all its tokens, outputs are stored per token and expert,
and every token's are summed in the order of its ids (`expert_parts`, `sum_parts`).
"""

import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from auraflux.ops import Activation, Experts, combine, expert_parts, route, sum_parts
from auraflux.ops._recording import recorder
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.expert_cache import ExpertCache
from auraflux.weights.experts.packed_files import ExpertFile
from auraflux.weights.experts.resident import ExpertPredictor, MixtureInput
from auraflux.weights.experts.stats import ExpertCacheCounters, current_draft_rows

PYTHON_LOOKUPS = 64  # ids up to which slots are looked up in Python
PREDICTED_TOKENS = 8  # tokens up to which experts are predicted; a longer prompt uses most experts anyway


@dataclass(frozen=True)
class OffloadPolicy:
    """Work that overlaps with reads of experts.

    hits_first          run cached experts before the missing ones have been read
    prefetch_last       prefetch the experts that the next layer used for the previous token, where they were evicted
    prefetch_predicted  run the next layer's router early and prefetch the experts it chooses
    """

    hits_first: bool = True
    prefetch_last: bool = True
    prefetch_predicted: bool = False


@dataclass(frozen=True, eq=False)
class ExpertRequest:
    """Experts that a step needs.

    ids      [T, k]  on the device that computes
    flat     the same as a list
    experts  each expert once, those of the last token last
    """

    ids: Tensor
    flat: list[int]
    experts: list[int]


class OffloadedExperts:
    """Experts of one layer, of which a cache holds some.

    biases      of all experts, by their names in `Experts`
    next_layer  the next layer of offloaded experts
    """

    def __init__(
        self,
        file: ExpertFile,
        cache: ExpertCache,
        reader: DiskReader,
        counters: ExpertCacheCounters,
        policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008
        biases: Mapping[str, Tensor] | None = None,
        activation: Activation | None = None,
    ):
        self.file, self.cache, self.reader, self.counters, self.policy = file, cache, reader, counters, policy
        self.biases, slots = dict(biases or {}), len(cache.slots.memory)
        slot_biases = {name: value.new_zeros(slots, value.shape[1]) for name, value in self.biases.items()}
        self.stacks = replace(Experts.from_blobs(cache.slots.memory, file.like), activation=activation, **slot_biases)
        self.next_layer: OffloadedExperts | None = None
        self._predictor: ExpertPredictor | None = None
        self._last_experts: list[int] = []
        self._request: ExpertRequest | None = None
        # expert whose biases are in each slot
        self._bias_owners: list[int | None] = [None] * slots
        self._lock = threading.RLock()

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Set the predictor of the next mixture's experts; None if there is no next mixture."""
        self._predictor = predictor

    def prefetch(self, experts: Iterable[int]) -> None:
        """Start to read experts with low priority, where they are not cached."""
        with self._lock:
            predicted = list(experts)
            for expert in predicted:
                self.cache.request(expert, predicted, prefetch=True)

    def prefetch_last(self) -> None:
        """Prefetch the experts that the next layer used for the previous token."""
        if self.policy.prefetch_last and self.next_layer is not None:
            self.next_layer.prefetch(self.next_layer._last_experts)

    def prefetch_predicted(self, residual: Tensor) -> None:
        """Prefetch the experts that the predictor expects in the next layer: residual [T, H]."""
        predicts = self.policy.prefetch_predicted and len(residual) <= PREDICTED_TOKENS
        if not predicts or self._predictor is None or self.next_layer is None:
            return
        self.next_layer.prefetch(_unique(self._predictor(residual).flatten().tolist()))

    def forward(self, inputs: MixtureInput) -> Tensor:
        """Route tokens, run their experts and add the result to the residual stream: [T, H]."""
        ids, weights = route(inputs.scores, inputs.routing, inputs.bias)
        # misses are read while the shared expert runs
        self.fetch(ids)
        self.prefetch_predicted(inputs.residual)
        shared = shared_result(inputs.x, inputs.shared)
        return combine(inputs.residual, self(inputs.x, ids, weights), shared, inputs.gate)

    def fetch(self, ids: Tensor) -> None:
        """Start to read the misses of the next call: [T, k]."""
        with self._lock:
            self._request = self._look_up(ids)
            self._load_misses(dict.fromkeys(self._request.experts))

    def cached_experts(self) -> list[int]:
        """Return the experts that are cached or being loaded."""
        with self._lock:
            return self.cache.cached_experts()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        parts = x.new_empty(*ids.shape, x.shape[1], dtype=torch.float32)
        self.run_experts(x, ids, parts)
        return sum_parts(parts, weights, x.dtype)

    def partial_sum(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts whose ids are not negative: [T, H] float32."""
        parts = x.new_zeros(*ids.shape, x.shape[1], dtype=torch.float32)
        self.run_experts(x, ids, parts)
        return sum_parts(parts, weights, torch.float32)

    def run_experts(self, x: Tensor, ids: Tensor, parts: Tensor) -> None:
        """Write each expert's outputs where its id is in `ids`, except negative ids: parts [T, k, H] float32."""
        with self._lock:
            request, self._request = self._request, None
            if request is None or request.ids is not ids:
                request = self._look_up(ids)
            left = dict.fromkeys(request.experts)
            self._load_misses(left)
            self.prefetch_last()
            while left:
                loaded = self._wait_loaded(left, at_once=len(left) == len(request.experts))
                if loaded:
                    self._run_loaded(x, request, loaded, parts)
                for expert in loaded:
                    del left[expert]
                self._load_misses(left)

    def _look_up(self, ids: Tensor) -> ExpertRequest:
        """Count the hits and misses of a step's experts."""
        if (recording := recorder.recording) is not None:
            recording.reject("offloaded experts are read from disk in every step")
        flat = ids.flatten().tolist()
        experts = list(_unique(reversed(flat)))[::-1]
        self._last_experts = list(_unique(flat[-ids.shape[1] :]))
        verified = _without_draft_rows(flat, ids.shape[1])
        for expert in experts:
            cached = self.cache.get(expert)
            if cached is None:
                self.counters.misses += 1
                self.counters.draft_misses += expert not in verified
            elif cached.prefetched:
                self.counters.prefetched += 1
            else:
                self.counters.hits += 1
        self.cache.count_uses(Counter(expert for expert in flat if expert >= 0), len(ids))
        return ExpertRequest(ids, flat, experts)

    def _load_misses(self, left: dict[int, None]) -> None:
        """Start to load as many missing experts as there are slots."""
        for expert in left:
            cached = self.cache.request(expert, left)
            if cached is None:
                return
            cached.prefetched = False

    def _wait_loaded(self, left: dict[int, None], at_once: bool) -> list[int]:
        """Return those of the remaining experts that are loaded; none if a slot became free instead.

        at_once  return the hits without waiting; otherwise wait for half of the loads in flight, as every kernel run has a cost
        """
        loaded, loads = self.cache.loaded(left), self.cache.loads_in_flight(left)
        missing = (len(loaded) + len(loads) + 1) // 2 - len(loaded)
        if not self.policy.hits_first:
            missing = len(loads)
        elif at_once and loaded:
            missing = 0
        if loads and missing > 0:
            began = time.perf_counter()
            self.reader.wait(lambda: sum(load.poll() for load in loads) >= missing)
            self.counters.stall_s += time.perf_counter() - began
            loaded = self.cache.loaded(left)
        elif not loaded:
            # prefetches occupy all slots
            others = self.cache.loads_in_flight()
            self.reader.wait(lambda: any(load.poll() for load in others))
        return loaded

    def _run_loaded(self, x: Tensor, request: ExpertRequest, loaded: list[int], parts: Tensor) -> None:
        """Run loaded experts and write their outputs to `parts`."""
        slots = [self.cache[expert].slot for expert in loaded]
        for name, value in self.biases.items():
            for expert, slot in zip(loaded, slots, strict=True):
                if self._bias_owners[slot] != expert:
                    getattr(self.stacks, name)[slot] = value[expert]
        expert_parts(x, self._slot_ids(request, dict(zip(loaded, slots, strict=True))), self.stacks, parts)
        for expert, slot in zip(loaded, slots, strict=True):
            self._bias_owners[slot] = expert

    def _slot_ids(self, request: ExpertRequest, slots: dict[int, int]) -> Tensor:
        """Return the request's ids with experts replaced by their slots, and -1 for experts without one."""
        ids = request.ids
        if len(request.flat) <= PYTHON_LOOKUPS:
            found = torch.tensor([slots.get(expert, -1) for expert in request.flat], dtype=torch.int32)
            return found.to(ids.device, non_blocking=True).view(ids.shape)
        # id -1, an expert of another rank, indexes the last row
        table = torch.full((self.file.count + 1,), -1, dtype=torch.int32)
        table[list(slots)] = torch.tensor(list(slots.values()), dtype=torch.int32)
        return table.to(ids.device)[ids.view(-1).long()].view(ids.shape)


def _without_draft_rows(flat: list[int], k: int) -> set[int]:
    """Return the experts that rows other than draft tokens use, k per row."""
    rows = current_draft_rows()
    return set(flat) if not rows else {expert for at, expert in enumerate(flat) if at // k not in rows}


def _unique(experts: Iterable[int]) -> dict[int, None]:
    """Return each expert once, in order, without the negative ids of experts on other ranks."""
    return dict.fromkeys(expert for expert in experts if expert >= 0)
