"""NVFP4: the sixteen levels of MXFP4, a scale in FP8 (e4m3) for each 16 inputs, and a factor for the whole weight.

Scale times factor is rounded to float32, and level times that once more: so the libraries that write such files have it. What
is kept is the first product, so weights are theirs to the bit.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import mxfp4
from auraflux.quant.packing import CHUNK
from auraflux.quant.qtensor import QTensor

BITS, GROUP = mxfp4.BITS, 16
HELD_BITS = BITS + 32 / GROUP


def is_held(width: int) -> bool:
    """Whether a weight with so many inputs stays codes."""
    return width % CHUNK == 0


def from_octets(octets: Tensor, scales: Tensor) -> QTensor | Tensor:
    """Give level * scale: as codes, or in float32 where the width is none of the kernels'.

    octets  uint8 [..., N, K/2]      the first of two inputs in the low nibble
    scales  float32 [..., N, K/16]
    """
    if not bool(torch.isfinite(scales * mxfp4.MAGNITUDES[-1]).all()):
        raise FormatError("some of its scales are not finite, or too large.")
    shape = (*octets.shape[:-1], 2 * octets.shape[-1])
    if not is_held(shape[-1]):
        codes = torch.stack([octets & 15, octets >> 4], -1).flatten(-2)
        groups = mxfp4.levels()[codes.long()].unflatten(-1, (-1, GROUP))
        return (groups * scales[..., None]).flatten(-2)
    return QTensor(octets.contiguous().view(torch.int32), scales.contiguous(), None, BITS, GROUP, shape)
