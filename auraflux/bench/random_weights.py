"""Models with random weights, made directly in packed form on their device: no checkpoint, no dense copy."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.engine import calibration
from auraflux.engine.calibrate import FEW_TOKENS, calibrate_keys, random_tokens
from auraflux.engine.device import activation_dtype, chunk_for, device_memory
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.memory_budget import pool_tokens
from auraflux.models import family, family_name
from auraflux.quant import QTensor
from auraflux.quant.qtensor import check_format
from auraflux.scheduler.scheduler import Scheduler
from auraflux.weights.experts.stacks import ExpertSource
from auraflux.weights.formats.stored import Stored
from auraflux.weights.loader import Weights
from auraflux.weights.names import ROUTERS

ONES = re.compile(r"norm\.weight$")
THERE = re.compile(r"(switch_mlp|switch_glu|experts)\.(gate|up)_proj\.weight$")
FEW_ROWS = 1 << 12  # stand for a table that stays on disk
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
    """Random weights of any name and shape: matrices as codes of `bits` bits, or dense where that is None."""

    def __init__(self, bits: int | None, group: int, dtype: torch.dtype, device: torch.device, seed: int = 0):
        if bits is not None:
            check_format(bits, group)
        super().__init__(Nothing(), lambda name: name, bits=bits, group=group, dtype=dtype, device=device)  # type: ignore[arg-type]
        # the meta device has no generator, and takes the CPU's
        self._generator = torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)

    def has(self, name: str) -> bool:
        return THERE.search(name) is not None

    def matrix(self, name: str, rows: int, width: int, take: Tensor | None = None, in_order: bool = False) -> Stored:
        # some rows are like any others
        return super().matrix(name, rows, width, None, in_order)

    def _take(self, name: str, shape: tuple[int | None, ...], index: int | None = None) -> Stored:
        sizes = [size or 1 for size in (shape if index is None else shape[1:])]
        if len(sizes) == 1:
            return torch.ones(sizes, device=self.device) if ONES.search(name) else SPREAD * self._normal(sizes)
        if self.bits is None or ROUTERS.search(name) or len(sizes) > 2 or sizes[-1] % self.group:
            return (self._normal(sizes) * sizes[-1] ** -0.5).to(self.dtype)
        return self._codes(sizes[0], sizes[1])

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


def random_language(
    config: dict[str, Any],
    settings: CacheSettings,
    device: torch.device,
    *,
    bits: int | None = 4,
    group: int = 64,
    context: int,
    sequences: int = 1,
    cache_nbytes: int | None = None,
    calibrate: str = "off",
    exact: bool = False,
    invariant: bool = False,
    graphs: bool = True,
) -> LanguageModel:
    """Make a language model of a shape (`bench/shapes/`) without a tokenizer, for `sequences` sequences at once.

    context       most tokens of a sequence
    cache_nbytes  of the KV cache; by default enough for all sequences at full length
    calibrate     "off", or any other value to calibrate its keys
    """
    dtype, settings = activation_dtype(device), settings.for_family(family_name(config))
    with device_memory():
        model, shapes = random_model(config, bits, group, dtype, device)
        sizes: dict[str, Any] = {"context": context, "sequences": sequences + 1, "dtype": dtype}
        sizes["chunk"] = chunk_for(device, invariant)
        if cache_nbytes is not None:
            sizes["tokens"] = pool_tokens(shapes, settings, cache_nbytes, **sizes)
        if calibration.is_needed(calibrate, shapes, settings):
            tokens = random_tokens(FEW_TOKENS, model.config.vocab)
            sizes["vectors"] = calibrate_keys(model, shapes, tokens, dtype, device)
        engine = Engine(model, shapes, settings, **sizes, exact=exact, invariant=invariant, graphs=graphs, device=device)
    scheduler = Scheduler(engine, None, frozenset(), max_sequences=sequences)
    return LanguageModel(scheduler, Path("random weights"), [], model_type=config["model_type"])


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
