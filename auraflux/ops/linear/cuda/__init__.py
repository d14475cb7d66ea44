"""Products with weights on CUDA; `routes.py` chooses the kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.gpu.blocks.codes import check_order
from auraflux.ops.gpu.device import ready
from auraflux.ops.linear.cuda.call import Call, Norm
from auraflux.ops.linear.cuda.dense import dequantized, take
from auraflux.ops.linear.cuda.routes import PRODUCTS
from auraflux.ops.linear.reference import Weight
from auraflux.quant import QTensor

__all__ = [
    "add_norm_gate_up",
    "add_norm_linears",
    "add_norm_scores",
    "embed",
    "gate_up_swiglu",
    "linear",
    "linears",
]


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return linears(x, [weight], [bias])[0]


def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    _check(x, weights)
    made = PRODUCTS(Call(_rows(x), weights, biases))
    return _like(x, made.outs)


def add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    _check(x, weights)
    made = PRODUCTS(Call(_rows(x), weights, biases, norm=_norm(delta, norm, eps)))
    assert made.total is not None
    return made.total.view(x.shape), _like(x, made.outs)


def add_norm_scores(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    _check(x, weights)
    made = PRODUCTS(Call(_rows(x), weights, biases, norm=_norm(delta, norm, eps), needs_normed=True))
    assert made.normed is not None
    assert made.total is not None
    return made.normed.view(x.shape), made.total.view(x.shape), _like(x, made.outs)


def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight
) -> tuple[Tensor, Tensor]:
    _check(x, (gate, up))
    made = PRODUCTS(Call(_rows(x), (gate, up), gated=True, norm=_norm(delta, norm, eps)))
    assert made.total is not None
    return made.total.view(x.shape), _like(x, made.outs)[0]


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    _check(x, (gate, up))
    made = PRODUCTS(Call(_rows(x), (gate, up), gated=True))
    return _like(x, made.outs)[0]


def embed(ids: Tensor, table: Weight) -> Tensor:
    ready(ids)
    if isinstance(table, QTensor):
        check_order(table)
        return dequantized(table, torch.float32, ids)
    if not table.dtype.is_floating_point:
        raise Declined(f"a table of {table.dtype}")
    return take(table, ids)


def _check(x: Tensor, weights: Sequence[Weight]) -> None:
    ready(x)
    check_order(*(weight for weight in weights if isinstance(weight, QTensor)))


def _rows(x: Tensor) -> Tensor:
    return x.view(-1, x.shape[-1])


def _norm(delta: Tensor | None, weight: Tensor, eps: float) -> Norm:
    return Norm(None if delta is None else _rows(delta), weight, eps)


def _like(x: Tensor, outs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return results with the leading dimensions of x."""
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)
