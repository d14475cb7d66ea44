"""The products of adapters (LoRA) that are added to linear layers' outputs; every row may have another adapter."""

from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.activation.reference import swiglu
from auraflux.ops.linear.reference import FLOAT_DTYPES
from auraflux.ops.norm.reference import add_rms_norm, check_add_rms_norm, rms_norm


def _check_add_lora(
    x: Tensor,
    ys: Sequence[Tensor],
    slots: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> None:
    if not 0 < len(ys) == len(a) == len(b):
        raise InputError(f"{len(ys)} products, {len(a)} matrices a and {len(b)} matrices b were given; one of each is needed.")
    if norm is not None:
        check_add_rms_norm(x if delta is None else delta, x, norm, eps)
    elif delta is not None:
        raise InputError("'delta' is given without 'norm'; it is added to x before a norm.")
    check_dtype("slots", slots, torch.int32)
    check_shape("x", x, None, None)
    check_shape("slots", slots, x.shape[0])
    for y, first, second in zip(ys, a, b, strict=True):
        check_dense(x=x, ys=y, slots=slots, a=first, b=second)
        for name, tensor in {"x": x, "ys": y, "a": first, "b": second}.items():
            check_dtype(name, tensor, *FLOAT_DTYPES)
        check_shape("ys", y, x.shape[0], None)
        check_shape("a", first, a[0].shape[0], None, x.shape[1])
        check_shape("b", second, a[0].shape[0], first.shape[1], y.shape[1])


@op(check=_check_add_lora)
def add_lora(
    x: Tensor,
    ys: Sequence[Tensor],
    slots: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> None:
    """Add to the products of x with several weights those with the adapter of each row; rows without one do not change.

    x                [T, K]
    ys               [T, N]     of any N each, updated in place
    slots            [T]        int32, the adapter of each row; those outside 0 to S - 1 mean none
    a                [S, R, K]  of any R each
    b                [S, R, N]  scaled
    delta, norm, eps            see `add_norm_linears`; without a norm, x is multiplied as it is
    overlap                     x, delta and slots were complete when the kernel of the ys began: a GPU may read them before
    """
    h = _normed(x, delta, norm, eps)
    for y, first, second in zip(ys, a, b, strict=True):
        _add(y, h, slots, first, second)


def _normed(x: Tensor, delta: Tensor | None, norm: Tensor | None, eps: float) -> Tensor:
    if norm is None:
        return x
    return rms_norm.reference(x, norm, eps) if delta is None else add_rms_norm.reference(delta, x, norm, eps)[0]


def _add(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor) -> None:
    count, rank, width = a.shape
    mine = slots[:, None] == torch.arange(count, dtype=torch.int32, device=slots.device)
    inner = (x.float() @ a.float().reshape(count * rank, width).T).view(len(x), count, rank)
    # not a product with the mask: another adapter's infinity must not become NaN
    inner = torch.where(mine[:, :, None], inner, 0.0)
    found = inner.view(len(x), count * rank) @ b.float().reshape(count * rank, -1)
    y.copy_(torch.where(mine.any(1, keepdim=True), (y.float() + found).to(y.dtype), y))


def _check_add_lora_swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    slots: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> None:
    if len(a) != 2:
        raise InputError(f"{len(a)} matrices a were given; gate and up need two.")
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise InputError(f"'gate' is {list(gate.shape)} {gate.dtype}, 'up' {list(up.shape)} {up.dtype}; they must be equal.")
    _check_add_lora(x, (gate, up), slots, a, b, delta, norm, eps)


@op(check=_check_add_lora_swiglu)
def add_lora_swiglu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    slots: Tensor,
    a: Sequence[Tensor],
    b: Sequence[Tensor],
    delta: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    overlap: bool = False,
) -> Tensor:
    """Add the products with each row's adapter to gate and up, see `add_lora`, and return silu(gate) * up.

    gate, up  [T, N]  updated in place
    a, b              of gate and of up, see `add_lora`, as are the other arguments
    returns   [T, N]  in x's dtype
    """
    add_lora.reference(x, (gate, up), slots, a, b, delta, norm, eps)
    return swiglu.reference(gate, up)
