"""The kernels that auraflux-kernels-cpu holds: those of common formats, head widths and KV caches.

Small random models of these formats and widths list their kernels in dry runs. Nothing runs, so kernels of an instruction set
can be compiled on a processor without it.
"""

import importlib
import pkgutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numba import types

import auraflux.ops
from auraflux.bench.random_weights import RandomWeights, _filled
from auraflux.bench.shapes import shape_of
from auraflux.cache import CacheSettings
from auraflux.engine.compile_kernels import kernels_of
from auraflux.ops.layout.gguf import BlockForm
from auraflux.ops.layout.gguf import _kernel as convert_kernel
from auraflux.ops.simd.compile.ahead import collect_kernels
from auraflux.ops.simd.jit import Kernel
from auraflux.ops.simd.replay import call_cache, record
from auraflux.ops.simd.threads import compile_launch
from auraflux.quant import QTensor, gguf_blocks, super_blocks

CACHES = ("k4v4", "k8v4", "k8v8", "none")
AFFINE = [(bits, group, torch.bfloat16) for bits in (4, 8) for group in (32, 64)] + [(4, 128, torch.float16)]
GGUF = ("Q4_0", "Q4_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
# formats of the built-in model's layers and of its embeddings, and its hidden width
BUILT_IN, BUILT_IN_EMBEDDINGS, BUILT_IN_WIDTH = "Q4_1", "Q8_0", 576
SMALL = {"hidden_size": 1024, "intermediate_size": 512, "vocab_size": 512}
FEW_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
DENSE = [
    {**shape_of("llama-8b", 1), **SMALL, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": n}
    for n in (64, 128, 256)
]
MIXTURE = {**shape_of("qwen3-30b-a3b", 1), **SMALL, **FEW_EXPERTS, "num_attention_heads": 4, "num_key_value_heads": 2}
DELTA = {
    **shape_of("qwen3.6-35b-a3b", 4),
    **SMALL,
    **FEW_EXPERTS,
    "shared_expert_intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


class ZeroWeights(RandomWeights):
    """Weights of a format: affine bits, group and dtype of scales, or a GGUF type."""

    def __init__(self, form: tuple[int, int, torch.dtype] | str):
        super().__init__(4, 32, torch.float32, torch.device("cpu"))
        self.form = form

    def _codes(self, rows: int, width: int) -> QTensor:
        if isinstance(self.form, str):
            layout = gguf_blocks.LAYOUTS[self.form]
            return gguf_blocks.from_blocks(np.zeros((rows, width // layout.size * layout.record.itemsize), np.uint8), self.form)
        bits, group, dtype = self.form
        scales = torch.zeros(rows, width // group, dtype=dtype)
        return QTensor(torch.zeros(rows, width * bits // 32, dtype=torch.int32), scales, scales, bits, group, (rows, width))


def kernels() -> Iterator[Kernel]:
    """Iterate over all kernels, in an order that compiles related ones together."""
    for config in DENSE:
        for kv in CACHES:
            yield from _of_model(config, BUILT_IN, kv)
    for kv in CACHES:
        yield from _of_model({**DENSE[0], "hidden_size": BUILT_IN_WIDTH}, BUILT_IN, kv)
    yield from _of_model({**DENSE[0], "hidden_size": BUILT_IN_WIDTH}, BUILT_IN_EMBEDDINGS, "none")
    for kv in ("k4v4", "none"):
        yield from _of_model(DENSE[0], BUILT_IN, kv, exact=True)
    for form in (*AFFINE, *GGUF):
        yield from _of_model(DENSE[0], form, "none")
        yield from _of_model(MIXTURE, form, "none")
    yield from _of_model(DELTA, AFFINE[1], "k4v4")
    yield from _of_files()
    yield from _of_modules()


def _of_model(config: dict[str, Any], form: Any, kv: str, exact: bool = False) -> Iterator[Kernel]:
    """Iterate over the kernels that a model of a format loads, is calibrated and runs with."""
    with collect_kernels() as found:
        model, shapes = _filled(config, ZeroWeights(form))
    yield from found
    settings = CacheSettings(kv)
    calibrate = kv != "none"
    for some in kernels_of(model, shapes, settings, exact=exact, calibrate=calibrate, dtype=torch.float32):
        yield from some


def _of_files() -> Iterator[Kernel]:
    """Iterate over the kernels that load GGUF files: matrices to interleaved rows, experts to rows in order."""
    for kind in GGUF:
        for in_lanes in (True, False):
            yield convert_kernel(BlockForm(kind, False, in_lanes))[0]
        if kind.lower() in super_blocks.FORMATS:
            yield convert_kernel(BlockForm(kind, True, True))[0]


def _of_modules() -> Iterator[Kernel]:
    """Iterate over the kernels without parameters, which are names of modules."""
    for module in pkgutil.walk_packages(auraflux.ops.__path__, "auraflux.ops."):
        parts = {*module.name.split(".")}
        if parts & {"cpu", "simd"} and not parts & {"cuda", "gpu", "hopper"}:
            found = vars(importlib.import_module(module.name)).values()
            yield from (value for value in found if isinstance(value, Kernel) and value.body.__module__ == module.name)


def compile_functions() -> None:
    """Compile the functions that launch and replay kernels."""
    compile_launch()
    call_cache.warm_up()
    record._replay.compile((types.int64,) * 3)
