"""NVFP4 as ModelOpt and compressed-tensors write it, see `quant/nvfp4.py`; matrices, or stacks of them.

codes   uint8 [..., N, K/2]
scales  float8_e4m3fn [..., N, K/16]
factor  [], [1], or of a stack [E]: what scales are multiplied by (ModelOpt), or divided by (compressed-tensors)
"""

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant.grouped import DENSE_BITS
from auraflux.quant.nvfp4 import GROUP, HELD_BITS, from_octets, is_held
from auraflux.weights.boundary import shown
from auraflux.weights.methods.fp8 import CODES
from auraflux.weights.methods.method import Header, Held, check_width, expect, part
from auraflux.weights.stored import Stored

KEPT = "kept to the bit: level * scale in float32"
OCTETS = "U8"


class Names(NamedTuple):
    """What the parts are called."""

    codes: str
    scales: str
    factor: str


def plan(headers: Mapping[str, Header], names: Names) -> Held:
    *stack, rows, octets = part(headers, names.codes, (OCTETS,), 3 if len(headers[names.codes].shape) == 3 else 2)
    width = 2 * octets
    check_width(width)
    if width % GROUP:
        raise FormatError(f"it has {width} inputs; NVFP4 has them in groups of {GROUP}.")
    shape = (*stack, rows, width)
    expect(headers, names.scales, (CODES,), (*stack, rows, width // GROUP))
    found = headers.get(names.factor, Header((0,), ""))
    if found.dtype != "F32" or found.shape not in ((), (1,), tuple(stack)):
        whose = f"each of its {stack[0]} matrices" if stack else "all of it"
        there = f"{found.dtype} of shape {shown(list(found.shape))}" if found.dtype else "not there"
        raise FormatError(f"its {names.factor} is {there}; one F32 for {whose} is needed.")
    if not is_held(width):
        kept = f"exact, but held in float32: {width} inputs of NVFP4 are no multiple of 32. --quantize 8 rounds them anew"
        return Held(shape, "NVFP4, as float32", DENSE_BITS, kept)
    return Held(shape, "NVFP4", HELD_BITS, KEPT)


def load(codes: Tensor, scales: Tensor, factor: Tensor, divided: bool = False) -> Stored:
    wide, factor = scales.float(), factor.view(-1, 1, 1) if scales.dim() == 3 else factor
    return from_octets(codes, wide / factor if divided else wide * factor)
