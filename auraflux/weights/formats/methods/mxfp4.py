"""MXFP4 of compressed-tensors and ModelOpt, and of DeepSeek V4's experts; matrices or stacks.

codes      uint8 or int8 [..., N, K/2]   two e2m1 levels, the first of two inputs in the low nibble
exponents  uint8 or e8m0 [..., N, K/32]  of the scales, plus 127
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import QTensor, mxfp4
from auraflux.weights.formats.methods.method import Header, StoredFormat, check_width, expect, part

EXPONENTS = ("U8", "F8_E8M0")
NOT_A_NUMBER = 255  # among exponents


def plan(headers: Mapping[str, Header], codes: str, exponents: str, dtypes: Iterable[str]) -> StoredFormat:
    """Return the format of a weight with these tensors, the codes of one of these dtypes."""
    *stack, rows, octets = part(headers, codes, dtypes, 3 if len(headers[codes].shape) == 3 else 2)
    width = 2 * octets
    check_width(width)
    if width % mxfp4.GROUP:
        raise FormatError(f"it has {width} inputs; MXFP4 needs groups of {mxfp4.GROUP}.")
    expect(headers, exponents, EXPONENTS, (*stack, rows, width // mxfp4.GROUP))
    return StoredFormat((*stack, rows, width), "MXFP4", 4.25, "bit-exact: level * 2**exponent")


def load(codes: Tensor, exponents: Tensor) -> QTensor:
    """Return a weight whose headers `plan` has checked."""
    exponents = exponents.view(torch.uint8)
    if bool((exponents == NOT_A_NUMBER).any()):
        raise FormatError("some of its scales are NaN.")
    shape = *codes.shape[:-1], 2 * codes.shape[-1]
    return QTensor(codes.contiguous().view(torch.int32), exponents.contiguous(), None, mxfp4.BITS, mxfp4.GROUP, shape)
