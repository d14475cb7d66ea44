"""K-quants of GGUF: scales of groups are steps, whole numbers of a few bits, times the scale of a super-block of 256 weights.

They are held as 32-bit words, so many of each super-block: first its scale, then the steps, four to a word, the first group
lowest.

q2_k, q4_k, q5_k   code * scale + bias. The first word has two numbers in half precision: below for scales, above for biases.
                   Steps of q2_k have four bits, a scale's below its bias's in a byte; those of q4_k and q5_k are bytes, all
                   scales' before all biases'
q3_k, q6_k, iq4_xs level * scale (see `levels.py`). The first word is in single precision, and steps are bytes less 128

A half-precision number times a step has at most 19 bits, so float32 holds the scales and biases that `widened` writes out.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 256  # weights of a super-block
ZERO = 128  # what stands for a step of nothing, where there are steps below it


class SuperBlock(NamedTuple):
    """A format of super-blocks.

    bits, group  of the codes
    plain        the format that has a float32 scale, and bias, for each group
    """

    bits: int
    group: int
    plain: str

    @property
    def has_biases(self) -> bool:
        return self.plain == "affine"

    @property
    def has_nibbles(self) -> bool:
        """Whether a byte has both steps of a group."""
        return self.bits == 2

    @property
    def groups(self) -> int:
        return SIZE // self.group

    @property
    def words(self) -> int:
        """Words of a super-block: that with its scale, and those with the steps."""
        apart = 2 if self.has_biases and not self.has_nibbles else 1
        return 1 + apart * self.groups // 4


FORMATS = {
    "q2_k": SuperBlock(2, 16, "affine"),
    "q3_k": SuperBlock(3, 16, "centred"),
    "q4_k": SuperBlock(4, 32, "affine"),
    "q5_k": SuperBlock(5, 32, "affine"),
    "q6_k": SuperBlock(6, 16, "centred"),
    "iq4_xs": SuperBlock(4, 32, "iq4"),
}


def widened(words: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Write out the scales of all groups, and their biases.

    words   int32 [..., K/256*words]
    returns float32 [..., K/group], twice or with None
    """
    form = FORMATS[kind]
    blocks = words.contiguous().unflatten(-1, (-1, form.words))
    steps = blocks.view(torch.uint8)[..., 4:]
    if not form.has_biases:
        return (blocks.view(torch.float32)[..., :1] * (steps.float() - ZERO)).flatten(-2), None
    scale, bias = blocks.view(torch.float16)[..., :2].float().split(1, -1)
    low, high = (steps & 15, steps >> 4) if form.has_nibbles else steps.chunk(2, -1)
    return (scale * low.float()).flatten(-2), (bias * high.float()).flatten(-2)
