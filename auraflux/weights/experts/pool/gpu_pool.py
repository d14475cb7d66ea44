"""`GpuExpertPool`: experts of all layers in pinned host memory, or on disk, some of them cached in GPU slots.

Layers are added while the model is loaded; `finish` then allocates the slots and fills them. Decode steps look up and fetch
experts on the device (`ops/moe/pool.py`), long prefill steps stream them layer by layer (`layer_stream.py`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from auraflux.errors import SettingsError
from auraflux.ops import (
    Activation,
    ExpertPool,
    Experts,
)
from auraflux.ops.gpu.dry_run import is_dry_run
from auraflux.ops.moe.experts import Stack, blob_nbytes
from auraflux.ops.moe.pool import HITS, MISSES, ON_CPU, PREFETCHED, PREFETCHED_USED, aligned
from auraflux.weights.experts.packed_files import ExpertFile
from auraflux.weights.experts.pool.cpu_split import CpuSplit, refuses_cpu
from auraflux.weights.experts.pool.disk_stream import DiskLayerStream
from auraflux.weights.experts.pool.disk_tier import DiskTier
from auraflux.weights.experts.pool.host_memory import NOT_PINNED, HostMemory
from auraflux.weights.experts.pool.layer_stream import DryStream, LayerStream
from auraflux.weights.experts.pool.pooled_experts import PooledExperts, Stream
from auraflux.weights.experts.pool.prefetch import Prefetch
from auraflux.weights.experts.settings import format_nbytes
from auraflux.weights.experts.stats import ExpertCacheStats, ExpertCacheStatsByLayer

STREAM_TOKENS = 16384  # most prompt tokens of a step that copies each missing expert once
STREAM_PAIRS = 4  # (token, expert) pairs per expert from which a step uses nearly all experts of a layer


@dataclass(frozen=True)
class PoolPlan:
    """Sizes of a pool.

    layers   most mixture layers
    experts  of each layer
    k        experts per token
    nbytes   GPU memory for slots
    host     host memory in bytes: for all experts, or for a cache of those on disk
    cpu      let CPU threads compute missing experts of single tokens, where that is faster than to fetch them
    verify   check the checksums of packed experts
    disk     experts stay on disk, below a cache in host memory
    disk_bandwidth  bytes per second of a simulated disk; None for the real one
    """

    layers: int
    experts: int
    k: int
    nbytes: int
    host: int
    cpu: bool = True
    verify: bool = True
    disk: bool = False
    disk_bandwidth: int | None = None


class GpuExpertPool:
    """Experts in host memory or on disk with a cache in GPU memory.

    tier    of experts on disk; None if all are in host memory
    notes   sentences for the user
    pinned  whether kernels read host memory directly; otherwise the host copies experts, and steps cannot be captured
    """

    def __init__(self, plan: PoolPlan, device: torch.device):
        self.plan, self.device = plan, device
        self.tier = DiskTier(plan.host, device, plan.verify, plan.disk_bandwidth) if plan.disk else None
        self.memory = HostMemory(0 if plan.disk else plan.host, device)
        self.notes: list[str] = []
        self._like: list[dict[str, Stack]] = []
        self._firsts: list[int] = []
        self._activation: Activation | None = None
        self._pool: ExpertPool | None = None
        self._stream: LayerStream | None = None
        self._split: CpuSplit | None = None
        self.prefetch: Prefetch | None = None

    @property
    def pinned(self) -> bool:
        return (self.memory if self.tier is None else self.tier).pinned

    @property
    def pool(self) -> ExpertPool:
        assert self._pool is not None, "finish() was not called"
        return self._pool

    @property
    def stream(self) -> Stream:
        """The stream of long prefill steps, made when the first one runs."""
        if is_dry_run():
            return DryStream(self.pool)
        if self._stream is None:
            self._stream = LayerStream(self.pool) if self.tier is None else DiskLayerStream(self.pool, self.tier)
        return self._stream

    @property
    def on_disk(self) -> bool:
        return self.tier is not None

    @property
    def resident(self) -> bool:
        """True if all experts are in GPU slots, and none is on disk."""
        return self.tier is None and len(self.pool.memory) >= self.pool.slots.numel()

    @cached_property
    def layers(self) -> list[Experts]:
        """The experts of each layer in consecutive slots, where all are resident."""
        count, memory = self.plan.experts, self.pool.memory
        made = []
        for layer, like in enumerate(self._like):
            experts = Experts.from_blobs(memory[layer * count : (layer + 1) * count], like)
            made.append(experts if self._activation is None else replace(experts, activation=self._activation))
        return made

    def add_layer(
        self, like: Mapping[str, Stack], activation: Activation | None, load: Callable[[Tensor], None]
    ) -> PooledExperts:
        """Load the experts of one more layer; `load` fills the rows of a uint8 matrix [E, size] with blobs."""
        size = aligned(blob_nbytes(like))
        first, part = self.memory.allocate(self.plan.experts * size)
        load(part.view(self.plan.experts, size))
        self.memory.pin(part)
        self._like.append({name: _shape_only(matrix) for name, matrix in like.items()})
        self._firsts.append(first)
        self._activation = activation
        return PooledExperts(self, len(self._like) - 1)

    def add_disk_layer(
        self, file: ExpertFile, like: Mapping[str, Stack], activation: Activation | None, biases: Mapping[str, Tensor]
    ) -> PooledExperts:
        """Add one more layer whose experts stay on disk; biases are not in its file."""
        assert self.tier is not None, "the plan has no disk"
        self.tier.add_layer(file, like, biases)
        self._like.append({name: _shape_only(matrix) for name, matrix in like.items()})
        self._activation = activation
        return PooledExperts(self, len(self._like) - 1)

    def finish(self) -> None:
        """Allocate the GPU slots and fill them with as many experts of every layer."""
        sizes = [aligned(blob_nbytes(like)) for like in self._like]
        size, (layers, count) = max(sizes), (len(sizes), self.plan.experts)
        slots = min(self.plan.nbytes // size, layers * count)
        if slots < self.plan.k:
            raise SettingsError(
                f"{format_nbytes(self.plan.nbytes)} of GPU memory for experts is too little: a token uses {self.plan.k} "
                f"experts of {format_nbytes(size)} per layer. Give at least {format_nbytes(self.plan.k * size)}."
            )
        if self.tier is not None:
            self._finish_disk(self.tier, torch.empty(slots, size, dtype=torch.uint8, device=self.device), sizes)
            return
        offsets = [[first + each * nbytes for each in range(count)] for first, nbytes in zip(self._firsts, sizes, strict=True)]
        memory = torch.empty(slots, size, dtype=torch.uint8, device=self.device)
        table = torch.tensor(offsets, dtype=torch.int64, device=self.device)
        self._pool = ExpertPool.empty(memory, self.memory.memory, table, self._like, self._activation)
        self._fill(sizes)
        total = sum(size * count for size in sizes)
        held = "all" if slots == layers * count else f"{slots} of {layers * count}"
        self.notes.append(
            f"experts: {held} are in GPU memory ({format_nbytes(memory.nbytes)} of {format_nbytes(total)}), "
            f"all are in host memory."
        )
        if self.resident:
            return
        if not self.pinned:
            self.notes.append(NOT_PINNED)
            return
        if self.plan.cpu:
            self.share_with_cpu()
        self.prefetch = Prefetch(lambda: self.pool)
        self._pool = replace(self.pool, side_copies=self.prefetch)

    def _finish_disk(self, tier: DiskTier, memory: Tensor, sizes: list[int]) -> None:
        """Start the threads that read experts from disk; the slots are filled by the first tokens."""
        tier.start(self.plan.k)
        self.notes += tier.notes
        table = torch.zeros(len(sizes), self.plan.experts, dtype=torch.int64, device=self.device)
        pool = ExpertPool.empty(memory, tier.mailbox.slots.view(-1), table, self._like, self._activation)
        self._pool = replace(pool, disk=tier)
        total = len(sizes) * self.plan.experts
        self.notes.append(
            f"experts: {total} are on disk ({format_nbytes(sum(sizes) * self.plan.experts)}); host memory caches "
            f"{tier.slots}, GPU memory {len(memory)} of them."
        )
        if self.device.type == "cuda" and not self.pinned:
            self.notes.append(NOT_PINNED)

    def share_with_cpu(self, measure: bool = True) -> None:
        """Start CPU threads for missing experts, and measure whether and how much they help."""
        count, like, sizes = self.plan.experts, self._like[0], self.pool.nbytes
        same = all(_formats(each) == _formats(like) for each in self._like)
        reason = None if same and self._activation is None else "layers differ in format, or have another activation than silu"
        if reason := reason or refuses_cpu(like):
            self.notes.append(f"experts: missing ones are fetched, not computed on the CPU: {reason}.")
            return
        rows = [
            self.memory.memory[first : first + count * size].view(count, size)
            for first, size in zip(self._firsts, sizes, strict=True)
        ]
        self._split = CpuSplit(rows, like, self.device)
        self._pool = replace(self.pool, mailbox=self._split.mailbox)
        if not measure:
            return
        if reason := self._split.measure(self._pool, self.plan.k):
            self.notes.append(f"experts: missing ones are fetched, not computed on the CPU: {reason}.")
            self._split.stop()
            self._pool, self._split = replace(self._pool, mailbox=None), None
        else:
            share = float(self._split.mailbox.fetched[4]) / 4
            threads = self._split.worker.threads
            self.notes.append(
                f"experts: of four missing ones {4 * share:.1f} are fetched, {threads} CPU threads compute the others."
            )

    def before_step(self, tokens: int, parts: int = 1) -> None:
        """Prepare a step: begin to copy experts of a long one, and wake the CPU threads for a short one.

        tokens  of the step
        parts   in which each layer runs them, before the next layer
        """
        if self.prefetch is not None:
            self.prefetch.reset()
        if is_dry_run():
            return
        if self.tier is not None:
            self.tier.wake()
        if self.streams(tokens * self.plan.k):
            self.stream.begin(tokens, parts)
            return
        self.end_stream()
        if self._split is not None:
            self._split.worker.wake()

    def check(self) -> None:
        """Raise if a step used an expert that could not be read from disk."""
        if self.tier is not None:
            self.tier.check()

    def end_stream(self) -> None:
        """Give the slots of a long step's ring back, before kernels look up experts in the tables."""
        if self._stream is not None:
            self._stream.finish()

    def _fill(self, sizes: list[int]) -> None:
        """Copy the first experts of every layer into slots."""
        pool, (layers, count) = self.pool, self.pool.slots.shape
        share, more = divmod(len(pool.memory), layers)
        slot = 0
        for layer, nbytes in enumerate(sizes):
            here, first = min(count, share + (layer < more)), self._firsts[layer]
            rows = pool.host[first : first + here * nbytes].view(here, nbytes)
            pool.memory[slot : slot + here, :nbytes].copy_(rows, non_blocking=True)
            pool.slots[layer, :here] = torch.arange(slot, slot + here, dtype=torch.int32, device=self.device)
            pool.owners[slot : slot + here] = torch.arange(here, dtype=torch.int32, device=self.device) + layer * count
            pool.uses[slot : slot + here] = 0.0
            slot += here

    def give_up(self, nbytes: int) -> int:
        """Free GPU memory of the least used experts' slots; return its bytes, 0 if too few slots would be left.

        The experts that stay are copied from host memory again, since there is no room for a second pool. Those on disk are
        fetched when they are used.
        """
        pool, size = self.pool, self.pool.memory.shape[1]
        slots = len(pool.memory) - -(-nbytes // size)
        if self.resident or slots < max(self.plan.k * self.plan.layers, self.plan.experts):
            return 0
        self.end_stream()
        uses, order = pool.uses.sort(descending=True)
        owners, before = pool.owners[order].tolist()[:slots], len(pool.memory)
        tables = pool.host, pool.offsets, pool.like, pool.activation
        rest = {name: getattr(pool, name) for name in ("state", "trust", "mailbox", "disk", "side_copies")}
        # nothing may refer to the memory any more
        self._pool = self._stream = None
        del pool
        memory = torch.empty(slots, size, dtype=torch.uint8, device=self.device)
        self._pool = replace(ExpertPool.empty(memory, *tables), **rest)
        if self.tier is None:
            self.pool.uses.copy_(uses[:slots])
            for slot, owner in enumerate(owners):
                if owner >= 0:
                    self._place(slot, *divmod(owner, self.plan.experts))
        self.notes.append(f"experts: the KV cache took GPU memory, {slots} of {before} slots are left for experts.")
        return (before - slots) * size

    def _place(self, slot: int, layer: int, expert: int) -> None:
        """Copy an expert into a free slot."""
        pool = self.pool
        first, nbytes = self._firsts[layer] + expert * pool.nbytes[layer], pool.nbytes[layer]
        pool.memory[slot, :nbytes].copy_(pool.host[first : first + nbytes], non_blocking=True)
        pool.slots[layer, expert], pool.owners[slot] = slot, layer * self.plan.experts + expert

    def streams(self, pairs: int) -> bool:
        """Return whether a step of so many (token, expert) pairs uses most experts, or more than there are slots."""
        experts, slots = self.plan.experts, self.slots
        return not self.resident and (pairs >= STREAM_PAIRS * experts or min(pairs, experts) > slots)

    def chunks_by_layer(self, chunk: int) -> int:
        """Return how many prefill chunks go through a layer before the next one, which copies its experts once for all."""
        most = STREAM_TOKENS // chunk
        # every part of a step must be long enough to be streamed, and a layer's experts must have slots at once
        streamed = self.streams((chunk // 2 - most) * self.plan.k) and len(self.pool.memory) >= self.plan.experts
        return most if most > 1 and streamed else 1

    @property
    def slots(self) -> int:
        """Number of experts that one layer of a step can have fetched."""
        return len(self.pool.memory) if self.tier is None else min(len(self.pool.memory), self.tier.slots)

    @property
    def max_captured_tokens(self) -> int:
        """Most tokens of a step that can be captured as a CUDA graph: longer ones are streamed by the host."""
        if self.resident:
            return 1 << 30
        tokens = -(-STREAM_PAIRS * self.plan.experts // self.plan.k) - 1
        slots = self.slots
        return (tokens if slots >= self.plan.experts else min(tokens, slots // self.plan.k)) if self.pinned else 0

    def cache_stats(self) -> ExpertCacheStatsByLayer:
        """Return the statistics of the cache so far."""
        if self._pool is None:
            return ExpertCacheStatsByLayer()
        state = self.pool.state.tolist()
        streamed = (self._stream.hits, self._stream.misses) if self._stream is not None else (0, 0)
        hits, fetched = state[HITS] + streamed[0], state[MISSES] + streamed[1]
        if self.tier is not None:
            disk = self.tier.cache_stats()
            return ExpertCacheStatsByLayer(replace(disk, hits=hits, misses=fetched, from_disk=disk.misses))
        nbytes, late = (fetched + state[PREFETCHED]) * self.pool.memory.shape[1], fetched + state[ON_CPU]
        used = state[PREFETCHED_USED]
        return ExpertCacheStatsByLayer(
            ExpertCacheStats(hits=hits - used, prefetched=used, misses=late, nbytes=nbytes, on_cpu=state[ON_CPU])
        )


def _formats(like: Mapping[str, Stack]) -> list[Any]:
    """Return shapes and formats of an expert's matrices."""
    return [
        (name, matrix.shape, matrix.dtype if isinstance(matrix, Tensor) else matrix.format) for name, matrix in like.items()
    ]


def _shape_only(matrix: Stack) -> Any:
    """Return a matrix without memory, for its shape and format."""
    return (
        matrix.to("meta")
        if isinstance(matrix, Tensor)
        else replace(
            matrix,
            **{
                part: array.to("meta")
                for part in ("packed", "scales", "biases")
                if (array := getattr(matrix, part)) is not None
            },
        )
    )
