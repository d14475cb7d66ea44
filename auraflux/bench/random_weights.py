"""Models of random weights, made in packed form where they will be used: no checkpoint is needed, and no dense copy."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.errors import FormatError
from auraflux.models import family, family_name
from auraflux.quant import QTensor
from auraflux.quant.qtensor import check_format
from auraflux.run import calibration
from auraflux.run.calibrate import FEW, find_vectors, random_tokens
from auraflux.run.device import activation_dtype, chunk_for, device_memory
from auraflux.run.engine import Engine
from auraflux.run.fit import pool_tokens
from auraflux.run.language import LanguageModel
from auraflux.run.scheduler import Scheduler
from auraflux.weights.loader import Weights
from auraflux.weights.names import ROUTERS
from auraflux.weights.stacks import Source
from auraflux.weights.stored import Stored

ONES = re.compile(r"norm\.weight$")
THERE = re.compile(r"(switch_mlp|switch_glu|experts)\.(gate|up)_proj\.weight$")
FEW_ROWS = 1 << 12  # of a table that stays on disk
SPREAD = 0.1  # of vectors that are no norms


class RandomRows:
    """A table of any size that says little: each row is one of a few, and none is read from disk."""

    def __init__(self, few: Tensor):
        self.few = few

    def fetch(self, ids: Tensor) -> "RandomRows":
        """Choose rows: int64 [n]."""
        return RandomRows(self.few[ids.to(self.few.device) % len(self.few)])

    def result(self) -> Tensor:
        """What was chosen: float32 [n, width]."""
        return self.few


class Nothing:
    """A checkpoint without tensors."""

    path, form, experts = Path("random weights"), "mlx", None

    def sizes(self) -> dict[str, int]:
        return {}


class RandomWeights(Weights):
    """Gives whatever a model asks for: matrices as random codes of `bits` bits, or dense where that is None."""

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
        """Whole numbers of equal chance."""
        return torch.randint(0, below, shape, dtype=torch.int32, device=self.device, generator=self._generator)

    def table(self, name: str, least: int, width: int) -> RandomRows:
        """A few rows that stand for all."""
        return RandomRows(self._normal([FEW_ROWS, width]))

    def number(self, name: str) -> float:
        """One, as numbers multiply something."""
        return 1.0

    def _codes(self, rows: int, width: int) -> QTensor:
        """Codes of equal chance, scaled so that a product with numbers about 1 gives numbers about 1."""
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
    """The same without memory, on the meta device, laid out as the kernels of a CPU ("cpu") or of a GPU ("cuda") read them."""

    def __init__(self, bits: int | None, group: int, layout: str):
        super().__init__(bits, group, activation_dtype(torch.device(layout)), torch.device("meta"))
        self.layout = layout

    def stack(self, name: str, count: int, source: Source) -> Stored:
        """All experts' matrices of one projection, of which only the first is asked for: the others are like it."""
        first = self.ready(source.matrix(0))
        if isinstance(first, Tensor):
            return first.new_empty(count, *first.shape)
        return first.stacked(count)


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
    """A model of a shape (`bench/shapes.py`) that reads and writes tokens as numbers, so many texts at once.

    context       most tokens of a text
    cache_nbytes  for all of them; by default as much as they take when all are so long
    calibrate     "off", or anything else to find the vectors of its keys
    """
    dtype, settings = activation_dtype(device), settings.for_family(family_name(config))
    with device_memory():
        model, shapes = random_model(config, bits, group, dtype, device)
        sizes: dict[str, Any] = {"context": context, "sequences": sequences + 1, "dtype": dtype}
        sizes["chunk"] = chunk_for(device, invariant)
        if cache_nbytes is not None:
            sizes["tokens"] = pool_tokens(shapes, settings, cache_nbytes, **sizes)
        if calibration.is_wanted(calibrate, shapes, settings):
            tokens = random_tokens(FEW, model.config.vocab)
            sizes["vectors"] = find_vectors(model, shapes, tokens, dtype, device)
        engine = Engine(model, shapes, settings, **sizes, exact=exact, invariant=invariant, graphs=graphs, device=device)
    scheduler = Scheduler(engine, None, frozenset(), parallel=sequences)
    return LanguageModel(scheduler, Path("random weights"), [], model_type=config["model_type"])


def random_model(
    config: dict[str, Any], bits: int | None, group: int, dtype: torch.dtype, device: torch.device
) -> tuple[Any, list[Any]]:
    """A model of a shape (`bench/shapes.py`), and the shapes of its layers' caches."""
    return _filled(config, RandomWeights(bits, group, dtype, device))


def outlined_model(config: dict[str, Any], bits: int | None, group: int, layout: str) -> tuple[Any, list[Any]]:
    """The same without memory, see `Outlines`."""
    return _filled(config, Outlines(bits, group, layout))


def _filled(config: dict[str, Any], weights: RandomWeights) -> tuple[Any, list[Any]]:
    module = family(config)
    settings = module.Config.from_hf(config)
    if settings.hidden % weights.group:
        raise FormatError(f"groups of {weights.group} do not divide the width {settings.hidden}.")
    return module.Model(settings, weights), module.make_caches(settings)
