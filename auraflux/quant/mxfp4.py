"""MXFP4: e2m1 codes, and one power-of-two scale for each 32 of them."""

import torch
from torch import Tensor

from auraflux.quant.packing import pack

BITS, GROUP = 4, 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# halfway between magnitudes; ties round to the smaller one
THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
EXPONENT_BIAS = 127


def levels(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Tensor:
    """Return the 16 values of codes, before the group's scale."""
    positive = torch.tensor(MAGNITUDES, dtype=dtype, device=device)
    return torch.cat([positive, -positive])


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a weight, bit-identical to mlx.core.quantize(mode="mxfp4").

    weight  [..., K]
    returns packed [..., K/8] int32, scales [..., K/32] uint8 (exponent + 127)
    """
    groups = weight.float().unflatten(-1, (-1, GROUP))
    top = groups.abs().amax(-1)
    exponent = torch.ceil(torch.log2(top / MAGNITUDES[-1])).clamp(-EXPONENT_BIAS, EXPONENT_BIAS)
    exponent = torch.where(top > 0, exponent, 0.0)
    scales = (exponent + EXPONENT_BIAS).to(torch.uint8)
    sizes = groups.abs() / scale_values(scales)[..., None]
    codes = torch.zeros_like(sizes, dtype=torch.uint8)
    for threshold in THRESHOLDS:
        codes += sizes > threshold
    negative = (groups < 0) & (codes > 0)
    return pack((codes | (negative.to(torch.uint8) << 3)).flatten(-2), BITS), scales


def scale_values(scales: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return 2 ** (scale - 127); 255 is NaN."""
    value = torch.exp2(scales.float() - EXPONENT_BIAS)
    return torch.where(scales == 255, torch.nan, value).to(dtype)


def decode(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Return level * 2**exponent.

    codes   [..., K] uint8, scales [..., K/32] uint8
    returns [..., K]
    """
    values = levels(dtype, codes.device)[codes.long()].unflatten(-1, (-1, GROUP))
    return (values * scale_values(scales, dtype)[..., None]).flatten(-2)
