"""Models with random weights, made directly in packed form on their device: no checkpoint, no dense copy."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from auraflux.bench.outline_sizes import outline_sizes
from auraflux.bench.routing import RandomRouting, TracedRouting
from auraflux.cache import Cache, CacheSettings
from auraflux.engine import calibration
from auraflux.engine.calibrate import FEW_TOKENS, calibrate_keys, random_tokens
from auraflux.engine.device import activation_dtype, check_fp8, chunk_for, device_memory, preload_kernels
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError, InputError
from auraflux.loading.gpu_division import GpuDivision, GpuRequest, divide
from auraflux.loading.gpu_plan import check_host_memory, make_pool
from auraflux.loading.gpu_sizes import ExpertSizes
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.memory_budget import pool_tokens
from auraflux.machine import free_nbytes, usable_cores
from auraflux.models import family, family_name
from auraflux.models.config import experts_per_token, has_experts
from auraflux.quant import QTensor
from auraflux.quant.qtensor import check_format
from auraflux.scheduler.scheduler import Scheduler
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.pool.load_pool import MAX_THREADS, Matrices
from auraflux.weights.experts.settings import ExpertSettings
from auraflux.weights.experts.stacks import ExpertSource
from auraflux.weights.formats.stored import Stored
from auraflux.weights.loader import Weights
from auraflux.weights.names import ROUTERS

ONES = re.compile(r"norm\.weight$")
THERE = re.compile(r"(switch_mlp|switch_glu|experts)\.(gate|up)_proj\.weight$")
FEW_ROWS = 1 << 12  # stand for a table that stays on disk
GROUP = 64  # weights that share a scale
SPREAD = 0.1  # standard deviation of vectors other than norms


class RandomRows:
    """A table of any size whose rows are taken from a few; none is read from disk."""

    def __init__(self, few: Tensor):
        self.few = few

    def fetch(self, ids: Tensor) -> "RandomRows":
        """Select rows: int64 [n]."""
        return RandomRows(self.few[ids.to(self.few.device) % len(self.few)])

    def result(self) -> Tensor:
        """Return the selected rows: float32 [n, width]."""
        return self.few


class Nothing:
    """A checkpoint without tensors."""

    path, form, experts = Path("random weights"), "mlx", None

    def sizes(self) -> dict[str, int]:
        return {}


class RandomWeights(Weights):
    """Random weights of any name and shape: matrices as codes of `bits` bits, or dense where that is None.

    routing  how tokens choose experts; None for weights of the usual size, where the context chooses nearly the same ones for
             all tokens
    """

    def __init__(
        self,
        bits: int | None,
        group: int,
        dtype: torch.dtype,
        device: torch.device,
        seed: int = 0,
        routing: RandomRouting | None = None,
    ):
        if bits is not None:
            check_format(bits, group)
        super().__init__(Nothing(), lambda name: name, bits=bits, group=group, dtype=dtype, device=device)  # type: ignore[arg-type]
        # the meta device has no generator, and takes the CPU's
        self._generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)
        self._rows: Tensor | None = None
        self.routing = routing

    def has(self, name: str) -> bool:
        return THERE.search(name) is not None

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        # some rows are like any others
        return super().matrix(name, rows, width, None, in_order)

    def _take(self, name: str, shape: tuple[int | None, ...], index: int | None = None) -> Stored:
        found = self._drawn(name, shape, index)
        return found if self.routing is None else self.routing.adapt(name, found, self._normal)

    def _drawn(self, name: str, shape: tuple[int | None, ...], index: int | None) -> Stored:
        sizes = [size or 1 for size in (shape if index is None else shape[1:])]
        if len(sizes) == 1:
            return torch.ones(sizes, device=self.device) if ONES.search(name) else SPREAD * self._normal(sizes)
        if self.bits is None or ROUTERS.search(name) or len(sizes) > 2 or sizes[-1] % self.group:
            return (self._normal(sizes) * sizes[-1] ** -0.5).to(self.dtype)
        return self._codes(sizes[0], sizes[1])

    def load_blobs(
        self,
        name: str,
        rows: Tensor,
        stored: Callable[[int], Matrices],
        convert: Callable[[Matrices], Matrices],
        like: Matrices,
    ) -> None:
        """Write experts into rows of host memory: those of the first layer, which serve all others of their size."""
        if self._rows is None or self._rows.shape != rows.shape:
            self._rows = rows
            super().load_blobs(name, rows, stored, convert, like)
        else:
            copy_rows(self._rows, rows)

    def indices(self, name: str, *shape: int, below: int) -> Tensor:
        """Return uniform random integers."""
        return torch.randint(0, below, shape, dtype=torch.int32, device=self.device, generator=self._generator)

    def table(self, name: str, least: int, width: int) -> RandomRows:
        """Return a table of a few rows that stand for all."""
        return RandomRows(self._normal([FEW_ROWS, width]))

    def scalar(self, name: str) -> float:
        """Return 1, since numbers are factors."""
        return 1.0

    def _codes(self, rows: int, width: int) -> QTensor:
        """Return uniform random codes, scaled so that products keep the variance of their input."""
        assert self.bits is not None
        words = (rows, width * self.bits // 32)
        low, high = -(2**31), 2**31 - 1
        packed = torch.randint(low, high, words, dtype=torch.int32, device=self.device, generator=self._generator)
        levels = 2**self.bits
        spread = ((levels**2 - 1) / 12) ** 0.5
        scales = torch.full((rows, width // self.group), 1 / (spread * width**0.5), dtype=torch.bfloat16, device=self.device)
        return QTensor(packed, scales, scales * (-(levels - 1) / 2), self.bits, self.group, (rows, width))

    def _normal(self, sizes: list[int]) -> Tensor:
        return torch.randn(sizes, device=self.device, generator=self._generator)


def copy_rows(source: Tensor, target: Tensor) -> None:
    """Copy a large matrix with several threads, which also allocate the pages of the target."""
    parts = min(MAX_THREADS, usable_cores(), len(source))
    with ThreadPoolExecutor(parts) as threads:
        list(threads.map(lambda pair: pair[1].copy_(pair[0]), zip(source.chunk(parts), target.chunk(parts), strict=True)))


class Outlines(RandomWeights):
    """Random weights on the meta device, without memory, in the layout of CPU ("cpu") or GPU ("cuda") kernels."""

    def __init__(self, bits: int | None, group: int, layout: str):
        super().__init__(bits, group, activation_dtype(torch.device(layout)), torch.device("meta"))
        self.layout = layout

    def stack(self, name: str, count: int, source: ExpertSource) -> Stored:
        """Return all experts' matrices of one projection, shaped like the first expert's."""
        first = self.to_kernel_layout(source.matrix(0))
        if isinstance(first, Tensor):
            return first.new_empty(count, *first.shape)
        return first.empty_stack(count)


@dataclass(frozen=True)
class RandomExperts:
    """Experts of a random model.

    routing  see `RandomWeights`
    gpu      GPU memory to divide; experts that have no room are in host memory. None for resident experts
    compute  see `ExpertSettings`
    """

    routing: RandomRouting | None = None
    gpu: GpuRequest | None = None
    compute: str = "auto"


class Numerics(NamedTuple):
    """Precision of an engine, see `Engine`."""

    exact: bool = False
    invariant: bool = False
    fp8: bool = False


def random_language(
    config: dict[str, Any],
    settings: CacheSettings,
    device: torch.device,
    *,
    bits: int | None = 4,
    context: int,
    sequences: int = 1,
    cache_nbytes: int | None = None,
    calibrate: str = "off",
    numerics: Numerics = Numerics(),  # noqa: B008
    graphs: bool = True,
    experts: RandomExperts = RandomExperts(),  # noqa: B008
) -> LanguageModel:
    """Make a language model of a shape (`bench/shapes/`) without a tokenizer, for `sequences` sequences at once.

    context       most tokens of a sequence
    cache_nbytes  of the KV cache; by default enough for all sequences at full length
    calibrate     "off", or any other value to calibrate its keys
    numerics      of the engine
    experts       routing and memory of experts
    """
    if isinstance(experts.routing, TracedRouting):
        _check_trace(experts.routing, config)
    if numerics.fp8:
        check_fp8(device)
    # as a checkpoint's weights are loaded
    preload_kernels(device)
    dtype, settings = activation_dtype(device), settings.for_family(family_name(config)).for_device(device.type)
    sizes: dict[str, Any] = {"context": context, "sequences": sequences + 1, "dtype": dtype}
    sizes["chunk"] = chunk_for(device, numerics.invariant)
    if cache_nbytes is not None:
        shapes = cache_shapes(config)
        sizes["tokens"] = pool_tokens(shapes, settings, cache_nbytes, cached_sequences=0, **sizes)
    pool = None
    if experts.gpu is not None:
        request = replace(experts.gpu, chunk=sizes["chunk"])
        pool, sizes["chunk"] = _divide(config, bits, request, settings, sizes, device, experts.compute)
    with device_memory():
        weights = RandomWeights(bits, GROUP, dtype, device, routing=experts.routing)
        weights.expert_pool = pool
        model, shapes = _filled(config, weights)
        if pool is not None:
            pool.finish()
        if calibration.is_needed(calibrate, shapes, settings):
            tokens = random_tokens(FEW_TOKENS, model.config.vocab)
            sizes["key_calibration"] = calibrate_keys(model, shapes, tokens, dtype, device, ahead=True)
        graphs = graphs and (pool is None or pool.pinned or pool.resident)
        engine = Engine(model, shapes, settings, **sizes, **numerics._asdict(), graphs=graphs, device=device)
    if pool is not None:
        engine.use_pool(pool)
    scheduler = Scheduler(engine, None, frozenset(), max_sequences=sequences)
    notes = [] if pool is None else pool.notes
    return LanguageModel(scheduler, Path("random weights"), notes, pool, model_type=config["model_type"])


def _check_trace(trace: TracedRouting, config: dict[str, Any]) -> None:
    """Refuse a trace of routing that the model of a shape cannot follow."""
    if not has_experts(config):
        raise InputError(f"a trace of routing needs a mixture of experts; {config['model_type']!r} is dense.")
    made = family(config).Config.from_hf(config)
    if made.tied:
        raise InputError("a trace of routing needs an LM head of its own; the shape's is tied to the embedding.")
    trace.check(experts_per_token(config), made.hidden, made.vocab)


def _divide(
    config: dict[str, Any],
    bits: int | None,
    request: GpuRequest,
    settings: CacheSettings,
    sizes: dict[str, Any],
    device: torch.device,
    compute: str,
) -> tuple[GpuExpertPool | None, int]:
    """Divide a GPU's memory; return the pool of experts, None if all are resident, and the tokens of a prefill chunk."""
    division, experts = divide_memory(config, bits, request, settings, sizes)
    if division.slots is None or experts is None:
        return None, division.chunk
    check_host_memory(experts, free_nbytes())
    return make_pool(experts, division.slots, device, ExpertSettings(compute=compute)), division.chunk


def divide_memory(
    config: dict[str, Any], bits: int | None, request: GpuRequest, settings: CacheSettings, sizes: dict[str, Any]
) -> tuple[GpuDivision, ExpertSizes | None]:
    """Divide a GPU's memory for a shape; return the division and the sizes of the experts, None without any.

    sizes  arguments of `Cache`
    """
    model, shapes = outlined_model(config, bits, GROUP, "cuda")
    gpu_sizes = outline_sizes(model, experts_per_token(config) if has_experts(config) else 0)

    def cache_nbytes(free: int, chunk: int) -> int:
        return Cache(shapes, settings, **{**sizes, "chunk": chunk}, device="meta").reserved_nbytes

    return divide(gpu_sizes, request, cache_nbytes, cache_nbytes(0, request.chunk)), gpu_sizes.experts


def cache_shapes(config: dict[str, Any]) -> list[Any]:
    """Return the cache shapes of a shape's layers."""
    module = family(config)
    return module.make_caches(module.Config.from_hf(config))


def random_model(
    config: dict[str, Any], bits: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[Any]]:
    """Make a model of a shape (`bench/shapes/`), and the shapes of its layers' caches."""
    return _filled(config, RandomWeights(bits, group, dtype, device))


def outlined_model(config: dict[str, Any], bits: int | None, group: int, layout: str) -> tuple[Any, list[Any]]:
    """Make a model without memory, see `Outlines`."""
    return _filled(config, Outlines(bits, group, layout))


def _filled(config: dict[str, Any], weights: RandomWeights) -> tuple[Any, list[Any]]:
    module = family(config)
    settings = module.Config.from_hf(config)
    if settings.hidden % weights.group:
        raise FormatError(f"groups of {weights.group} do not divide the width {settings.hidden}.")
    return module.Model(settings, weights), module.make_caches(settings)
