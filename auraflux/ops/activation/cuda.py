"""Activations and gates on CUDA: one pass over the elements, float32 inside."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.elementwise import gelu, sigmoid, silu, softplus
from auraflux.ops.gpu.device import ready
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv

BLOCK = 1024


@triton.jit
def _clamped(gate, up, alpha, limit):
    gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
    return (up + 1.0) * gate * sigmoid(alpha * gate)


@triton.jit
def _limited(gate, up, gate_limit, limit):
    gate = tl.minimum(gate, gate_limit, propagate_nan=tl.PropagateNan.ALL)
    up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    return silu(gate) * tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _elements(a, b, out, n, width, gap, alpha, limit, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Apply an activation element by element; rows of `width` elements of b have a stride of `width + gap`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    x = tl.load(a + at, mask=there, other=0.0).to(tl.float32)
    y = tl.load(b + at + (at // width * gap if KIND == "sigmoid" else 0), mask=there, other=0.0).to(tl.float32)
    if KIND == "swiglu":
        result = silu(x) * y
    elif KIND == "geglu":
        result = gelu(x) * y
    elif KIND == "relu2":
        result = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) * x
    elif KIND == "clip":
        result = tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)
        result = tl.maximum(result, -limit, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "clamped":
        result = _clamped(x, y, alpha, limit)
    elif KIND == "limited":
        result = _limited(x, y, alpha, limit)
    else:
        result = x * sigmoid(y)
    tl.store(out + at, result, mask=there)


def _run(kind: str, a: Tensor, b: Tensor, alpha: float = 0.0, limit: float = 0.0) -> Tensor:
    ready(a)
    out, n = torch.empty_like(a), a.numel()
    if n:
        width, gap = (1, 0) if b.is_contiguous() else (b.shape[-1], b.stride(1) - b.shape[-1])
        launch(_elements, (cdiv(n, BLOCK),))(a, b, out, n, width, gap, alpha, limit, kind, BLOCK)
    return out


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return _run("swiglu", gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    return _run("geglu", gate, up)


def clip(x: Tensor, limit: float) -> Tensor:
    return _run("clip", x, x, limit=float(limit))


def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    return _run("clamped", gate, up, float(alpha), float(limit))


def limited_swiglu(gate: Tensor, up: Tensor, limit: float, gate_limit: float | None = None) -> Tensor:
    return _run("limited", gate, up, float(limit if gate_limit is None else gate_limit), float(limit))


def relu_square(x: Tensor) -> Tensor:
    return _run("relu2", x, x)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    return _run("sigmoid", x, gate)


@triton.jit
def _heads(x, gate, out, n, width, SOFT: tl.constexpr, BLOCK: tl.constexpr):
    """Multiply rows of `width` elements by the sigmoid or softplus of one gate each."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = at < n
    factor = tl.load(gate + at // width, mask=there, other=0.0).to(tl.float32)
    factor = softplus(factor) if SOFT else sigmoid(factor)
    tl.store(out + at, tl.load(x + at, mask=there, other=0.0).to(tl.float32) * factor, mask=there)


def gate_heads(x: Tensor, gate: Tensor, soft: bool = False) -> Tensor:
    ready(x)
    out, n = torch.empty_like(x), x.numel()
    if n:
        launch(_heads, (cdiv(n, BLOCK),))(x, gate, out, n, x.shape[2], soft, BLOCK)
    return out


def split_q_gate(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    queries, gates = x.view(x.shape[0], heads, 2, -1).unbind(2)
    return queries, gates
