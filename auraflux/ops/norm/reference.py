"""Norms of rows. Sums of squares are float32; results have the input's dtype."""

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_floating, check_shape, op

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _check_rows(name: str, x: Tensor) -> int:
    """Refuse a tensor without rows of floats; return their width."""
    check_dtype(name, x, *FLOATS)
    shape = x.shape
    if not shape or not shape[-1]:
        raise InputError(f"'{name}' has shape {list(shape)}; rows of at least one element are needed.")
    return shape[-1]


def check_eps(eps: float) -> None:
    """Refuse a negative or NaN epsilon."""
    if not eps >= 0:
        raise InputError(f"'eps' is {eps}; it may not be negative.")


def _check_rms_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    check_dense(x=x, weight=weight)
    check_eps(eps)
    check_shape("weight", weight, _check_rows("x", x))
    check_floating(weight=weight)


@op(
    origins=(
        "rms_norm_sum_sq",
        "rms_norm_apply",
        "rms_norm_apply_bf16",
        "rms_norm_bf16_fused_n_tokens",
        "rms_norm_per_head_n_tokens",
    ),
    check=_check_rms_norm,
)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Scale each row to unit root mean square, then by `weight`.

    x       [..., D]  rows: hidden vectors or heads
    weight  [D]
    returns [..., D]  in x's dtype
    """
    wide = x.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * weight.float()).to(x.dtype)


def _check_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> None:
    _check_rms_norm(x, weight, eps)
    check_dense(x=x, bias=bias)
    check_shape("bias", bias, *weight.shape)
    check_floating(bias=bias)


@op(check=_check_layer_norm)
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise each row to zero mean and unit variance, scale by `weight` and add `bias`.

    x             [..., D]
    weight, bias  [D]
    returns       [..., D]  in x's dtype
    """
    centred = x.float() - x.float().mean(-1, keepdim=True)
    unit = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (unit * weight.float() + bias.float()).to(x.dtype)


def check_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    check_eps(eps)
    check_dense(x=x, residual=residual, weight=weight)
    check_shape("residual", residual, *x.shape)
    check_shape("weight", weight, _check_rows("x", x))
    check_floating(weight=weight)


@op(origins=("residual_add", "residual_add_n_tokens"), check=check_add_rms_norm)
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add a layer's output to the residual stream and normalise the sum for the next layer.

    x, residual [..., D]
    weight      [D]
    returns     (the norm of the sum, the sum), both [..., D] in x's dtype
    """
    total = (x.float() + residual.float()).to(x.dtype)
    return rms_norm.reference(total, weight, eps), total


def _check_gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> None:
    check_dense(x=x, z=z, weight=weight)
    check_eps(eps)
    check_shape("z", z, *x.shape)
    check_shape("weight", weight, _check_rows("x", x))
    check_floating(weight=weight)


@op(origins=("gated_rms_norm",), check=_check_gated_rms_norm)
def gated_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise each head of a delta layer's output and gate it with silu(z).

    x, z    [..., D]
    weight  [D]
    returns [..., D]  in x's dtype
    """
    wide, gate = x.float(), z.float()
    unit = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (unit * weight.float() * torch.nn.functional.silu(gate)).to(x.dtype)


def _check_group_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> None:
    check_dense(x=x, z=z, weight=weight)
    check_eps(eps)
    check_shape("x", x, None, None, None)
    check_shape("z", z, *x.shape)
    check_shape("weight", weight, x.shape[1], _check_rows("x", x))
    check_floating(weight=weight)


@op(check=_check_group_rms_norm)
def group_rms_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Gate a Mamba layer's output with silu(z), then normalise each group of its channels.

    x, z    [T, G, D]
    weight  [G, D]
    returns [T, G, D]  in x's dtype
    """
    gated = x.float() * torch.nn.functional.silu(z.float())
    unit = gated * torch.rsqrt(gated.square().mean(-1, keepdim=True) + eps)
    return (unit * weight.float()).to(x.dtype)


def _check_qk_norm(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> None:
    check_dense(q=q, k=k)
    check_eps(eps)
    q_width, k_width = _check_rows("q", q), _check_rows("k", k)
    if q_width != k_width:
        raise InputError(f"q has heads of width {q_width}, k of {k_width}; they must be equal.")


@op(origins=("rms_norm_qk",), check=_check_qk_norm)
def qk_norm(q: Tensor, k: Tensor, eps: float, mean: bool = False) -> tuple[Tensor, Tensor]:
    """Normalise the queries and keys of a delta layer per head: k to length 1, q to length 1/sqrt(K).

    q, k    [..., K]
    mean    whether eps is added to the mean of squares (the rms form) or to their sum (Hugging Face's checkpoints)
    returns (q, k) in their dtypes
    """
    width = q.shape[-1]
    inside = eps * width if mean else eps

    def unit(x: Tensor) -> Tensor:
        wide = x.float()
        return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + inside)

    return (unit(q) * width**-0.5).to(q.dtype), unit(k).to(k.dtype)


def _check_per_layer_inputs(projected: Tensor, embedded: Tensor, weight: Tensor, eps: float, share: float) -> None:
    check_eps(eps)
    check_dense(projected=projected, embedded=embedded, weight=weight)
    check_shape("projected", projected, None, None)
    check_shape("embedded", embedded, *projected.shape)
    check_shape("weight", weight, None)
    check_floating(projected=projected, embedded=embedded, weight=weight)
    if not weight.numel() or projected.shape[1] % weight.numel():
        raise InputError(f"rows of {projected.shape[1]} do not divide into parts of {weight.numel()}, the weight's width.")


@op(check=_check_per_layer_inputs)
def per_layer_inputs(projected: Tensor, embedded: Tensor, weight: Tensor, eps: float, share: float) -> Tensor:
    """Normalise each layer's projection, add `share` times its embedding, and split the layers.

    projected, embedded  [T, L * P]
    weight               [P]
    returns              [L, T, P]  in projected's dtype
    """
    parts = rms_norm.reference(projected.float().unflatten(1, (-1, len(weight))), weight, eps)
    both = parts + share * embedded.float().unflatten(1, (-1, len(weight)))
    return both.transpose(0, 1).to(projected.dtype).contiguous()
