"""`plan_model`: the memory that a model will take, before it is loaded next to others."""

from dataclasses import replace
from typing import NamedTuple

import torch

from auraflux.cache import Cache
from auraflux.engine.device import activation_dtype, chunk_for, find_device, free_device_nbytes
from auraflux.errors import SettingsError
from auraflux.loading.memory_budget import RequestedSizes, plan_memory
from auraflux.loading.model_source import ModelSource
from auraflux.loading.options import LoadOptions
from auraflux.progress import Report, on_terminal
from auraflux.weights.download.pull import locate
from auraflux.weights.experts.row_table import loaded_nbytes
from auraflux.weights.experts.settings import format_nbytes, parse_nbytes
from auraflux.weights.formats.checkpoint import open_checkpoint

# of a process without its model: Python, torch, compiled kernels, and buffers of a step
PROCESS_NBYTES = 768 << 20
# the KV cache takes at most this share of the memory of all models by default
CACHE_SHARE = 8
GPU_SHARE = 0.97


class PlannedMemory(NamedTuple):
    """Memory of a model: the device that has it, its bytes, and those that models may take; None for main memory."""

    device: str
    nbytes: int
    limit: int | None = None


def plan_model(
    name: str | None, options: LoadOptions, memory_nbytes: int, report: Report | None = None
) -> tuple[PlannedMemory, LoadOptions]:
    """Return the memory that a model takes of `memory_nbytes` for all models, and options with which it takes no more."""
    device = find_device(options.device)
    options.check()
    if device.type != "cpu":
        total = int(GPU_SHARE * free_device_nbytes(device))
        given = total if options.gpu_memory is None else parse_nbytes(options.gpu_memory)
        return PlannedMemory(str(device), given, total), options
    if options.ranks is not None:
        raise SettingsError("--parallel is not supported with several models in one server.")
    with on_terminal(report) as draw:
        path = locate(name, draw)
        draft = None if options.speculate in (None, "ngram", "mtp") else locate(str(options.speculate), draw)
    settings = options.cache_settings.for_device(device.type)
    source = ModelSource.open(path, settings, options.speculate == "mtp", None)
    fixed = PROCESS_NBYTES + loaded_nbytes(source.checkpoint.sizes())
    # a draft model has weights and a small cache of its own
    fixed += 0 if draft is None else loaded_nbytes(open_checkpoint(draft).sizes()) * 5 // 4
    spare = memory_nbytes - fixed
    if spare <= 0:
        needs = f"{path.name} needs {format_nbytes(fixed)} without its KV cache"
        raise SettingsError(f"{needs}, and the models of this server have {format_nbytes(memory_nbytes)} together.")
    experts = _expert_nbytes(source, options, spare)
    options = _within(options, spare - experts, memory_nbytes, experts)
    sizes = RequestedSizes(
        options.context, options.chunk, options.max_sequences, options.cache_memory, chunk_for(device, options.invariant)
    )
    budget = plan_memory(source, device, spare, sizes, options.expert_settings, None)
    cache = Cache(
        budget.shapes,
        source.settings,
        context=budget.sizes.context,
        sequences=budget.sizes.sequences,
        cached_sequences=budget.sizes.cached_sequences,
        tokens=budget.sizes.tokens,
        chunk=budget.sizes.chunk,
        dtype=activation_dtype(torch.device("cpu")),
        device="meta",
    )
    return PlannedMemory("cpu", fixed + experts + cache.reserved_nbytes), replace(options, context=budget.sizes.context)


def _expert_nbytes(source: ModelSource, options: LoadOptions, spare: int) -> int:
    """Return the bytes for the experts of a packed model."""
    return 0 if source.checkpoint.experts is None else options.expert_settings.nbytes(spare)


def _within(options: LoadOptions, spare: int, memory_nbytes: int, experts: int) -> LoadOptions:
    """Return options that name their memory, so that loading does not take what is free instead."""
    settings = options.expert_settings
    if experts:
        options = replace(options, expert_memory=replace(settings, memory=experts))
    if options.cache_memory in (None, "half"):
        options = replace(options, cache_memory=min(spare, memory_nbytes // CACHE_SHARE))
    return options
