"""The product of an adapter (LoRA) that is added to a linear layer's output; every row may have another adapter."""

import torch
from torch import Tensor

from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.linear.reference import FLOAT_DTYPES


def _check_add_lora(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    check_dense(y=y, x=x, slots=slots, a=a, b=b)
    for name, tensor in {"y": y, "x": x, "a": a, "b": b}.items():
        check_dtype(name, tensor, *FLOAT_DTYPES)
    check_dtype("slots", slots, torch.int32)
    check_shape("x", x, None, None)
    check_shape("y", y, x.shape[0], None)
    check_shape("slots", slots, x.shape[0])
    check_shape("a", a, None, None, x.shape[1])
    check_shape("b", b, a.shape[0], a.shape[1], y.shape[1])


@op(check=_check_add_lora)
def add_lora(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    """Add to each row of y the low-rank product of its adapter with the row of x; rows without an adapter do not change.

    y      [T, N]     updated in place
    x      [T, K]
    slots  [T]        int32, the adapter of each row; those outside 0 to S - 1 mean none
    a      [S, R, K]
    b      [S, R, N]  scaled
    """
    count, rank, width = a.shape
    mine = slots[:, None] == torch.arange(count, dtype=torch.int32, device=slots.device)
    inner = (x.float() @ a.float().reshape(count * rank, width).T).view(len(x), count, rank)
    # not a product with the mask: another adapter's infinity must not become NaN
    inner = torch.where(mine[:, :, None], inner, 0.0)
    found = inner.view(len(x), count * rank) @ b.float().reshape(count * rank, -1)
    y.copy_(torch.where(mine.any(1, keepdim=True), (y.float() + found).to(y.dtype), y))
