"""Which builds of kernels the steps of real models launch, compiled without a GPU: `python -m auraflux.bench.gpu.steps`.

All of them are hot. A model of a few layers is made of tensors that are never filled (`ops/unfilled.py`); it reads prompts and
writes tokens as it would on Hopper.
"""

import sys
from typing import Any

import torch

from auraflux.bench.random_weights import RandomWeights
from auraflux.bench.shapes import SHAPES, shape_of
from auraflux.cache import Cache, CacheSettings
from auraflux.defaults import KV
from auraflux.models import family
from auraflux.ops import exact
from auraflux.ops._dispatch import use_backend
from auraflux.ops.assumed import assume_gpu
from auraflux.ops.hopper.capture import Build, captured
from auraflux.ops.hopper.compile import Wanted, command
from auraflux.quant import QTensor
from auraflux.weights.stored import Stored

LAYERS = {"qwen3.6-35b-a3b": 4, "deepseek-v3-4layer": 2}  # that have every kind there is; of other models one has
STEPS = ((1, 1), (8, 1), (32, 1), (1, 64), (1, 512), (1, 2048))  # sequences and new tokens of each
BEFORE = 1024  # tokens that a sequence has when it is written to
BF16, CPU = torch.bfloat16, torch.device("cpu")


class RowWeights(RandomWeights):
    """Weights on a CPU that lie as on a GPU, a row after the other."""

    def ready(self, found: Stored, in_order: bool = False) -> Stored:
        return found if isinstance(found, QTensor) else found.to(self.dtype)

    def stack(self, name: str, count: int, source: Any) -> Stored:
        """All experts' matrices, of which none is filled."""
        first = self.ready(source.matrix(0))
        if not isinstance(first, QTensor):
            return first.new_empty(count, *first.shape)
        packed, scales = (part.new_empty(count, *part.shape) for part in (first.packed, first.scales))
        biases = None if first.biases is None else torch.empty_like(scales)
        return QTensor(packed, scales, biases, first.bits, first.group, (count, *first.shape))


def step_builds(name: str, bits: int | None = 4, kv: str = KV) -> list[Build]:
    """What decoding and prefill of a named shape launch, with weights of so many bits and this kind of cache."""
    with captured() as builds, assume_gpu(), use_backend("cuda"), exact(False):
        config = shape_of(name, LAYERS.get(name, 1))
        module = family(config)
        settings = module.Config.from_hf(config)
        model, shapes = module.Model(settings, RowWeights(bits, 64, BF16, CPU)), module.make_caches(settings)
        for sequences, tokens in STEPS:
            sizes: dict[str, Any] = {"context": 4096, "sequences": sequences, "chunk": 2048 * sequences}
            _step(model, Cache(shapes, CacheSettings(kv), **sizes, dtype=BF16, device=CPU), sequences, tokens)
    return builds


def _step(model: Any, cache: Cache, sequences: int, tokens: int) -> None:
    batch = cache.batch([cache.open() for _ in range(sequences)])
    for count in (BEFORE, 1) if tokens == 1 else (tokens,):
        batch.extend([count] * sequences)
        hidden = model(torch.zeros(count * sequences, dtype=torch.int64), batch, cache)
    model.logits(hidden[:sequences])


def shape_builds(name: str) -> list[Wanted]:
    """All of a shape, with codes of four bits and with more."""
    found = [build for bits, kv in ((4, KV), (8, "none")) for build in step_builds(name, bits, kv)]
    return [Wanted(build, hot=True) for build in {repr(build): build for build in found}.values()]


if __name__ == "__main__":
    sys.exit(command("auraflux.bench.gpu.steps", __doc__ or "", list(SHAPES), shape_builds, sys.argv[1:]))
