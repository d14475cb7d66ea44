"""Adapters on CUDA: few tokens in one launch, prompts by torch's matrix products for all adapters at once.

Ranks are small: the product with all adapters, of which a mask selects each row's, costs less than to gather their matrices.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined, is_invariant
from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.gpu.device import ready
from auraflux.ops.lora.cuda.few_tokens import HIGHEST_RANK, MOST_TOKENS, Norm, Product, multiply
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm

__all__ = ["add_lora", "add_lora_swiglu"]


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
    _check(x, ys, a, b)
    if not x.numel():
        return
    if _few(x, a):
        multiply(x, _products(a, b, ys), slots, _norm(delta, norm, eps), None, overlap)
        return
    h = x if norm is None else rms_norm(x, norm, eps) if delta is None else add_rms_norm(delta, x, norm, eps)[0]
    for product in _products(a, b, ys):
        _add(h, slots, *product)


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
    if not (x.numel() and _few(x, a)):
        add_lora(x, (gate, up), slots, a, b, delta, norm, eps, overlap)
        return swiglu(gate, up)
    _check(x, (gate, up), a, b)
    out = torch.empty_like(gate)
    multiply(x, _products(a, b, (gate, up)), slots, _norm(delta, norm, eps), out, overlap)
    return out


def _check(x: Tensor, ys: Sequence[Tensor], a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    ready(x)
    if is_invariant():
        raise Declined("prompts are multiplied by torch, whose matrix products depend on the batch")
    if any(tensor.dtype is not x.dtype for tensor in (*ys, *a, *b)):
        raise Declined("activations and adapters have different dtypes")


def _few(x: Tensor, a: Sequence[Tensor]) -> bool:
    return len(x) <= MOST_TOKENS and max(each.shape[1] for each in a) <= HIGHEST_RANK


def _products(a: Sequence[Tensor], b: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Product]:
    return [Product(*each) for each in zip(a, b, ys, strict=True)]


def _norm(delta: Tensor | None, weight: Tensor | None, eps: float) -> Norm:
    return Norm(None, None, None) if weight is None else Norm(delta, weight, float(eps))


def _add(x: Tensor, slots: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
    count, rank, width = a.shape
    inner = (x @ a.view(count * rank, width).T).view(len(x), count, rank)
    mine = slots[:, None] == torch.arange(count, dtype=torch.int32, device=slots.device)
    inner = torch.where(mine[:, :, None], inner, 0.0)
    y.addmm_(inner.view(len(x), count * rank), b.view(count * rank, -1))
