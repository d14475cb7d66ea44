"""MLX's affine format: w = code * scale + bias, one scale and one bias for each group of inputs."""

import torch
from torch import Tensor

from auraflux.quant.packing import pack

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (32, 64, 128)
STORED_GROUPS = (16, *GROUPS)  # Q2_K of GGUF has groups of 16; `quantize` does not write them
SCALE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def encode(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a weight, bit-identical to mlx.core.quantize.

    The end of the range with the larger magnitude is represented exactly: it becomes the bias, and the scale is adjusted so
    that zero falls on a code.

    weight  [..., K]
    returns packed [..., K*bits/32] int32, scales and biases [..., K/group] in weight's dtype
    """
    groups = weight.float().unflatten(-1, (-1, group))
    low, high = groups.amin(-1), groups.amax(-1)
    steps = 2**bits - 1
    below = low.abs() > high.abs()
    edge = torch.where(below, low, high)
    # a tensor: CUDA multiplies by the reciprocal of a Python number, which rounds differently
    step = ((high - low) / torch.full_like(low, steps)).clamp_min(1e-7)
    step = torch.where(below, step, -step)
    zero_code = torch.round(edge / step)
    has_zero = zero_code != 0
    scale = torch.where(has_zero, edge / torch.where(has_zero, zero_code, 1.0), step)
    bias = torch.where(has_zero, edge, 0.0)
    codes = torch.round((groups - bias[..., None]) / scale[..., None]).clamp(0, steps)
    return pack(codes.flatten(-2), bits), scale.to(weight.dtype), bias.to(weight.dtype)


def decode(codes: Tensor, scales: Tensor, biases: Tensor, dtype: torch.dtype) -> Tensor:
    """Return code * scale + bias, computed in `dtype` as mlx does.

    codes   [..., K] uint8, scales, biases [..., K/group]
    returns [..., K]
    """
    groups = codes.unflatten(-1, (scales.shape[-1], -1)).to(dtype)
    return (groups * scales.to(dtype)[..., None] + biases.to(dtype)[..., None]).flatten(-2)
