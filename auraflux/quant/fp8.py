"""FP8: e4m3 codes and float32 scales.

A weight is code * scale, rounded to float32 once, as files with block, row or tensor scales define it.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import group_indexes, kernel_group
from auraflux.quant.qtensor import QTensor

NAN_CODE = 0x7F  # sign bit cleared


def from_blocks(codes: Tensor, scales: Tensor, block: tuple[int, int]) -> QTensor | Tensor:
    """Return code * scale as a QTensor, or in float32 where scale blocks match no kernel group size.

    codes   float8_e4m3fn [N, K]
    scales  float32 [ceil(N/R), ceil(K/C)], one for each block of R rows and C inputs
    """
    octets = codes.contiguous().view(torch.uint8)
    if bool((octets & NAN_CODE == NAN_CODE).any()):
        raise FormatError("some of its codes are NaN.")
    if not bool(torch.isfinite(scales).all()):
        raise FormatError("some of its scales are not finite.")
    rows, width = codes.shape
    row_block, input_block = group_indexes(rows, block[0]), group_indexes(width, block[1])
    group = kernel_group(input_block)
    if group is None:
        return codes.float() * scales[row_block][:, input_block]
    return QTensor(
        octets.view(torch.int32), scales[row_block][:, input_block[::group]].contiguous(), None, 8, group, (rows, width)
    )
