"""Memory plan of a model on one GPU: everything resident, or experts in host memory or on disk behind slots on the GPU."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.cache import Cache
from auraflux.engine.device import activation_dtype
from auraflux.errors import SettingsError
from auraflux.loading.gpu_division import (
    HOST_RESERVE_NBYTES,
    KV_SHARE,
    MIN_CONTEXT,
    SMALL_GPU_CHUNK,
    GpuDivision,
    GpuRequest,
    divide,
)
from auraflux.loading.gpu_sizes import ExpertSizes, GpuSizes, gpu_sizes
from auraflux.loading.memory_budget import (
    CONTEXT_SHARE,
    EngineSizes,
    MemoryBudget,
    RequestedSizes,
    balance_experts,
    cache_memory_nbytes,
    max_tokens,
    open_experts,
    plan_memory,
    pool_tokens,
)
from auraflux.loading.model_source import ModelSource
from auraflux.machine import free_nbytes
from auraflux.weights.experts.packed_files import stride_of
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool, PoolPlan
from auraflux.weights.experts.settings import ExpertSettings, format_nbytes, parse_nbytes
from auraflux.weights.experts.store import check_packed_layout

# addresses are reserved beyond the estimate, as formats with scales of any dtype are estimated by the smallest; pages are not
HOST_SLACK = 1.5
DISK_HOST_SHARE = (
    0.9  # of the host memory that experts may use, for a cache of experts on disk: what is pinned is not given back
)


@dataclass(frozen=True)
class GpuPlan:
    """Plan of one GPU.

    sizes     of the model
    division  of the GPU's memory
    engine    sizes of the KV cache and of steps
    host      host memory that experts may use, in bytes
    disk      host memory for a cache of the experts, which stay on disk; None if they do not
    """

    sizes: GpuSizes
    division: GpuDivision
    engine: EngineSizes
    host: int
    disk: int | None = None

    @property
    def slots(self) -> int | None:
        """Number of expert slots; None if all experts are resident."""
        experts = self.sizes.experts
        if experts is None or self.division.slots is None:
            return None
        return min(self.division.slots // experts.nbytes, experts.layers * experts.count)

    @property
    def pooled(self) -> ExpertSizes | None:
        """Sizes of experts that go to host memory; None if they are resident, on disk, or if host memory lacks room for all."""
        experts = self.sizes.experts
        if self.division.slots is None or experts is None or self.disk is not None or experts.host_nbytes > self.host:
            return None
        return experts


@dataclass(frozen=True)
class _CachePlanner:
    """Sizes of the KV cache within some memory."""

    source: ModelSource
    requested: RequestedSizes
    dtype: torch.dtype

    def sizes(self, free: int, share: int, chunk: int) -> EngineSizes:
        """Return the sizes for so many free bytes, of which a sequence of the default context takes one in `share`."""
        source, requested, free = self.source, self.requested, max(0, free)
        shapes, count = [*source.shapes, *source.mtp_shapes], requested.sequences + 1
        limit = 2 * free // share if requested.cache_memory == "half" else cache_memory_nbytes(requested.cache_memory, free)
        options: dict[str, Any] = {
            "chunk": chunk,
            "sequences": count,
            "cached_sequences": requested.sequences,
            "dtype": self.dtype,
        }
        context = requested.context
        if context is None:
            per_token = Cache(shapes, source.settings, context=1, dtype=self.dtype, device="meta").local_token_nbytes
            context = max(1, min(source.config.context, free // share // max(per_token, 1)))
            if limit is not None:
                context = min(context, max_tokens(shapes, source.settings, limit, context=context, **options))
        tokens = pool_tokens(shapes, source.settings, limit, context=context, **options)
        return EngineSizes(context, chunk, count, requested.sequences, tokens)

    def fits(self, free: int, chunk: int) -> bool:
        """Return whether a KV cache with the default context fits into so many free bytes."""
        return self.nbytes(self.sizes(free, CONTEXT_SHARE, chunk)) <= free

    def sizes_within(self, free: int, share: int, chunk: int) -> EngineSizes:
        """Return the sizes as `sizes` does, with a shorter context where chunks and windows would exceed the free bytes."""
        sizes = self.sizes(free, share, chunk)
        over = self.nbytes(sizes) - free
        # two sequences of the default context take twice one in `share`
        return sizes if over <= 0 or self.requested.context is not None else self.sizes(free - over * share // 2, share, chunk)

    def nbytes(self, sizes: EngineSizes) -> int:
        """Return the bytes of a KV cache of these sizes."""
        # the meta device allocates no memory
        shapes = [*self.source.shapes, *self.source.mtp_shapes]
        return Cache(shapes, self.source.settings, **vars(sizes), dtype=self.dtype, device="meta").reserved_nbytes

    def min_nbytes(self, chunk: int) -> int:
        """Return the bytes of the smallest KV cache: as requested, or two sequences of a short context."""
        requested = self.requested
        if requested.cache_memory not in (None, "half"):
            return parse_nbytes(requested.cache_memory)
        context = requested.context or min(self.source.config.context, MIN_CONTEXT)
        short = replace(self, requested=replace(requested, context=context, cache_memory=None))
        return short.nbytes(short.sizes(0, 1, chunk))


def plan_gpu(
    source: ModelSource,
    total: int,
    requested: RequestedSizes,
    settings: ExpertSettings = ExpertSettings(),  # noqa: B008
    *,
    bits: int | None = None,
    capped: bool = True,
    other_models: int = 0,
) -> GpuPlan:
    """Plan the memory of a GPU.

    total         memory to divide, in bytes
    bits          quantization of dense weights at load time
    capped        the user gave the total
    other_models  bytes to leave for other models
    """
    names = source.module.Model.mtp_names(source.config)
    prefixes = () if names is None else names.prefixes
    sizes = gpu_sizes(source.checkpoint, source.module.rename, source.config.hidden, bits, prefixes, bool(source.mtp_shapes))
    planner = _CachePlanner(source, requested, activation_dtype(torch.device("cuda")))
    slots = None if settings.memory is None else parse_nbytes(settings.memory)
    chunk = requested.chunk or requested.default_chunk
    request = GpuRequest(total, capped, chunk, requested.chunk is not None, slots, other_models)
    share = 2 * KV_SHARE if slots is None else CONTEXT_SHARE

    def cache_nbytes(free: int, chunk: int) -> int:
        return planner.nbytes(planner.sizes(free, share, chunk))

    division = divide(sizes, request, cache_nbytes, planner.min_nbytes(chunk))
    if division.slots is None and not request.chunk_given and not planner.fits(division.for_cache, division.chunk):
        # shorter chunks before a shorter context
        request = replace(request, chunk=min(chunk, SMALL_GPU_CHUNK))
        division = divide(sizes, request, cache_nbytes, planner.min_nbytes(request.chunk))
    share = CONTEXT_SHARE if division.slots is None else share
    engine = planner.sizes_within(division.for_cache, share, division.chunk)
    division = replace(division, cache=planner.nbytes(engine))
    host = free_nbytes() - HOST_RESERVE_NBYTES if settings.host_memory is None else parse_nbytes(settings.host_memory)
    plan = GpuPlan(sizes, division, engine, host)
    on_disk = source.checkpoint.experts is not None and (settings.io == "direct" or plan.pooled is None)
    return replace(plan, disk=_disk_cache(source, plan, settings)) if on_disk and division.slots is not None else plan


def _disk_cache(source: ModelSource, plan: GpuPlan, settings: ExpertSettings) -> int:
    """Return the host memory for a cache of experts on disk; refuse one that is too small for a token."""
    experts, files = plan.sizes.experts, source.checkpoint.experts
    assert experts is not None
    assert files is not None
    nbytes = int(DISK_HOST_SHARE * plan.host) if settings.host_memory is None else plan.host
    # with biases an expert can be longer than in its file
    each = max(stride_of(experts.nbytes), max(file.stride for file in files.files))
    if nbytes < experts.k * each:
        raise SettingsError(
            f"{format_nbytes(max(0, nbytes))} of host memory for experts is too little: a token uses {experts.k} experts of "
            f"{format_nbytes(each)}. Give --expert-host-memory {format_nbytes(experts.k * each)} or more."
        )
    return min(nbytes, experts.layers * experts.count * each)


def plan_gpu_memory(
    source: ModelSource,
    device: torch.device,
    total: int,
    requested: RequestedSizes,
    settings: ExpertSettings,
    *,
    bits: int | None = None,
    capped: bool = True,
    other_models: int = 0,
) -> MemoryBudget:
    """Plan the memory of a GPU and make the pool or the store of its experts, see `plan_gpu`."""
    checkpoint = source.checkpoint
    packed = checkpoint.experts is not None
    # refuses what needs several ranks
    balance_experts(checkpoint, settings, None, device)
    if not packed:
        _check_unpacked(source, settings)
    if packed and settings.io != "auto":
        sizes = gpu_sizes(checkpoint, source.module.rename, source.config.hidden, bits)
        if settings.io == "mapped":
            return plan_memory(source, device, total - sizes.weights, requested, settings, None)
        settings = replace(settings, memory=settings.nbytes(max(0, total - sizes.weights)))
    plan = plan_gpu(source, total, requested, settings, bits=bits, capped=capped, other_models=other_models)
    dtype = activation_dtype(device)
    budget = MemoryBudget(source.shapes, None, None, settings, dtype, plan.engine)
    if plan.division.slots is None:
        resident = replace(settings, io="mapped") if packed else ExpertSettings()
        experts = open_experts(checkpoint, resident, device, plan.division.free, None, source.unused_prefixes)
        return replace(budget, experts=experts)
    if (pooled := plan.pooled) is not None:
        if checkpoint.experts is not None:
            check_packed_layout(checkpoint.experts, device)
        return replace(budget, pool=make_pool(pooled, plan.division.slots, device, settings))
    if plan.disk is not None and checkpoint.experts is not None:
        check_packed_layout(checkpoint.experts, device)
        return replace(budget, pool=_make_disk_pool(plan, plan.disk, device, settings))
    assert plan.sizes.experts is not None
    raise SettingsError(
        f"not all experts of {source.path} fit into GPU memory, and in host memory they need "
        f"{format_nbytes(plan.sizes.experts.host_nbytes)}, of which {format_nbytes(max(0, plan.host))} can be used. Run "
        f"'auraflux pack' on the model first: a packed one also reads experts from disk."
    )


def make_pool(
    experts: ExpertSizes,
    slots: int,
    device: torch.device,
    settings: ExpertSettings = ExpertSettings(),  # noqa: B008
) -> GpuExpertPool:
    """Make an empty pool with so many bytes of slots."""
    sizes = experts.layers, experts.count, experts.k, slots, int(HOST_SLACK * experts.host_nbytes)
    return GpuExpertPool(PoolPlan(*sizes, cpu=settings.compute == "auto", verify=settings.verify), device)


def _make_disk_pool(plan: GpuPlan, host: int, device: torch.device, settings: ExpertSettings) -> GpuExpertPool:
    """Make an empty pool of experts on disk, with so many bytes of host memory."""
    experts, slots = plan.sizes.experts, plan.division.slots
    assert experts is not None
    assert slots is not None
    more: dict[str, Any] = {"cpu": False, "verify": settings.verify, "disk": True, "disk_bandwidth": settings.disk_bandwidth}
    pool = GpuExpertPool(PoolPlan(experts.layers, experts.count, experts.k, slots, host, **more), device)
    if settings.prefetch:
        pool.notes.append("experts: a GPU asks for experts on disk when it needs them; --expert-prefetch has no effect.")
    return pool


def check_host_memory(experts: ExpertSizes, free: int) -> None:
    """Refuse experts that exceed the free host memory."""
    if experts.host_nbytes > free - HOST_RESERVE_NBYTES:
        raise SettingsError(
            f"the experts need {format_nbytes(experts.host_nbytes)} of host memory, of which "
            f"{format_nbytes(max(0, free - HOST_RESERVE_NBYTES))} can be used. Give fewer --layers, or more --gpu-memory."
        )


def _check_unpacked(source: ModelSource, settings: ExpertSettings) -> None:
    """Refuse settings that only packed experts have."""
    if replace(settings, memory=None, host_memory=None, compute="auto") != ExpertSettings():
        raise SettingsError(
            f"{source.path} is not packed, so its experts are not read from disk. To offload experts to disk, run "
            f"'auraflux pack' on it first."
        )
