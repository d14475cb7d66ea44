"""Grid formats of GGUF, 1.56 to 3.44 bits per weight: a code is the index of an entry, eight or four small integers.

A weight is `unit` * scale * (2 * step + 1) * value: the scale is that of a super-block of 256 weights, the step of a group. In
IQ2 and IQ3 an entry holds magnitudes and each weight has a sign; 7 of 8 signs are stored where their product is always
positive. In IQ1 an entry is ternary, and a shift of 1/8 up or down makes eight times the sum odd.

The bytes are those of the file, rearranged so that `packed` has whole words per 32 weights (a chunk), and `scales` the rest:

          words of a chunk                          16-bit halves of a super-block
iq1_s     entries                                   scale, then per chunk: 3 high bits of entries, step, shift
iq1_m     entries                                   4 with 4 steps and a quarter of the scale, then per chunk: highs, shifts
iq2_xxs   entries; signs 7 bits each and a step     scale
iq2_xs    entries; their high bit and 7 signs each  scale, 4 steps in each of 4
iq2_s     entries; signs                            scale, 4 steps in each of 4, 2 high bits of entries: 4
iq3_xxs   entries, two words; signs as iq2_xxs      scale
iq3_s     entries, two words; signs                 scale, 4 steps in each of 2, a high bit of entries: 4

Every product has at most 22 bits, so float32 weights are exact.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from gguf import quants
from torch import Tensor

SIZE = 256  # weights of a super-block
CHUNK = 32  # weights that share words


class Grid(NamedTuple):
    """A grid format.

    bits, group  `bits` words per 32 weights; weights of a step
    halves       of a super-block
    steps, highs  the first half with steps, and with high bits of entries; 0 where words hold them
    unit         of values
    """

    bits: int
    group: int
    halves: int
    steps: int
    highs: int
    unit: float

    @property
    def has_signs(self) -> bool:
        return self.bits > 1

    @property
    def per_entry(self) -> int:
        """Weights of an entry."""
        return 4 if self.bits == 3 else 8

    @property
    def high_bits(self) -> int:
        """Bits of a half that belong to an entry."""
        return {9: 3 if self.bits == 1 else 2, 12: 4, 7: 1}.get(self.halves, 0)


FORMATS = {
    "iq1_s": Grid(1, 32, 9, 1, 1, 0.125),
    "iq1_m": Grid(1, 16, 12, 0, 4, 0.125),
    "iq2_xxs": Grid(2, 32, 1, 0, 0, 0.125),
    "iq2_xs": Grid(2, 16, 5, 1, 0, 0.125),
    "iq2_s": Grid(2, 16, 9, 1, 5, 0.125),
    "iq3_xxs": Grid(3, 32, 1, 0, 0, 0.25),
    "iq3_s": Grid(3, 32, 7, 1, 3, 1.0),
}
KINDS = {(form.bits, form.halves): kind for kind, form in FORMATS.items()}


@cache
def table(kind: str) -> Tensor:
    """Return the values of each entry, int8 [entries, 8 or 4]; of IQ1 eight times."""
    found = getattr(quants, kind.upper())
    found.init_grid()
    values = torch.from_numpy(np.asarray(found.grid, np.float32).reshape(found.grid_shape))
    return (values * (8 if FORMATS[kind].bits == 1 else 1)).to(torch.int8)


def decode(packed: Tensor, halves: Tensor, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize rows, bit-identical to the gguf package.

    packed  int32 [..., K*bits/32], halves int16 [..., K/256*halves]
    returns [..., K]
    """
    form = FORMATS[kind]
    words = packed.contiguous().unflatten(-1, (-1, SIZE // CHUNK, form.bits))
    parts = halves.contiguous().unflatten(-1, (-1, form.halves))
    values = _values(words, parts, kind).to(torch.float32)
    scales = _scale(parts, kind) * (2 * _steps(words, parts, form).float() + 1) * form.unit
    return (values.unflatten(-1, (-1, form.group)) * scales[..., None]).flatten(-3).to(dtype)


def _octets(words: Tensor) -> Tensor:
    return words.contiguous().view(torch.uint8).int()


def _fields(words: Tensor, count: int, bits: int) -> Tensor:
    """Return `count` fields of `bits` bits of integers, the lowest first, along a new axis."""
    shifts = torch.arange(0, count * bits, bits, device=words.device, dtype=words.dtype)
    return words[..., None] >> shifts & (1 << bits) - 1


def _highs(parts: Tensor, form: Grid) -> Tensor:
    """Return the bits of halves that belong to entries: [..., chunks, entries of a chunk]."""
    found = parts[..., form.highs :].contiguous()
    if form.bits > 1:
        return _fields(_octets(found), CHUNK // form.per_entry, form.high_bits)
    return _fields(found.int(), 4, form.high_bits)


def _values(words: Tensor, parts: Tensor, kind: str) -> Tensor:
    """Return the integers of weights: [..., 256]."""
    form = FORMATS[kind]
    entries = words[..., :2] if form.bits == 3 else words[..., :1]
    index = _octets(entries)
    if form.highs:
        index |= (_highs(parts, form) & (7 if form.bits == 1 else 3)) << 8
    elif kind == "iq2_xs":
        index |= (_octets(words[..., 1:]) & 1) << 8
    values = table(kind).to(words.device)[index.long()]
    if form.has_signs:
        signs = _signs(words[..., -1:], kind)
        return torch.where(_fields(signs, 8, 1).flatten(-3) > 0, -values.flatten(-3), values.flatten(-3))
    if kind == "iq1_s":
        shift = parts[..., form.highs :].int() >> 15 & 1
        shift = shift[..., None].expand(*shift.shape, 4)
    else:
        shift = _highs(parts, form) >> 3
    return (values.int() + (1 - 2 * shift)[..., None]).flatten(-3)


def _signs(words: Tensor, kind: str) -> Tensor:
    """Return the eight sign bits of eight weights, four to a chunk."""
    if kind in ("iq2_s", "iq3_s"):
        return _octets(words)
    seven = _octets(words) >> 1 if kind == "iq2_xs" else _fields(words[..., 0], 4, 7)
    odd = seven ^ seven >> 4
    odd = odd ^ odd >> 2
    return seven | ((odd ^ odd >> 1) & 1) << 7


def _steps(words: Tensor, parts: Tensor, form: Grid) -> Tensor:
    """Return the steps of groups: [..., 256/group]."""
    if form.steps == form.highs:
        if form.bits == 1:
            return parts[..., 1:].int() >> 12 & 7
        return words[..., -1] >> 28 & 15
    if form.bits == 1:
        return _fields(parts[..., :4].int(), 4, 3).flatten(-2)
    count = SIZE // form.group // 4
    return _fields(parts[..., 1 : 1 + count].int(), 4, 4).flatten(-2)


def _scale(parts: Tensor, kind: str) -> Tensor:
    if kind != "iq1_m":
        return parts[..., :1].contiguous().view(torch.float16).float()
    quarters = parts[..., :4].int() >> 12 & 15
    whole = (quarters << 4 * torch.arange(4, device=parts.device, dtype=torch.int32)).sum(-1, keepdim=True)
    return whole.to(torch.int16).view(torch.float16).float()
