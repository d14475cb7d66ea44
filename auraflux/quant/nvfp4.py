"""NVFP4: the 16 levels of MXFP4, an FP8 (e4m3) scale for each 16 inputs, and a factor per tensor.

Scale times factor is rounded to float32, and level times that once more, as in the libraries that write such files, so weights
are bit-identical to theirs. Super-blocks (`super_blocks.py`) hold scales and factor as they are; where 256 does not divide a
row, the products are stored.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import mxfp4, super_blocks
from auraflux.quant.packing import CHUNK
from auraflux.quant.qtensor import QTensor

BITS, GROUP = mxfp4.BITS, 16
SCALES = torch.float8_e4m3fn
PACKED = super_blocks.FORMATS["nvfp4_e4m3"]


def is_supported(width: int) -> bool:
    """Return whether kernels take quantized weights of this input width."""
    return width % CHUNK == 0


def stored_bits(width: int) -> float:
    """Return the bits per weight in memory of a row of `width` inputs."""
    return BITS + (32 / GROUP if width % super_blocks.SIZE else 32 * PACKED.words / super_blocks.SIZE)


def from_bytes(octets: Tensor, scales: Tensor, factor: Tensor, divided: bool = False) -> QTensor | Tensor:
    """Return level * (scale * factor) as a QTensor, or in float32 where kernels do not take the width.

    octets   uint8 [..., N, K/2]    the first of two inputs in the low nibble
    scales   e4m3 [..., N, K/16]
    factor   float32, broadcasts to scales
    divided  scales are divided by the factor; super-blocks hold its inverse, rounded to float32
    """
    products = scales.float() / factor if divided else scales.float() * factor
    if not bool(torch.isfinite(products * mxfp4.MAGNITUDES[-1]).all()):
        raise FormatError("some of its scales are not finite, or too large.")
    shape = (*octets.shape[:-1], 2 * octets.shape[-1])
    if not is_supported(shape[-1]):
        codes = torch.stack([octets & 15, octets >> 4], -1).flatten(-2)
        groups = mxfp4.levels()[codes.long()].unflatten(-1, (-1, GROUP))
        return (groups * products[..., None]).flatten(-2)
    held = hold_scales(scales, factor, divided)
    return QTensor(octets.contiguous().view(torch.int32), held, None, BITS, GROUP, shape)


def hold_scales(scales: Tensor, factor: Tensor, divided: bool = False) -> Tensor:
    """Return the words of super-blocks, or the products where rows are not whole super-blocks."""
    if scales.shape[-1] % PACKED.groups:
        return scales.float() / factor if divided else scales.float() * factor
    factor = 1 / factor if divided else factor
    steps = scales.contiguous().view(torch.uint8).unflatten(-1, (-1, PACKED.groups)).view(torch.int32)
    ends = factor.float().expand(scales.shape)[..., :: PACKED.groups, None].contiguous().view(torch.int32)
    return torch.cat([ends, steps], -1).flatten(-2)
