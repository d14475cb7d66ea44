"""Activations and gates, element by element. Computed in float32; results have the input's dtype."""

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu, softplus

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_floating, check_heads, check_shape, op


def _check_pair(gate: Tensor, up: Tensor) -> None:
    check_dense(gate=gate, up=up)
    check_floating(gate=gate, up=up)
    check_shape("up", up, *gate.shape)


@op(origins=("swiglu_fused", "swiglu_fused_vec4"), check=_check_pair)
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by silu(gate).

    gate, up [...]
    returns  [...]  in gate's dtype
    """
    return (silu(gate.float()) * up.float()).to(gate.dtype)


@op(check=_check_pair)
def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Multiply `up` by gelu(gate), in gelu's tanh form.

    gate, up [...]
    returns  [...]  in gate's dtype
    """
    return (gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


def _check_clip(x: Tensor, limit: float) -> None:
    check_dense(x=x)
    check_floating(x=x)
    if not limit > 0:
        raise InputError(f"limit is {limit}; a positive limit is needed.")


@op(check=_check_clip)
def clip(x: Tensor, limit: float) -> Tensor:
    """Clamp values to -limit ... limit.

    x       [...]
    returns [...]  in x's dtype
    """
    return x.float().clamp(-limit, limit).to(x.dtype)


def _check_clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> None:
    _check_pair(gate, up)
    if not limit > 0:
        raise InputError(f"limit is {limit}; a positive limit is needed.")


@op(check=_check_clamped_swiglu)
def clamped_swiglu(gate: Tensor, up: Tensor, alpha: float, limit: float) -> Tensor:
    """Multiply `up` + 1 by gate * sigmoid(alpha * gate), both clamped first: the activation of gpt-oss.

    gate    [...]  clamped from above only
    up      [...]  clamped to -limit ... limit
    returns [...]  in gate's dtype
    """
    wide = gate.float().clamp(max=limit)
    return ((up.float().clamp(-limit, limit) + 1) * wide * torch.sigmoid(alpha * wide)).to(gate.dtype)


def _check_limited_swiglu(gate: Tensor, up: Tensor, limit: float, gate_limit: float | None = None) -> None:
    _check_clamped_swiglu(gate, up, 1.0, limit)
    if gate_limit is not None:
        _check_clamped_swiglu(gate, up, 1.0, gate_limit)


@op(check=_check_limited_swiglu)
def limited_swiglu(gate: Tensor, up: Tensor, limit: float, gate_limit: float | None = None) -> Tensor:
    """Multiply `up` by silu(gate), both clamped first: the activation of DeepSeek V4.

    gate        [...]  clamped from above only
    up          [...]  clamped to -limit ... limit
    gate_limit  of the gate; None for `limit`
    returns     [...]  in gate's dtype
    """
    most = limit if gate_limit is None else gate_limit
    return (silu(gate.float().clamp(max=most)) * up.float().clamp(-limit, limit)).to(gate.dtype)


def _check_relu_square(x: Tensor) -> None:
    check_dense(x=x)
    check_floating(x=x)


@op(check=_check_relu_square)
def relu_square(x: Tensor) -> Tensor:
    """Square positive elements and set the rest to zero.

    x       [...]
    returns [...]  in x's dtype
    """
    return x.float().relu().square().to(x.dtype)


def _check_sigmoid_gate(x: Tensor, gate: Tensor) -> None:
    check_floating(x=x, gate=gate)
    check_shape("gate", gate, *x.shape)
    if gate.dim() == 3 and not gate.is_contiguous():
        check_dense(x=x)
        check_heads("gate", gate)
    else:
        check_dense(x=x, gate=gate)


@op(origins=("sigmoid_gate",), check=_check_sigmoid_gate)
def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply `x` by sigmoid(gate).

    x, gate [...]  the gate's heads may be strided, see `split_q_gate`
    returns [...]  in x's dtype
    """
    return (x.float() * torch.sigmoid(gate.float())).to(x.dtype)


def _check_gate_heads(x: Tensor, gate: Tensor, soft: bool = False) -> None:
    check_dense(x=x, gate=gate)
    check_floating(x=x, gate=gate)
    check_shape("x", x, None, None, None)
    check_shape("gate", gate, *x.shape[:2])


@op(check=_check_gate_heads)
def gate_heads(x: Tensor, gate: Tensor, soft: bool = False) -> Tensor:
    """Multiply each head of `x` by the sigmoid of its gate, or by the softplus.

    x       [T, H, D]
    gate    [T, H]
    soft    by log(1 + exp(gate)) instead of sigmoid(gate)
    returns [T, H, D]  in x's dtype
    """
    wide = gate.float()
    return (x.float() * (softplus(wide) if soft else torch.sigmoid(wide))[..., None]).to(x.dtype)


def _check_split_q_gate(x: Tensor, heads: int) -> None:
    check_dense(x=x)
    check_shape("x", x, None, None)
    if heads < 1 or x.shape[1] % (2 * heads):
        raise InputError(f"rows of {x.shape[1]} do not divide into a query and a gate for each of {heads} heads.")


@op(origins=("split_q_gate",), check=_check_split_q_gate)
def split_q_gate(x: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Split a projection into each head's query and output gate.

    x       [T, heads * 2 * D]  per head the query, then the gate
    returns (queries, gates), both [T, heads, D] in x's dtype; on CUDA they are views of x
    """
    queries, gates = x.view(x.shape[0], heads, 2, x.shape[1] // (2 * heads)).unbind(2)
    return queries.contiguous(), gates.contiguous()
