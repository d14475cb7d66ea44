"""NVFP4 of ModelOpt and compressed-tensors, see `quant/nvfp4.py`; matrices or stacks.

codes   uint8 [..., N, K/2]
scales  float8_e4m3fn [..., N, K/16]
factor  [], [1], or [E] for a stack: multiplies the scales (ModelOpt) or divides them (compressed-tensors)
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import DENSE_BITS
from auraflux.quant.nvfp4 import GROUP, from_bytes, is_supported, stored_bits
from auraflux.quant.super_blocks import SIZE
from auraflux.weights.formats.methods.fp8 import CODES
from auraflux.weights.formats.methods.method import Header, StoredFormat, check_width, expect, part
from auraflux.weights.formats.stored import Stored
from auraflux.weights.formats.untrusted import shown

EXACT = "bit-exact: level * scale in float32"
INVERTED = "level * scale in float32; the factor's inverse is rounded"
OCTETS = "U8"


class Names(NamedTuple):
    """Names of the tensors of a weight."""

    codes: str
    scales: str
    factor: str


def plan(headers: Mapping[str, Header], names: Names, divided: bool = False) -> StoredFormat:
    *stack, rows, octets = part(headers, names.codes, (OCTETS,), 3 if len(headers[names.codes].shape) == 3 else 2)
    width = 2 * octets
    check_width(width)
    if width % GROUP:
        raise FormatError(f"it has {width} inputs; NVFP4 needs groups of {GROUP}.")
    shape = (*stack, rows, width)
    expect(headers, names.scales, (CODES,), (*stack, rows, width // GROUP))
    found = headers.get(names.factor, Header((0,), ""))
    if found.dtype != "F32" or found.shape not in ((), (1,), tuple(stack)):
        whose = f"each of its {stack[0]} matrices" if stack else "the weight"
        there = f"{found.dtype} of shape {shown(list(found.shape))}" if found.dtype else "missing"
        raise FormatError(f"its {names.factor} is {there}; one F32 for {whose} is needed.")
    if not is_supported(width):
        precision = (
            f"exact, but stored as float32: {width} NVFP4 inputs are not a multiple of 32. --quantize 8 requantizes them"
        )
        return StoredFormat(shape, "NVFP4, as float32", DENSE_BITS, precision)
    return StoredFormat(shape, "NVFP4", stored_bits(width), INVERTED if divided and width % SIZE == 0 else EXACT)


def load(codes: Tensor, scales: Tensor, factor: Tensor, divided: bool = False) -> Stored:
    factor = factor.view(-1, 1, 1) if scales.dim() == 3 else factor
    return from_bytes(codes, scales, factor, divided)
