"""GGUF's block types as `QTensor`s.

Blocks of the types in `gguf_layouts.py` are only reordered: all values are exact. Other types are requantized to 8 bits.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray

from auraflux.errors import FormatError
from auraflux.quant import grids, nvfp4, super_blocks
from auraflux.quant.gguf_layouts import GROUP, LAYOUTS, NAN, Array, Parts
from auraflux.quant.qtensor import QTensor

REQUANTIZED_BITS = 8
SIGN = 0x80  # of FP8
# weights that are rearranged at a time: temporaries fit the CPU cache
CHUNK = 1 << 19


def from_blocks(octets: Array, kind: str) -> QTensor:
    """Convert blocks of a type to a QTensor; exactly, if the type is in `LAYOUTS`.

    octets  uint8 [N, bytes] or [E, N, bytes], rows of full blocks
    """
    if kind not in LAYOUTS:
        return _requantize(octets, kind)
    layout = LAYOUTS[kind]
    blocks = np.ascontiguousarray(octets).reshape(-1).view(layout.record)
    step = CHUNK // layout.size
    parts = (layout.split(blocks[i : i + step]) for i in range(0, len(blocks), step))
    width = octets.shape[-1] // layout.record.itemsize * layout.size
    # NaN and infinite scales give NaN weights
    with np.errstate(over="ignore", invalid="ignore"):
        arrays = _arrays(parts, len(blocks), (*octets.shape[:-1], width))
    if kind == "NVFP4":
        arrays[1] = _nvfp4_scales(arrays[1])
    return _tensor(arrays, layout.bits, layout.group, (*octets.shape[:-1], width))


def _nvfp4_scales(octets: torch.Tensor) -> torch.Tensor:
    """Return what a QTensor holds for scales of which gguf ignores the highest bit, and with it takes NaN for 480."""
    if bool((octets == NAN | SIGN).any()):
        return torch.from_numpy(2 * quants.NVFP4.ue4m3_to_fp32(octets.numpy())).float()
    return nvfp4.hold_scales((octets & NAN).view(nvfp4.SCALES), torch.ones(()))


def _tensor(arrays: list[torch.Tensor], bits: int, group: int, shape: tuple[int, ...]) -> QTensor:
    packed, scales, *biases = arrays
    return QTensor(packed.view(torch.int32), scales, biases[0] if biases else None, bits, group, shape)


def _arrays(parts: Iterable[Parts], count: int, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Join the parts of `count` consecutive blocks; if some of their scales need single precision, all get it."""
    arrays: list[Array] = []
    start = 0
    for part in parts:
        present = [array for array in part if array is not None]
        arrays = arrays or [np.empty((count, *array.shape[1:]), array.dtype) for array in present]
        end = start + len(present[0])
        for i, array in enumerate(present):
            if array.dtype.itemsize > arrays[i].dtype.itemsize:
                arrays[i] = arrays[i].astype(array.dtype)
            arrays[i][start:end] = array
        start = end
    if not arrays:
        raise FormatError(f"a weight of shape {list(shape)} has no blocks.")
    return [torch.from_numpy(array).view(*shape[:-1], -1) for array in arrays]


def requantized_group(width: int) -> int:
    return 64 if width % 64 == 0 else GROUP


def to_dense(octets: Array, kind: str) -> NDArray[np.float32]:
    """Dequantize blocks of a type to float32."""
    try:
        # NaN and infinite scales give NaN weights
        with np.errstate(over="ignore", invalid="ignore"):
            return quants.dequantize(octets, GGMLQuantizationType[kind])
    except NotImplementedError as err:
        known = ", ".join(LAYOUTS)
        raise FormatError(f"weights of GGUF type {kind} cannot be decoded. Types that can, among others: {known}.") from err


def _requantize(octets: Array, kind: str) -> QTensor:
    """Dequantize blocks and quantize them again to 8 bits."""
    rows = octets.reshape(-1, octets.shape[-1])
    width = quants.quant_shape_from_byte_shape(rows.shape, GGMLQuantizationType[kind])[-1]
    group, step = requantized_group(width), max(1, CHUNK // width)

    def part(first: int) -> Parts:
        with np.errstate(over="ignore", invalid="ignore"):
            return _quantize_8bit(to_dense(rows[first : first + step], kind).reshape(-1, group))

    # threads: the gguf package decodes 35 million weights a second per core, and numpy releases the GIL
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        parts = pool.map(part, range(0, len(rows), step))
        shape = (*octets.shape[:-1], width)
        return _tensor(_arrays(parts, len(rows) * width // group, shape), REQUANTIZED_BITS, group, shape)


def _quantize_8bit(groups: NDArray[np.float32]) -> Parts:
    """Quantize groups to 256 even steps from their minimum to their maximum."""
    least = groups.min(1, keepdims=True)
    scales = (groups.max(1, keepdims=True) - least) / np.float32(255)
    codes = (groups - least) / np.where(scales > 0, scales, np.float32(1))
    return np.rint(codes, out=codes).astype(np.uint8), scales, least


def memory_bits(kind: str, width: int) -> float:
    """Return the bits per weight of a type as a QTensor, scales and biases included."""
    if kind not in LAYOUTS:
        return REQUANTIZED_BITS + 64 / requantized_group(width)
    layout = LAYOUTS[kind]
    if kind == "NVFP4":
        return nvfp4.stored_bits(width)
    if (grid := grids.FORMATS.get(kind.lower())) is not None:
        return layout.bits + 16 * grid.halves / grids.SIZE
    if (found := super_blocks.FORMATS.get(kind.lower())) is not None:
        return layout.bits + 32 * found.words / super_blocks.SIZE
    return layout.bits + layout.scale_bits / layout.group
