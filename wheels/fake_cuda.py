"""A start of a server on a GPU that is not there: the kernels that its calibration and warm-up launch, found without launching.

The code of a start runs as on a GPU. Tensors of the device "cuda" are made on the CPU, large ones without content
(`ops/fake_tensor.py`), and launches are collected (`ops/gpu/capture.py`).
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from auraflux.bench.gpu.steps import BF16, CPU, LAYERS, RowWeights
from auraflux.bench.shapes import shape_of
from auraflux.cache import CacheSettings
from auraflux.defaults import KV
from auraflux.engine.calibrate import FEW_TOKENS, calibrate_keys, random_tokens
from auraflux.engine.device import CHUNK
from auraflux.engine.engine import Engine
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.warmup import launch_usual_steps
from auraflux.models import family, family_name
from auraflux.ops import exact
from auraflux.ops._dispatch import use_backend
from auraflux.ops.fake_gpu import Capability, use_fake_gpu
from auraflux.ops.fake_tensor import LARGE
from auraflux.ops.gpu.capture import KernelVariant, capture_variants
from auraflux.scheduler.scheduler import Scheduler

GPU = torch.device("cuda")
SEQUENCES = 64  # the default of a server on a GPU
CONTEXT = 4096
GROUP = 64
ATEN = torch.ops.aten
EMPTY_OPS = {ATEN.empty, ATEN.empty_like, ATEN.empty_strided, ATEN.new_empty, ATEN.new_empty_strided}


class OnCpu(TorchFunctionMode):
    """Mode in which tensors of a GPU are made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is torch.device:
            return func(*args, **(kwargs or {}))
        named = {name: _on_cpu(value) for name, value in (kwargs or {}).items()}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if named.get("pin_memory"):
            named["pin_memory"] = False
        return func(*map(_on_cpu, args), **named)


def _on_cpu(value: Any) -> Any:
    return CPU if isinstance(value, torch.device) and value.type == "cuda" else value


class SmallZeros(TorchDispatchMode):
    """Mode in which torch's small uninitialised tensors are zeros, such as the tokens that a sampler's kernels write."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.zero_() if func.overloadpacket in EMPTY_OPS and found.numel() < LARGE else found


@contextmanager
def fake_cuda(capability: Capability) -> Iterator[list[KernelVariant]]:
    """Run code for a GPU inside the block, and collect the kernels that it launches."""
    silent = {name: mock.MagicMock() for name in ("Event", "Stream", "synchronize", "empty_cache", "current_stream")}
    with ExitStack() as inside:
        variants = inside.enter_context(capture_variants())
        for each in (use_fake_gpu(capability), use_backend("cuda"), exact(False), OnCpu(), SmallZeros()):
            inside.enter_context(each)
        inside.enter_context(mock.patch.multiple(torch.cuda, graph_pool_handle=lambda: None, **silent))
        yield variants


def start_variants(
    name: str, capability: Capability, bits: int | None = 4, kv: str = KV, sequences: int = SEQUENCES
) -> list[KernelVariant]:
    """Return the kernels that a server launches which starts with a model of a named shape.

    bits  of its weights; None for dense ones
    """
    with fake_cuda(capability) as variants:
        # one more than there are kinds: the last layer computes fewer tokens
        config = shape_of(name, LAYERS.get(name, 1) + 1)
        module = family(config)
        settings = CacheSettings(kv).for_family(family_name(config)).for_device("cuda")
        made = module.Config.from_hf(config)
        model, shapes = module.Model(made, RowWeights(bits, GROUP, BF16, CPU)), module.make_caches(made)
        calibration = calibrate_keys(model, shapes, random_tokens(FEW_TOKENS, made.vocab), BF16, GPU)
        sizes: dict[str, Any] = {"context": CONTEXT, "sequences": sequences + 1, "chunk": CHUNK["cuda"]}
        engine = Engine(model, shapes, settings, **sizes, key_calibration=calibration, dtype=BF16, device=GPU)
        scheduler = Scheduler(engine, None, frozenset(), max_sequences=sequences)
        launch_usual_steps(LanguageModel(scheduler, Path(name), []))
    return variants
