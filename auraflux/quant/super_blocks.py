"""K-quants of GGUF: group scales are integer steps of a few bits times the scale of a super-block of 256 weights; and NVFP4.

A super-block's scales are stored as 32-bit words: first its own scale, then the steps, four to a word, the first group lowest.

q2_k, q4_k, q5_k   code * scale + bias. The first word has two float16 numbers: low for scales, high for biases. Steps of q2_k
                   have four bits, a scale's in the low nibble and its bias's in the high one; those of q4_k and q5_k are bytes,
                   all scales before all biases
q3_k, q6_k, iq4_xs level * scale (see `levels.py`). The first word is float32, and steps are bytes minus 128
nvfp4_e4m3         level * scale. The first word is float32, NVFP4's factor of a tensor, and steps are FP8 (e4m3), none NaN

A float16 number times a step has at most 19 bits, so the float32 scales and biases of `expand_scales` are exact; NVFP4's are
rounded, as in the libraries that write it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SIZE = 256  # weights of a super-block
ZERO = 128  # the byte of step 0 where steps are signed


class SuperBlock(NamedTuple):
    """A super-block format.

    bits, group  of the codes
    expanded     the format with one float32 scale, and bias, per group
    """

    bits: int
    group: int
    expanded: str

    @property
    def has_biases(self) -> bool:
        return self.expanded == "affine"

    @property
    def has_floats(self) -> bool:
        """Return whether steps are FP8."""
        return self.expanded == "nvfp4"

    @property
    def has_nibbles(self) -> bool:
        """Return whether a byte has both steps of a group."""
        return self.bits == 2

    @property
    def groups(self) -> int:
        return SIZE // self.group

    @property
    def words(self) -> int:
        """Words of a super-block: one with its scale, and those with the steps."""
        steps = 2 if self.has_biases and not self.has_nibbles else 1
        return 1 + steps * self.groups // 4


FORMATS = {
    "q2_k": SuperBlock(2, 16, "affine"),
    "q3_k": SuperBlock(3, 16, "centred"),
    "q4_k": SuperBlock(4, 32, "affine"),
    "q5_k": SuperBlock(5, 32, "affine"),
    "q6_k": SuperBlock(6, 16, "centred"),
    "iq4_xs": SuperBlock(4, 32, "iq4"),
    "nvfp4_e4m3": SuperBlock(4, 16, "nvfp4"),
}


def expand_scales(words: Tensor, kind: str) -> tuple[Tensor, Tensor | None]:
    """Return the float32 scale, and bias, of each group.

    words   int32 [..., K/256*words]
    returns float32 [..., K/group], twice or with None
    """
    form = FORMATS[kind]
    blocks = words.contiguous().unflatten(-1, (-1, form.words))
    steps = blocks.view(torch.uint8)[..., 4:]
    if form.has_floats:
        return (blocks.view(torch.float32)[..., :1] * steps.view(torch.float8_e4m3fn).float()).flatten(-2), None
    if not form.has_biases:
        return (blocks.view(torch.float32)[..., :1] * (steps.float() - ZERO)).flatten(-2), None
    scale, bias = blocks.view(torch.float16)[..., :2].float().split(1, -1)
    low, high = (steps & 15, steps >> 4) if form.has_nibbles else steps.chunk(2, -1)
    return (scale * low.float()).flatten(-2), (bias * high.float()).flatten(-2)
