"""The kernels that the steps of real models launch, compiled without a GPU: `python -m auraflux.bench.gpu.steps`.

All of them are on the critical path. A model of a few layers is made of fake tensors (`ops/fake_tensor.py`) and runs prefill
and decode as on Hopper, or as on another GPU with `--gpu`.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from auraflux.bench.random_weights import RandomWeights
from auraflux.bench.shapes import MAIN_SHAPES, shape_of
from auraflux.cache import Cache, CacheSettings
from auraflux.defaults import KV
from auraflux.models import family
from auraflux.ops import exact
from auraflux.ops._dispatch import use_backend
from auraflux.ops.fake_gpu import HOPPER, Capability, use_fake_gpu
from auraflux.ops.gpu.capture import GPUS, KernelVariant, capture_variants
from auraflux.ops.gpu.compile import Wanted, command
from auraflux.quant import QTensor
from auraflux.weights.formats.stored import Stored

LAYERS = {"qwen3.6-35b-a3b": 4, "deepseek-v3-4layer": 2}  # enough for every kind of layer; of other models one is enough
STEPS = ((1, 1), (8, 1), (32, 1), (1, 64), (1, 512), (1, 2048))  # sequences and new tokens of each
BEFORE = 1024  # tokens of a sequence that decodes
BF16, CPU = torch.bfloat16, torch.device("cpu")


class RowWeights(RandomWeights):
    """Weights on a CPU in the row-major layout of a GPU."""

    def to_kernel_layout(self, found: Stored, in_order: bool = False) -> Stored:
        return found if isinstance(found, QTensor) else found.to(self.dtype)

    def stack(self, name: str, count: int, source: Any) -> Stored:
        """Return all experts' matrices, uninitialized."""
        first = self.to_kernel_layout(source.matrix(0))
        if not isinstance(first, QTensor):
            return first.new_empty(count, *first.shape)
        packed, scales = (part.new_empty(count, *part.shape) for part in (first.packed, first.scales))
        biases = None if first.biases is None else torch.empty_like(scales)
        return QTensor(packed, scales, biases, first.bits, first.group, (count, *first.shape))


def step_builds(name: str, bits: int | None = 4, kv: str = KV, gpu: Capability = HOPPER) -> list[KernelVariant]:
    """Return the kernels that decode and prefill of a named shape launch, with weights of `bits` bits and this KV format."""
    with capture_variants() as builds, use_fake_gpu(gpu), use_backend("cuda"), exact(False):
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
        hidden = model.forward(torch.zeros(count * sequences, dtype=torch.int64), batch, cache)
    model.logits(hidden[:sequences])


def shape_builds(source: str, gpus: Sequence[Capability] = GPUS) -> list[Wanted]:
    """Return all kernels of a shape, the source, on the first of some GPUs, with 4-bit and with 8-bit weights."""
    found = [build for bits, kv in ((4, KV), (8, "none")) for build in step_builds(source, bits, kv, gpus[0])]
    return [Wanted(build, critical=True) for build in {repr(build): build for build in found}.values()]


if __name__ == "__main__":
    sys.exit(command("auraflux.bench.gpu.steps", __doc__ or "", list(MAIN_SHAPES), shape_builds, sys.argv[1:]))
