"""FP8: eight-bit floats (e4m3: sign, four bits of exponent, three of mantissa) and float32 scales.

A weight is code * scale, rounded to float32 once: that is what files with block, row or tensor scales mean by it.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import held_group, owners_of
from auraflux.quant.qtensor import QTensor

NOT_A_NUMBER = 0x7F  # of a code without its sign


def from_blocks(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> QTensor | Tensor:
    """Give code * scale: as codes, or in float32 where no group of the kernels has one scale.

    codes   float8_e4m3fn [N, K]
    scales  float32 [ceil(N/R), ceil(K/C)], one for each block of R rows and C inputs
    """
    octets = codes.contiguous().view(torch.uint8)
    if bool((octets & NOT_A_NUMBER == NOT_A_NUMBER).any()):
        raise FormatError("some of its codes are not numbers.")
    if not bool(torch.isfinite(scales).all()):
        raise FormatError("some of its scales are not finite.")
    rows, width = codes.shape
    of_row, of_input = owners_of(rows, block[0]), owners_of(width, block[1])
    group = held_group(of_input)
    if group is None:
        return codes.float() * scales[of_row][:, of_input]
    return QTensor(octets.view(torch.int32), scales[of_row][:, of_input[::group]].contiguous(), None, 8, group, (rows, width))
