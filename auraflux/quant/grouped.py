"""Weights that stand for scale * (code - zero), as AWQ, GPTQ and compressed-tensors have them, as `QTensor`s.

With bias = -scale * zero this is MLX's code * scale + bias. A scale of 16 bits times a code or zero of at most 8 fits into
float32 without rounding, and so does their difference: what is kept is the weight to the bit. Sixteen bits hold the bias too
where the zero is a power of two, as in all symmetric formats.
"""

import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.quant import affine
from auraflux.quant.packing import unpack
from auraflux.quant.qtensor import QTensor

DENSE_BITS = 32


def held_group(owners: Tensor) -> int | None:
    """The largest number of neighbouring inputs that kernels know groups of and that share a scale everywhere.

    owners  [K]  the group that each input belongs to
    """
    for group in sorted(affine.GROUPS, reverse=True):
        if len(owners) % group == 0 and bool((owners.view(-1, group) == owners[::group, None]).all()):
            return group
    return None


def owners_of(width: int, group: int) -> Tensor:
    """The group of each input where groups follow each other, the last of them maybe shorter."""
    return torch.arange(width) // group


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """The first codes of a bit stream along the last axis, see `packing`; any number of words.

    words   [..., W]      int32
    returns [..., count]  uint8
    """
    missing = -words.shape[-1] % bits
    if missing:
        words = torch.cat([words, words.new_zeros(*words.shape[:-1], missing)], -1)
    return unpack(words, bits)[..., :count]


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes of four bits in words: uint8 [N, K] -> int32 [N, K/8]."""
    return (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous().view(torch.int32)


def from_codes(packed: Tensor, scales: Tensor, zeros: Tensor, bits: int, owners: Tensor, symmetric: bool) -> QTensor | Tensor:
    """Give scale * (code - zero): as codes, or in float32 where no group of the kernels has one scale.

    packed  int32 [N, ceil(K*bits/32)]
    scales  [N, G]  bf16, f16 or f32
    zeros   [N, G]  whole numbers
    owners  [K]     the group that each input belongs to, below G
    """
    if scales.dtype not in affine.SCALE_DTYPES:
        raise FormatError(f"its scales have dtype {scales.dtype}; bfloat16, float16 or float32 is needed.")
    if not bool(torch.isfinite(scales.float() * 2**bits).all()):
        raise FormatError("some of its scales are not finite, or too large.")
    rows, width = packed.shape[0], len(owners)
    group = held_group(owners)
    if group is None:
        codes = unpacked(packed, bits, width).float()
        return (codes - zeros.float()[:, owners]) * scales.float()[:, owners]
    chosen = owners[::group]
    scales = scales[:, chosen].contiguous()
    biases = scales.float() * -zeros[:, chosen].float()
    # the zeros of a format that may have any would need single precision in one expert and not in the next
    if symmetric and torch.equal(biases.to(scales.dtype).float(), biases):
        biases = biases.to(scales.dtype)
    return QTensor(packed.contiguous(), scales.to(biases.dtype), biases, bits, group, (rows, width))


def memory_bits(bits: int, group: int | None, scale_dtype: torch.dtype, symmetric: bool) -> float:
    """Bits that a weight of `from_codes` takes, with its share of scales and biases."""
    if group is None:
        return DENSE_BITS
    return bits + 2 * (scale_dtype.itemsize * 8 if symmetric else 32) / group
