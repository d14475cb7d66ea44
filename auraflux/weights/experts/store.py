"""`ExpertStore`: the experts of a packed model within a memory budget.

The budget is split evenly: every layer's cache has the same number of slots. If all experts fit well, their files are
memory-mapped instead, and the page cache holds them.
"""

import zlib
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from auraflux.errors import ExpertError, FormatError
from auraflux.ops import Activation, Experts
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.expert_cache import ExpertCache, HostSlots
from auraflux.weights.experts.offloaded import OffloadedExperts, OffloadPolicy
from auraflux.weights.experts.packed_files import ExpertFile, ExpertFiles
from auraflux.weights.experts.resident import ResidentExperts
from auraflux.weights.experts.settings import ExpertCachePlan, ExpertSettings, plan_expert_cache
from auraflux.weights.experts.stats import ExpertCacheCounters, ExpertCacheStatsByLayer


class ExpertStore:
    """Experts of every layer of a model, and the statistics of their caches.

    plan        mapped files, or the number of cache slots per layer
    host_slots  experts of each layer cached in host memory, behind the slots of a GPU
    """

    def __init__(
        self,
        files: ExpertFiles,
        plan: ExpertCachePlan,
        settings: ExpertSettings = ExpertSettings(),  # noqa: B008
        *,
        device: torch.device | str = "cpu",
        host_slots: int | None = None,
    ):
        self.files, self.plan, self.verify, self.device = files, plan, settings.verify, torch.device(device)
        self.policy = OffloadPolicy(settings.hits_first, settings.ahead, settings.prefetch)
        self.notes = [f"experts: {plan.reason}."]
        self._host_slots = min(max(host_slots or 0, plan.slots), files.count)
        self._counters: dict[str, ExpertCacheCounters] = {}
        self._previous: OffloadedExperts | None = None
        check_packed_layout(files, self.device)
        files.check()
        self.reader = None if plan.mapped else DiskReader(verify=self.verify, bandwidth=settings.disk_bandwidth)
        if self.reader is not None:
            self.reader.open_files(files.files)
            self.notes += self.reader.notes
        self._stream = torch.cuda.Stream(self.device) if self.reader is not None and self.device.type == "cuda" else None

    @property
    def resident(self) -> bool:
        """True if all experts are in memory or memory-mapped."""
        return self.plan.mapped

    def layer(
        self, module: str, count: int, hidden: int, inner: int, biases: Mapping[str, Tensor], activation: Activation | None
    ) -> ResidentExperts | OffloadedExperts:
        """Return the experts of one mixture layer. Call it for layers in the order in which they run."""
        file = self.files.file_of(module, count, hidden, inner)
        if self.reader is None:
            return ResidentExperts(replace(_map_file(file, self.verify, self.device), **biases, activation=activation))
        counters = self._counters[module] = ExpertCacheCounters()
        cache = self._make_cache(file, self.reader, counters)
        made = OffloadedExperts(file, cache, self.reader, counters, self.policy, biases, activation)
        if self._previous is not None:
            self._previous.next_layer = made
        self._previous = made
        return made

    def _make_cache(self, file: ExpertFile, reader: DiskReader, counters: ExpertCacheCounters) -> ExpertCache:
        if self._stream is None:
            return ExpertCache(HostSlots(file, self.plan.slots, reader, counters))
        from auraflux.weights.experts.gpu_slots import GpuSlots, pin_memory

        host = HostSlots(file, self._host_slots, reader, counters)
        note = "host memory for experts could not be pinned; copies to the GPU are slower."
        if not pin_memory(host) and note not in self.notes:
            self.notes.append(note)
        return ExpertCache(GpuSlots(ExpertCache(host), self.plan.slots, self._stream))

    def cache_stats(self) -> ExpertCacheStatsByLayer:
        """Return the statistics of all caches so far."""
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
    kinds = {matrix.kind for file in files.files for matrix in file.like.values() if matrix.super_block is not None}
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
