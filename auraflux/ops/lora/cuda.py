"""Adapters on a GPU: two of torch's matrix products for all adapters at once, which a CUDA graph can record.

Ranks are small: the product with all adapters, of which a mask selects each row's, costs less than to gather their matrices.
"""

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant


def add_lora(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    if is_invariant():
        raise Declined("torch's matrix products depend on the batch")
    if not (y.dtype is x.dtype is a.dtype is b.dtype):
        raise Declined("activations and adapters have different dtypes")
    if not len(x):
        return
    count, rank, width = a.shape
    inner = (x @ a.view(count * rank, width).T).view(len(x), count, rank)
    mine = slots[:, None] == torch.arange(count, dtype=torch.int32, device=slots.device)
    inner = torch.where(mine[:, :, None], inner, 0.0)
    y.addmm_(inner.view(len(x), count * rank), b.view(count * rank, -1))
