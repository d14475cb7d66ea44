"""Division of a GPU's memory between weights, KV cache, workspace and expert slots.

Everything is resident if it fits. Otherwise the experts of a mixture move to host memory: the KV cache is planned first, and
expert slots get the rest. The CUDA context is outside of the division.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from auraflux.errors import SettingsError
from auraflux.loading.gpu_sizes import ExpertSizes, GpuSizes
from auraflux.weights.experts.settings import format_nbytes

SMALL_GPU_NBYTES = 16 * 10**9
SMALL_GPU_CHUNK = 4096  # most tokens of a prefill chunk on such a GPU, if not everything fits with longer ones
MIN_CONTEXT = 4096  # tokens of two sequences that must fit before all weights are resident
KV_SHARE = 4  # with experts in host memory, two sequences of the default context take at most one in so much
HOST_RESERVE_NBYTES = 10**9  # host memory that experts leave to everything else


@dataclass(frozen=True)
class GpuDivision:
    """A GPU's memory by part, in bytes.

    total      memory that is divided
    weights    resident weights; all, or all but experts
    workspace  activations of a prefill chunk, CUDA graphs and other models
    cache      KV cache, at most
    slots      expert slots; None if all experts are resident
    chunk      tokens of a prefill chunk
    for_cache  memory by which the KV cache is planned: it takes this much, or a share
    """

    total: int
    weights: int
    workspace: int
    cache: int
    slots: int | None
    chunk: int
    for_cache: int

    @property
    def free(self) -> int:
        """Bytes for the KV cache and expert slots."""
        return self.total - self.weights - self.workspace


@dataclass(frozen=True)
class GpuRequest:
    """Requested division of a GPU's memory, in bytes.

    total         memory to divide
    capped        the user gave the total; otherwise it is the free memory
    chunk         tokens of a prefill chunk
    chunk_given   the user gave the chunk
    slots         memory for expert slots; None for what is left
    other_models  memory that other models will need, such as a draft model
    """

    total: int
    capped: bool
    chunk: int
    chunk_given: bool = False
    slots: int | None = None
    other_models: int = 0


CacheNbytes = Callable[[int, int], int]


def divide(sizes: GpuSizes, request: GpuRequest, cache_nbytes: CacheNbytes, min_cache: int) -> GpuDivision:
    """Divide a GPU's memory; refuse one that is too small, and say how much is enough.

    cache_nbytes  returns the bytes of the KV cache for so many free bytes and tokens of a prefill chunk
    min_cache     bytes of the smallest KV cache that is worth while
    """
    experts, total, chunk = sizes.experts, request.total, request.chunk
    small = chunk if request.chunk_given or total > SMALL_GPU_NBYTES else min(chunk, SMALL_GPU_CHUNK)
    if request.slots is None and total - sizes.total - sizes.workspace(chunk) - request.other_models < min_cache:
        chunk = small
    workspace = sizes.workspace(chunk) + request.other_models
    free = total - sizes.total - workspace
    if experts is None or (request.slots is None and free >= min_cache) or (request.slots or 0) >= experts.total:
        # without a cap the estimate may be too high, and the GPU decides
        if (request.capped and free < min_cache) or min_cache > total:
            raise _too_small(total, sizes.total, workspace, min_cache, 0)
        return GpuDivision(total, sizes.total, workspace, max(0, free), None, chunk, max(0, free))
    return _divide_pooled(sizes, experts, replace(request, chunk=small), cache_nbytes, min_cache)


def _divide_pooled(
    sizes: GpuSizes, experts: ExpertSizes, request: GpuRequest, cache_nbytes: CacheNbytes, min_cache: int
) -> GpuDivision:
    """Divide the memory of a GPU that holds some of the experts."""
    chunk, least = request.chunk, experts.min_nbytes
    workspace = sizes.streaming_workspace(chunk) + request.other_models
    free = request.total - sizes.weights - workspace
    if request.slots is not None and request.slots < least:
        raise SettingsError(
            f"{format_nbytes(request.slots)} of GPU memory for experts is too little: a token uses {experts.k} experts of "
            f"{format_nbytes(experts.nbytes)} in each of {experts.layers} layers. Give --expert-memory "
            f"{format_nbytes(least)} or more."
        )
    for_cache = free - (request.slots or 0)
    cache = cache_nbytes(for_cache, chunk)
    if request.slots is None and free - cache < least:
        # a shorter context before fewer experts than a token uses
        for_cache = free - least
        cache = cache_nbytes(for_cache, chunk)
    slots = free - cache if request.slots is None else request.slots
    if slots < least or slots + cache > free:
        raise _too_small(request.total, sizes.weights, workspace, max(cache, min_cache), max(request.slots or 0, least))
    return GpuDivision(request.total, sizes.weights, workspace, cache, min(slots, experts.total), chunk, for_cache)


def _too_small(total: int, weights: int, workspace: int, cache: int, slots: int) -> SettingsError:
    parts = {"weights": weights, "KV cache": cache, "workspace": workspace, "expert slots": slots}
    listed = ", ".join(f"{format_nbytes(nbytes)} for {name}" for name, nbytes in parts.items() if nbytes)
    return SettingsError(
        f"{format_nbytes(max(total, 0))} of GPU memory is too little: at least {format_nbytes(sum(parts.values()))} is needed, "
        f"{listed}. Give --gpu-memory that much if the GPU has it, a shorter --context, or fewer bits (--quantize 4)."
    )
