"""Adapters after products on CUDA: few tokens in one launch, prompts by torch's matrix products."""

from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.linear.adapters import Adapters
from auraflux.ops.linear.cuda.call import Products
from auraflux.ops.linear.reference import Weight, add_norm_linears, linears
from auraflux.ops.lora.cuda.few_tokens import HIGHEST_RANK, MOST_TOKENS, Norm, Product, multiply
from auraflux.ops.lora.inputs import LinearInput
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm


def multiply_then_add(
    inputs: LinearInput, weights: Sequence[Weight], biases: Sequence[Tensor | None], gated: bool, adapters: Adapters
) -> Products:
    """Multiply an input by weights, and add what their adapters find; gated: silu(first) * second."""
    if inputs.norm is None:
        total, outs = None, linears(inputs.x, weights, biases)
    else:
        total, outs = add_norm_linears(inputs.x, inputs.delta, inputs.norm, inputs.eps, weights, biases)
    if not inputs.x.numel():
        return Products([swiglu(*outs)] if gated else list(outs), total)
    if gated and _few(inputs.x, adapters) and len(adapters.pairs) == 2:
        out = torch.empty_like(outs[0])
        multiply(inputs.x, _products(outs, adapters), adapters.slots, _norm(inputs), out, overlap=True)
        return Products([out], total)
    add_to(outs, inputs, adapters, overlap=True)
    return Products([swiglu(*outs)] if gated else list(outs), total)


def add_to(ys: Sequence[Tensor], inputs: LinearInput, adapters: Adapters, overlap: bool) -> None:
    """Add the products of an input with adapters to those with weights; `overlap` as in `add_lora`."""
    if _few(inputs.x, adapters):
        multiply(inputs.x, _products(ys, adapters), adapters.slots, _norm(inputs), None, overlap)
        return
    h = _normed(inputs)
    for product in _products(ys, adapters):
        _add(h, adapters.slots, *product)


def _few(x: Tensor, adapters: Adapters) -> bool:
    return len(x) <= MOST_TOKENS and adapters.rank <= HIGHEST_RANK


def _products(ys: Sequence[Tensor], adapters: Adapters) -> list[Product]:
    found = zip(adapters.a, adapters.b, ys, strict=True)
    return [Product(a, b, y) for a, b, y in found if a is not None and b is not None]


def _norm(inputs: LinearInput) -> Norm:
    return Norm(None, None, None) if inputs.norm is None else Norm(inputs.delta, inputs.norm, float(inputs.eps))


def _normed(inputs: LinearInput) -> Tensor:
    if inputs.norm is None:
        return inputs.x
    if inputs.delta is None:
        return rms_norm(inputs.x, inputs.norm, inputs.eps)
    return add_rms_norm(inputs.delta, inputs.x, inputs.norm, inputs.eps)[0]


def _add(x: Tensor, slots: Tensor, a: Tensor, b: Tensor, y: Tensor) -> None:
    count, rank, width = a.shape
    inner = (x @ a.view(count * rank, width).T).view(len(x), count, rank)
    mine = slots[:, None] == torch.arange(count, dtype=torch.int32, device=slots.device)
    inner = torch.where(mine[:, :, None], inner, 0.0)
    y.addmm_(inner.view(len(x), count * rank), b.view(count * rank, -1))
