"""Memory budget: the context length, the tokens of the KV cache and the cached experts that fit into memory."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from auraflux.cache import Cache, CacheSettings
from auraflux.cache.page_shards import UNSHARDED, PageShard
from auraflux.distributed.layer_split import LayerSizes, layer_sizes
from auraflux.distributed.leader import Leader
from auraflux.distributed.parallel import EXPERTS
from auraflux.engine.device import activation_dtype, free_device_nbytes
from auraflux.errors import SettingsError
from auraflux.loading.model_source import ModelSource
from auraflux.machine import free_nbytes, this_machine
from auraflux.models.config import experts_per_token
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.row_table import loaded_nbytes
from auraflux.weights.experts.settings import ExpertSettings, format_nbytes, parse_nbytes, plan_expert_cache
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.formats.stored import Checkpoint

LEAST_CONTEXT = 512  # tokens that a KV cache must hold for the default context to follow it
CONTEXT_SHARE = 4  # the default context fills at most one in so much of the free memory
DISK_CHUNK = 4096  # most tokens of a prefill chunk by default, with experts on disk
DISK_CHUNK_NBYTES = 1 << 29  # memory for the outputs of such a chunk's experts


@dataclass(frozen=True)
class RequestedSizes:
    """Sizes that the user requested.

    context        maximum tokens of a sequence; None for the largest that fits
    chunk          tokens of a prefill chunk; None for the default
    sequences      maximum running sequences
    cache_memory   memory of the KV cache; None for two sequences of full context
    default_chunk  of the device
    """

    context: int | None
    chunk: int | None
    sequences: int
    cache_memory: str | int | None
    default_chunk: int


@dataclass(frozen=True)
class EngineSizes:
    """Sizes of the KV cache and of steps.

    context           maximum tokens of a sequence
    chunk             tokens of a prefill chunk
    sequences         open sequences
    cached_sequences  sequences of the prefix cache
    tokens            of all sequences together
    """

    context: int
    chunk: int
    sequences: int
    cached_sequences: int
    tokens: int


@dataclass(frozen=True)
class MemoryBudget:
    """Sizes and placement that fit into the memory of this rank.

    shapes    cache shapes of this rank
    layers    of this rank; None for all
    experts   expert store of a packed model, with its cache size
    settings  of experts, equal on all ranks
    dtype     of activations
    sizes     equal on all ranks
    pool      experts in host memory, some of them in slots on a GPU; None if they are resident or in the store
    """

    shapes: list[Any]
    layers: range | None
    experts: ExpertStore | None
    settings: ExpertSettings
    dtype: torch.dtype
    sizes: EngineSizes
    pool: GpuExpertPool | None = None


@dataclass(frozen=True)
class _RankMemory:
    """Layers of a rank (None for all), its free memory in bytes, and its cache shapes."""

    layers: range | None
    free: int
    shapes: list[Any]


def free_model_memory(checkpoint: Checkpoint, device: torch.device) -> int:
    """Return the free memory in bytes; on a GPU, less the weights."""
    return free_nbytes() if device.type == "cpu" else free_device_nbytes(device) - loaded_nbytes(checkpoint.sizes())


def plan_memory(
    source: ModelSource,
    device: torch.device,
    free: int,
    requested: RequestedSizes,
    expert_settings: ExpertSettings,
    leader: Leader | None,
) -> MemoryBudget:
    """Plan the memory of all ranks; refuse sizes that do not fit before any weights are loaded."""
    ranks, page_shard = [_RankMemory(None, free, [*source.shapes, *source.mtp_shapes])], UNSHARDED
    if leader is not None:
        sizes = layer_sizes(source.checkpoint, source.module.rename, source.config.layers)
        ranks, page_shard = [_RankMemory(*each) for each in leader.assign_layers(sizes, source.shapes)], leader.page_shard
        if device.type == "cuda":
            ranks = [_less_weights(rank, sizes, source.checkpoint, leader.mesh.width) for rank in ranks]
        free = ranks[0].free
    settings, why = balance_experts(source.checkpoint, expert_settings, leader, device)
    # in one stage, a rank has every layer that the checkpoint names, also the MTP head
    layers = None if leader is None or leader.single_stage else leader.local_layers
    experts = open_experts(source.checkpoint, settings, device, free, layers, source.unused_prefixes)
    if experts is not None:
        experts.notes += why
        reserved = experts.plan.nbytes
        ranks = [_RankMemory(rank.layers, max(rank.free - reserved, rank.free // 2), rank.shapes) for rank in ranks]
    dtype, chunk = activation_dtype(device), requested.chunk or _default_chunk(source, requested, experts)
    longest = min(
        _context(requested.context, source.config.context, rank, source.settings, dtype, page_shard) for rank in ranks
    )
    # one more for `LanguageModel.logits`
    count = requested.sequences + 1
    memory = [(rank, cache_memory_nbytes(requested.cache_memory, rank.free)) for rank in ranks]
    for rank, nbytes in memory:
        _check_cache_memory(nbytes, rank.free)
    options: dict[str, Any] = {"chunk": chunk, "sequences": count, "cached_sequences": requested.sequences, "dtype": dtype}
    if requested.context is None:
        longest = min(_held_context(rank, nbytes, longest, source.settings, page_shard, options) for rank, nbytes in memory)
    limits = [(rank.shapes, source.settings, nbytes, rank.layers, page_shard) for rank, nbytes in memory]
    tokens = min(pool_tokens(*limit, context=longest, **options) for limit in limits)
    engine_sizes = EngineSizes(longest, chunk, count, requested.sequences, tokens)
    return MemoryBudget(
        source.shapes if leader is None else ranks[0].shapes, ranks[0].layers, experts, settings, dtype, engine_sizes
    )


def _default_chunk(source: ModelSource, requested: RequestedSizes, experts: ExpertStore | None) -> int:
    """Return the tokens of a prefill chunk: more where each chunk reads the experts from disk again."""
    if experts is None or experts.plan.mapped:
        return requested.default_chunk
    # a kernel writes the output of every (token, expert) pair in float32
    token_nbytes = 4 * experts_per_token(source.checkpoint.config) * source.config.hidden
    return max(requested.default_chunk, min(DISK_CHUNK, DISK_CHUNK_NBYTES // token_nbytes))


def _less_weights(rank: _RankMemory, sizes: LayerSizes, checkpoint: Checkpoint, width: int) -> _RankMemory:
    """Subtract the weights from a rank's GPU memory; ranks of a stage count as having equal shares."""
    assert rank.layers is not None
    # packed experts have a budget of their own
    loaded = loaded_nbytes(checkpoint.sizes()) / max(sizes.of(range(len(sizes.layers))), 1)
    return replace(rank, free=rank.free - int(sizes.of(rank.layers) * loaded) // width)


def _context(
    requested: int | None, trained: int, rank: _RankMemory, settings: CacheSettings, dtype: torch.dtype, page_shard: PageShard
) -> int:
    """Return the maximum tokens of a sequence; refuse cache settings that the layers do not support."""
    # the meta device allocates no memory
    cache = Cache(rank.shapes, settings, context=1, local_layers=rank.layers, page_shard=page_shard, dtype=dtype, device="meta")
    per_token = cache.local_token_nbytes
    if requested is not None:
        memory_nbytes = this_machine().memory_nbytes
        if requested * max(per_token, 1) > memory_nbytes:
            raise SettingsError(
                f"context={requested} needs {requested * max(per_token, 1) / 1e9:,.0f} GB, and this machine has "
                f"{memory_nbytes / 1e9:,.0f} GB. Give a shorter context."
            )
        return requested
    return max(1, min(trained, rank.free // CONTEXT_SHARE // max(per_token, 1)))


def _held_context(
    rank: _RankMemory, nbytes: int | None, context: int, settings: CacheSettings, page_shard: PageShard, options: dict[str, Any]
) -> int:
    """Return the default context, or the shorter one that the KV cache of so many bytes holds."""
    if nbytes is None:
        return context
    held = max_tokens(
        rank.shapes, settings, nbytes, local_layers=rank.layers, page_shard=page_shard, context=context, **options
    )
    # a cache that holds less is refused
    return min(context, held) if held >= LEAST_CONTEXT else context


def cache_memory_nbytes(requested: str | int | None, free: int) -> int | None:
    """Return the bytes of the KV cache that were requested, given the free memory; None for no limit."""
    if requested is None:
        return None
    return free // 2 if requested == "half" else parse_nbytes(requested)


def _check_cache_memory(nbytes: int | None, free: int) -> None:
    """Refuse a KV cache that exceeds the free memory: it would be allocated, and fail while sequences run."""
    if nbytes is not None and nbytes > free:
        raise SettingsError(
            f"cache_memory={format_nbytes(nbytes)} is more than the {format_nbytes(max(0, free))} of free memory. Give less, "
            f"or 'half' of what is free."
        )


def pool_tokens(
    shapes: list[Any],
    settings: CacheSettings,
    nbytes: int | None,
    layers: range | None = None,
    page_shard: PageShard = UNSHARDED,
    *,
    context: int,
    chunk: int,
    sequences: int,
    cached_sequences: int,
    dtype: torch.dtype,
) -> int:
    """Return the tokens of all sequences that fit into the KV cache; without a limit, two sequences of full context."""
    if nbytes is None:
        return 2 * context
    sizes = {"context": context, "chunk": chunk, "sequences": sequences, "cached_sequences": cached_sequences, "dtype": dtype}
    most = max_tokens(shapes, settings, nbytes, local_layers=layers, page_shard=page_shard, **sizes)
    if most < context:
        raise SettingsError(
            f"cache_memory={nbytes} holds {most} tokens in addition to the windows and states of {sequences} sequences, "
            f"fewer than the context of {context}. Give more memory, fewer sequences, or a shorter context."
        )
    return min(most, context * (sequences + cached_sequences))


def max_tokens(shapes: list[Any], settings: CacheSettings, nbytes: int, **options: Any) -> int:
    """Return the tokens that a KV cache of so many bytes holds, besides windows and states; at least a page."""
    # the meta device allocates no memory
    smallest = Cache(shapes, settings, tokens=1, **options, device="meta")
    return max(1, (nbytes - smallest.reserved_nbytes) // max(smallest.page_nbytes, 1)) * smallest.page


def balance_experts(
    checkpoint: Checkpoint, settings: ExpertSettings, leader: Leader | None, device: torch.device
) -> tuple[ExpertSettings, list[str]]:
    """Decide whether ranks balance experts per step, which needs reads from disk and equal rounding; return also notes."""
    files, requested = checkpoint.experts, settings.balance == "on"
    if leader is None or EXPERTS not in leader.mesh.modes:
        if requested:
            raise SettingsError("--expert-balance on needs expert parallelism. Give --parallel experts=2, or omit it.")
        return settings, []
    if files is None or settings.balance == "off":
        return settings, []
    k = experts_per_token(checkpoint.config)
    reason = None
    layers = [None] * leader.mesh.size if leader.single_stage else leader.layers
    cached = [(files.within(some), settings.nbytes(free)) for some, free in zip(layers, leader.memory, strict=True)]
    if device.type == "cuda":
        reason = "balanced experts run on CPUs only"
    elif not requested and any(plan_expert_cache(some, k, nbytes, settings.io).mapped for some, nbytes in cached if some.files):
        reason = "the expert files are memory-mapped"
    elif leader.numeric_mismatch is not None:
        reason = f"ranks round differently ({leader.numeric_mismatch})"
    if reason is not None:
        if requested:
            raise SettingsError(f"--expert-balance on is not possible: {reason}. Omit it.")
        return replace(settings, balance="off"), [f"experts: each rank runs a fixed share, because {reason}."]
    leader.balanced = True
    count = leader.mesh.width
    return replace(settings, io="direct", balance="on"), [f"experts: cache misses are balanced over {count} ranks."]


def open_experts(
    checkpoint: Checkpoint,
    settings: ExpertSettings,
    device: torch.device,
    free: int,
    layers: range | None = None,
    unused_prefixes: tuple[str, ...] = (),
) -> ExpertStore | None:
    """Open the expert store of a packed model, or of some of its layers, within the free memory; None for other models."""
    files = None if checkpoint.experts is None else checkpoint.experts.within(layers).without(unused_prefixes)
    if files is not None and not files.files:
        return None
    if files is None:
        # all experts of such a model are computed on the device
        if replace(settings, compute="auto") != ExpertSettings():
            raise SettingsError(
                f"{checkpoint.path} is not packed, so all of its experts are loaded into memory. To offload experts to disk, "
                f"run 'auraflux pack' on it first."
            )
        return None
    share = plan_expert_cache(files, experts_per_token(checkpoint.config), settings.nbytes(free), settings.io)
    return ExpertStore(files, share, settings, device=device, host_nbytes=settings.host_nbytes(free_nbytes()))
