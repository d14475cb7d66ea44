"""NVFP4: the 16 levels of MXFP4, an FP8 (e4m3) scale for each 16 inputs, and a factor per tensor.

Scale times factor is rounded to float32, and level times that once more, as in the libraries that write such files. The first
product is stored, so weights are bit-identical to theirs.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import mxfp4
from auraflux.quant.packing import CHUNK
from auraflux.quant.qtensor import QTensor

BITS, GROUP = mxfp4.BITS, 16
STORED_BITS = BITS + 32 / GROUP


def is_supported(width: int) -> bool:
    """Return whether kernels take quantized weights of this input width."""
    return width % CHUNK == 0


def from_bytes(octets: Tensor, scales: Tensor) -> QTensor | Tensor:
    """Return level * scale as a QTensor, or in float32 where kernels do not take the width.

    octets  uint8 [..., N, K/2]      the first of two inputs in the low nibble
    scales  float32 [..., N, K/16]
    """
    if not bool(torch.isfinite(scales * mxfp4.MAGNITUDES[-1]).all()):
        raise FormatError("some of its scales are not finite, or too large.")
    shape = (*octets.shape[:-1], 2 * octets.shape[-1])
    if not is_supported(shape[-1]):
        codes = torch.stack([octets & 15, octets >> 4], -1).flatten(-2)
        groups = mxfp4.levels()[codes.long()].unflatten(-1, (-1, GROUP))
        return (groups * scales[..., None]).flatten(-2)
    return QTensor(octets.contiguous().view(torch.int32), scales.contiguous(), None, BITS, GROUP, shape)
