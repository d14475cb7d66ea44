"""Formats of GGUF's blocks in which a weight is level * scale: whole levels, one float32 scale for each group, no bias.

centred  code - 2**(bits - 1), at 3 bits (Q3_K) and 6 (Q6_K), in groups of 16
iq4      sixteen levels that lie closer together near zero (IQ4_NL, IQ4_XS), in groups of 32
"""

import torch
from torch import Tensor

from auraflux.quant.packing import pack

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# which widths and groups of inputs they have
CENTRED_BITS, CENTRED_GROUP = (3, 6), 16
IQ4_BITS, IQ4_GROUP = 4, 32


def levels(bits: int, device: torch.device | str = "cpu") -> Tensor:
    """What each code stands for before its group's scale."""
    if bits == IQ4_BITS:
        return torch.tensor(IQ4, dtype=torch.float32, device=device)
    return torch.arange(2.0**bits, device=device) - 2 ** (bits - 1)


def encode(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Round to the nearest levels, the largest of a group to the first one.

    weight  [..., K]
    returns packed [..., K*bits/32] int32, scales [..., K/group] float32
    """
    groups = weight.float().unflatten(-1, (-1, group))
    found = levels(bits, weight.device)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = largest / found[0]
    codes = torch.bucketize(groups / torch.where(scales == 0, 1.0, scales), (found[1:] + found[:-1]) / 2)
    return pack(codes.flatten(-2), bits), scales[..., 0].contiguous()


def decode(codes: Tensor, scales: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Give level * scale, rounded to float32 once.

    codes   [..., K] uint8, scales [..., K/group]
    returns [..., K]
    """
    groups = levels(bits, codes.device)[codes.long()].unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales[..., None]).flatten(-2).to(dtype)
