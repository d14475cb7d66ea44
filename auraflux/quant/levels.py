"""Codebook formats: a weight is level * scale, with one scale per group and no bias; scales are float32 but for GGUF's 4 bits.

centred  code - 2**(bits - 1), at 3 bits (Q3_K of GGUF) and 6 (Q6_K), in groups of 16
iq4      16 non-uniform levels (IQ4_XS), in groups of 32
iq4_nl   the same with float16 scales
q4_0     code - 8 in groups of 32, with the bits of float16 scales as int16
nvfp4    the 16 levels of MXFP4, in groups of 16
"""

import torch
from torch import Tensor

from auraflux.quant import mxfp4
from auraflux.quant.packing import pack

IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
CENTRED_BITS = (3, 6)
FOUR_BITS = {"iq4": torch.tensor(IQ4, dtype=torch.float32), "nvfp4": mxfp4.levels()}
FOUR_BITS["iq4_nl"] = FOUR_BITS["iq4"]
KINDS = ("centred", "q4_0", *FOUR_BITS)
Q4_0_ZERO = 8


def levels(kind: str, bits: int, device: torch.device | str = "cpu") -> Tensor:
    """Return the level of each code, before its group's scale."""
    if kind in FOUR_BITS:
        return FOUR_BITS[kind].to(device)
    return torch.arange(2.0**bits, device=device) - 2 ** (bits - 1)


def encode(weight: Tensor, kind: str, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """Round a weight to the nearest levels, the largest magnitude of a group to the largest level.

    weight  [..., K]
    returns packed [..., K*bits/32] int32, scales [..., K/group]
    """
    groups = weight.float().unflatten(-1, (-1, group))
    found = levels(kind, bits, weight.device)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    scales = (largest / found[found.abs().argmax()]).to(torch.float16 if kind in ("iq4_nl", "q4_0") else torch.float32)
    ordered = found.unique()
    nearest = torch.bucketize(groups / torch.where(scales == 0, 1.0, scales.float()), (ordered[1:] + ordered[:-1]) / 2)
    # of two codes for zero, the first is used
    codes = (ordered[:, None] == found).int().argmax(1)[nearest]
    scales = scales[..., 0].contiguous()
    return pack(codes.flatten(-2), bits), scales.view(torch.int16) if kind == "q4_0" else scales


def decode(codes: Tensor, scales: Tensor, kind: str, bits: int, dtype: torch.dtype) -> Tensor:
    """Return level * scale, rounded to float32 once.

    codes   [..., K] uint8, scales [..., K/group]
    returns [..., K]
    """
    if kind == "q4_0":
        scales = scales.view(torch.float16)
    groups = levels(kind, bits, codes.device)[codes.long()].unflatten(-1, (scales.shape[-1], -1))
    return (groups * scales[..., None]).flatten(-2).to(dtype)
