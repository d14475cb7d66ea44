"""Conversion of arrays between torch and mlx."""

import mlx.core as mx
import numpy as np
import torch
from torch import Tensor


def to_mlx(tensor: Tensor) -> mx.array:
    if tensor.dtype == torch.bfloat16:
        return mx.array(tensor.view(torch.int16).numpy()).view(mx.bfloat16)
    return mx.array(tensor.numpy())


def from_mlx(array: mx.array) -> Tensor:
    if array.dtype == mx.bfloat16:
        return torch.from_numpy(np.array(array.view(mx.int16))).view(torch.bfloat16)
    if array.dtype == mx.uint32:
        return torch.from_numpy(np.array(array).view(np.int32))
    return torch.from_numpy(np.array(array))
