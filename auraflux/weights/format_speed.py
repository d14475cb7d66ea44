"""Kernels and numeric precision per weight format of a checkpoint, on CPU and CUDA."""

import math
from typing import Any, NamedTuple

import torch

from auraflux.ops.fake_gpu import HOPPER, Capability
from auraflux.ops.format_speeds import NO_KERNEL, fake_weight, speed_of
from auraflux.ops.route_speed import RouteSpeed
from auraflux.ops.simd.isa import ISA
from auraflux.quant import QTensor
from auraflux.quant.gguf_blocks import REQUANTIZED_BITS
from auraflux.quant.gguf_layouts import LAYOUTS
from auraflux.weights.experts.row_table import ON_DISK_TABLE
from auraflux.weights.formats.folder import Folder
from auraflux.weights.formats.gguf import DENSE, GGUFFile
from auraflux.weights.formats.stored import Checkpoint, Stored, dense
from auraflux.weights.memory_plan import format_of, part_of
from auraflux.weights.names import ROUTERS, Rename

TOKENS = {"one": 1, "prompt": 2048}  # batch sizes in tokens: decode and prefill
BACKENDS = ("cpu", "cuda")
STACKED = 64  # experts in a fake stack; the count does not affect kernel choice
# parts of a model that run as matrix products
MULTIPLIED = ("experts", "shared experts", "attention", "recurrent", "mlp", "embeddings")


class FormatSpeed(NamedTuple):
    """Kernels for the matrices of one format.

    format     name of the format, see `plan_memory`
    experts    whether these are routed experts
    precision  exact, or how the weights are rounded
    speeds     kernel by backend and by batch size, see `TOKENS`
    """

    format: str
    experts: bool
    precision: str
    speeds: dict[str, dict[str, RouteSpeed]]

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain values."""
        speeds = {
            backend: {name: {"method": speed.method, "speed": speed.at(TOKENS[name])} for name, speed in found.items()}
            for backend, found in self.speeds.items()
        }
        return {"format": self.format, "experts": self.experts, "precision": self.precision, "speeds": speeds}


def format_speeds(
    checkpoint: Checkpoint, rename: Rename, bits: int | None = None, gpu: Capability | None = HOPPER
) -> list[FormatSpeed]:
    """Return the kernels of each format, routed experts listed separately, sorted by parameter count.

    bits  quantization of dense matrices at load time; None loads them unquantized
    gpu   capability of the GPU; None for the CPU alone
    """
    groups: dict[tuple[str, bool], list[str]] = {}
    for name in checkpoint.sizes():
        ours = rename(name)
        if ours is None or len(checkpoint.shape(name)) < 2 or ROUTERS.search(ours) or ON_DISK_TABLE.search(ours):
            continue
        if (part := part_of(ours)) in MULTIPLIED:
            groups.setdefault((format_of(checkpoint, name), part == "experts"), []).append(name)

    def weights(names: list[str]) -> int:
        return sum(math.prod(checkpoint.shape(name)) for name in names)

    order = sorted(groups.items(), key=lambda item: -weights(item[1]))
    return [_format_speed(checkpoint, *key, names, bits, gpu) for key, names in order]


def _format_speed(
    checkpoint: Checkpoint, label: str, experts: bool, names: list[str], bits: int | None, gpu: Capability | None
) -> FormatSpeed:
    by_size = sorted(names, key=lambda name: math.prod(checkpoint.shape(name)[-2:]))
    precision, example = _precision(checkpoint, by_size[0]), _example(checkpoint, by_size[0])
    *_, rows, width = checkpoint.shape(by_size[-1])
    if bits is not None and isinstance(example, torch.Tensor) and width % 64 == 0:
        precision, example = f"quantized to {bits} bits in groups of 64", _quantized(example, bits)
    shape = (STACKED, rows, width) if experts else (rows, width)
    speeds: dict[str, dict[str, RouteSpeed]] = {}
    for backend in BACKENDS if gpu is not None else ("cpu",):
        weight = fake_weight(_kernel_layout(example, backend), shape)
        try:
            speeds[backend] = {name: speed_of(weight, count, backend, gpu or HOPPER) for name, count in TOKENS.items()}
        except ModuleNotFoundError as err:
            speeds[backend] = dict.fromkeys(TOKENS, RouteSpeed("not known", f"{err.name} is not installed"))
    return FormatSpeed(label, experts, precision, speeds)


def _example(checkpoint: Checkpoint, name: str) -> Stored:
    """Load one weight of a format; only its first row from a GGUF file."""
    if isinstance(checkpoint, GGUFFile):
        return checkpoint.first_row(name)
    return checkpoint.load(name) if len(checkpoint.shape(name)) == 2 else checkpoint.load_one(name, 0)


def _quantized(example: torch.Tensor, bits: int) -> QTensor:
    dtype = example.dtype if example.is_floating_point() else torch.float32
    scales = torch.empty(1, 1, dtype=dtype)
    return QTensor(torch.empty(1, 2 * bits, dtype=torch.int32), scales, scales, bits, 64, (1, 64))


def _kernel_layout(example: Stored, backend: str) -> Stored:
    """Return a weight in the layout that a backend's kernels read."""
    if isinstance(example, QTensor):
        return example.interleave(ISA.lanes) if backend == "cpu" else example.expand_scales()
    bf16 = backend == "cuda" or example.dtype is torch.bfloat16
    return dense(example).to(torch.bfloat16 if bf16 else torch.float32)


def _precision(checkpoint: Checkpoint, name: str) -> str:
    if isinstance(checkpoint, GGUFFile):
        kind = checkpoint.formats[name]
        if kind in DENSE:
            return "unquantized"
        return "bit-exact" if kind in LAYOUTS else f"requantized to {REQUANTIZED_BITS} bits"
    stored_format = checkpoint.stored_format(name) if isinstance(checkpoint, Folder) else None
    return "unquantized" if stored_format is None else stored_format.precision_summary


def advice(found: list[FormatSpeed], path: str, weights: int, memory: int, is_packed: bool) -> list[str]:
    """Return one suggestion for each format without a kernel, and one if the weights exceed memory.

    weights  bytes of all weights in memory
    memory   bytes of memory in the machine
    """
    suggestions = []
    for each in found:
        slow = [
            backend for backend, speeds in each.speeds.items() if any(speed.method == NO_KERNEL for speed in speeds.values())
        ]
        if slow:
            where = " and ".join(slow)
            suggestions.append(
                f"{each.format} has no kernel on {where}: `auraflux convert {path} NEW --bits 8` writes a format that has one."
            )
    if weights > memory:
        if any(each.experts for each in found) and not is_packed:
            suggestions.append(f"the weights do not fit: `auraflux pack {path} DST` enables expert offloading from disk.")
        elif not is_packed:
            suggestions.append(f"the weights do not fit: `auraflux convert {path} NEW --bits 4` makes them smaller.")
    return suggestions
