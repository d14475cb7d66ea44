"""Layouts in which the kernels of a device read weights."""

import torch
from torch import Tensor

from auraflux.quant import QTensor
from auraflux.weights.device_copy import copy_to_device
from auraflux.weights.formats.stored import Stored, dense

# free memory, as a multiple of the files' size, above which super-block scales are expanded: decode runs 7 to 20 % faster on
# two Neoverse-N1 cores, and Q2_K takes 2.3 times the memory
EXPAND_SCALES_FROM = 3
# lanes of AVX-512, which decodes from super-blocks at least as fast: Q4_K takes 0.6 times as long on a Cascade Lake core
LANES_THAT_EXPAND = 8


def cpu_lanes() -> int:
    """Return the rows that CPU kernels interleave."""
    # imported here: it needs Numba, which a GPU does not
    from auraflux.ops.simd.isa import ISA

    return ISA.lanes


def expands_scales(backend: str, has_memory: bool) -> bool:
    """Return whether the scales of super-blocks are expanded, which some processors decode faster.

    has_memory  whether there is memory for expanded scales
    """
    return has_memory and not (backend == "cpu" and cpu_lanes() > LANES_THAT_EXPAND)


def to_kernel_layout(
    found: Stored, backend: str, device: torch.device, dtype: torch.dtype, *, in_order: bool, expands: bool
) -> Stored:
    """Convert a matrix or stack to the layout that a backend's kernels read.

    backend   "cpu" or "cuda"
    device    that holds the result
    dtype     of dense weights on a GPU
    in_order  do not interleave rows for the CPU kernels
    expands   whether scales of super-blocks are expanded on a CPU
    """
    # a GPU expands what it gets
    if isinstance(found, QTensor) and device.type != "cuda":
        by_choice = expands and found.super_block is not None
        found = found.expand_scales() if in_order or backend != "cpu" or by_choice else found
    if isinstance(found, QTensor) and not found.in_mlx and in_order:
        # kernels for rows in order do not support all formats
        found = dense(found)
    if not isinstance(found, QTensor):
        return copy_to_device(found, device, _dense_dtype(found, backend, dtype))
    if backend == "cpu" and not in_order:
        from auraflux.ops.layout.rows import interleave

        return interleave(found, cpu_lanes())
    return found.to(device, copy_to_device)


def _dense_dtype(found: Tensor, backend: str, dtype: torch.dtype) -> torch.dtype:
    # CPU kernels support bf16 and f32; GPU kernels need the dtype of the activations
    if backend == "cpu":
        return found.dtype if found.dtype is torch.bfloat16 else torch.float32
    return dtype
