"""`ExpertStore`: the experts of a packed model within a memory budget.

The budget is split evenly: every layer's cache has the same number of slots. If all experts fit well, their files are
memory-mapped instead, and the page cache holds them. On a GPU the layers share the slots of a `GpuExpertPool`.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from auraflux.errors import ExpertError, FormatError
from auraflux.ops import Activation, Experts
from auraflux.ops.moe.experts import Stack
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.expert_cache import ExpertCache, HostSlots
from auraflux.weights.experts.offloaded import OffloadedExperts, OffloadPolicy
from auraflux.weights.experts.packed_files import ExpertFile, ExpertFiles
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool, PoolPlan
from auraflux.weights.experts.pool.pooled_experts import PooledExperts
from auraflux.weights.experts.resident import ResidentExperts
from auraflux.weights.experts.settings import ExpertCachePlan, ExpertSettings, plan_expert_cache
from auraflux.weights.experts.stats import ExpertCacheCounters, ExpertCacheStatsByLayer


class ExpertStore:
    """Experts of every layer of a model, and the statistics of their caches.

    plan        mapped files, or the number of cache slots per layer
    pool        of GPU slots, with the experts on disk below it; None on a CPU and for mapped files
    """

    def __init__(
        self,
        files: ExpertFiles,
        plan: ExpertCachePlan,
        settings: ExpertSettings = ExpertSettings(),  # noqa: B008
        *,
        device: torch.device | str = "cpu",
        host_nbytes: int = 0,
    ):
        self.files, self.plan, self.verify, self.device = files, plan, settings.verify, torch.device(device)
        self.policy = OffloadPolicy(settings.hits_first, settings.ahead, settings.prefetch)
        self.notes = [f"experts: {plan.reason}."]
        self._counters: dict[str, ExpertCacheCounters] = {}
        self._previous: OffloadedExperts | None = None
        check_packed_layout(files, self.device)
        files.check()
        self.reader: DiskReader | None = None
        self.pool: GpuExpertPool | None = None
        if not plan.mapped and self.device.type == "cuda":
            self.pool = self._make_pool(host_nbytes, settings)
        elif not plan.mapped:
            self.reader = DiskReader(verify=self.verify, bandwidth=settings.disk_bandwidth)
            self.reader.open_files(files.files)
            self.notes += self.reader.notes

    @property
    def resident(self) -> bool:
        """True if all experts are in memory or memory-mapped."""
        return self.plan.mapped

    def layer(
        self, module: str, count: int, hidden: int, inner: int, biases: Mapping[str, Tensor], activation: Activation | None
    ) -> ResidentExperts | OffloadedExperts | PooledExperts:
        """Return the experts of one mixture layer. Call it for layers in the order in which they run."""
        file = self.files.file_of(module, count, hidden, inner)
        if self.pool is not None:
            on_host = {name: value.cpu() for name, value in biases.items()}
            like: dict[str, Stack] = {**file.like, **{name: value[0] for name, value in on_host.items()}}
            return self.pool.add_disk_layer(file, like, activation, on_host)
        if self.reader is None:
            return ResidentExperts(replace(_map_file(file, self.verify, self.device), **biases, activation=activation))
        counters = self._counters[module] = ExpertCacheCounters()
        cache = ExpertCache(HostSlots(file, self.plan.slots, self.reader, counters))
        made = OffloadedExperts(file, cache, self.reader, counters, self.policy, biases, activation)
        if self._previous is not None:
            self._previous.next_layer = made
        self._previous = made
        return made

    def _make_pool(self, host_nbytes: int, settings: ExpertSettings) -> GpuExpertPool:
        """Make the pool of a GPU; host memory has room for at least as many experts as the slots."""
        strides = [file.stride for file in self.files.files]
        k, host = self.plan.min_nbytes // sum(strides), max(host_nbytes, self.plan.slots * max(strides))
        sizes = len(strides), self.files.count, k, self.plan.nbytes, host
        plan = PoolPlan(
            *sizes, cpu=False, verify=settings.verify, disk=True, disk_bandwidth=settings.disk_bandwidth
        )  # fmt: skip
        return GpuExpertPool(plan, self.device)

    def finish(self) -> None:
        """Allocate the slots of a GPU after all layers."""
        if self.pool is not None:
            self.pool.finish()
            self.notes += self.pool.notes

    def cache_stats(self) -> ExpertCacheStatsByLayer:
        """Return the statistics of all caches so far."""
        if self.pool is not None:
            return self.pool.cache_stats()
        layers = {module: counters.snapshot() for module, counters in self._counters.items()}
        if self.reader is None:
            return ExpertCacheStatsByLayer()
        found = self.reader.counters.snapshot()
        summed_fields = ("hits", "prefetched", "misses", "draft_misses", "stall_s")
        summed = {name: sum(getattr(each, name) for each in layers.values()) for name in summed_fields}
        return ExpertCacheStatsByLayer(type(found)(nbytes=found.nbytes, read_s=found.read_s, **summed), layers)


def check_packed_layout(files: ExpertFiles, device: torch.device) -> None:
    """Refuse expert files whose layout the kernels of a device do not read."""
    wanted = {1}
    if device.type == "cpu":
        from auraflux.ops.simd.isa import ISA

        wanted.add(ISA.lanes)
    if files.lanes not in wanted:
        raise FormatError(
            f"{files.folder} was packed with {files.lanes} interleaved rows; this machine needs "
            f"{' or '.join(map(str, sorted(wanted)))}. Pack the model again on this machine."
        )
    kinds = {matrix.kind for file in files.files for matrix in file.like.values() if not matrix.is_expanded}
    if kinds and device.type == "cuda":
        raise FormatError(
            f"{files.folder} holds experts in super-blocks ({', '.join(sorted(kinds))}), which GPU kernels do not "
            "support. Pack the model again on this machine."
        )


def map_experts(files: ExpertFiles, device: torch.device | str = "cpu") -> ExpertStore:
    """Return a store of all experts in memory-mapped files."""
    return ExpertStore(files, plan_expert_cache(files, 1, files.nbytes, "mapped"), device=device)


def _map_file(file: ExpertFile, verify: bool, device: torch.device) -> Experts:
    """Map all experts of a layer, after a check of their checksums."""
    blobs = torch.from_file(str(file.path), shared=False, size=file.file_nbytes, dtype=torch.uint8).view(
        file.count, file.stride
    )
    if verify:
        for expert in range(file.count):
            if zlib.crc32(memoryview(blobs[expert, : file.nbytes].numpy().data)) != file.checksum(expert):
                raise ExpertError(
                    f"expert {expert} of {file.module} cannot be used: {file.path} does not match its checksum; "
                    f"pack the model again."
                )
    return Experts.from_blobs(blobs.to(device), file.like)
