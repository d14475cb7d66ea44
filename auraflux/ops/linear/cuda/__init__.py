"""Products with weights on CUDA, by the number of tokens.

One is bound by reading codes (`matvec.py`). For several, the weight is written out in the activations' dtype, and cuBLAS does
the rest. The commonest format has kernels of its own on Hopper (`gemm_int4_skinny.py`), which read codes also for several
tokens. Up to a thousand, and for gate and up of 4 bits any number, codes of 4 and 8 bits become operands of the tensor cores
there (`gemm_wgmma_launch.py`). Other formats and widths have kernels for one token (`matvec_bits.py`, `matvec_int8.py`) and up
to 16 (`gemm_bits_skinny.py`). Small weights have one launch for tens of tokens, norm and all (`gemm_cluster.py`,
`gemm_cluster_dense.py`). Dense weights go to cuBLAS.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.hopper.device import ready
from auraflux.ops.linear.cuda.builds import KERNELS
from auraflux.ops.linear.cuda.codes import check_order
from auraflux.ops.linear.cuda.dense import dequantized, multiply_dense, take
from auraflux.ops.linear.cuda.dequantize import fits_written, written
from auraflux.ops.linear.cuda.gemm_bits_skinny import fits_some, multiply_some
from auraflux.ops.linear.cuda.gemm_cluster import fits_batch, multiply_batch
from auraflux.ops.linear.cuda.gemm_cluster_dense import fits_scores, multiply_scores
from auraflux.ops.linear.cuda.gemm_int4_skinny import fits_hopper, multiply_hopper
from auraflux.ops.linear.cuda.gemm_wgmma_launch import FEW, MOST_TOGETHER, fits_tiles, multiply_hopper_tiles
from auraflux.ops.linear.cuda.gemm_wgmma_launch import WIDEST as WIDEST_NORMED
from auraflux.ops.linear.cuda.matvec import multiply_one, multiply_one_gated, multiply_one_three
from auraflux.ops.linear.cuda.matvec_bits import fits_codes_one, multiply_codes_one
from auraflux.ops.linear.cuda.matvec_dense_normed import WIDEST, multiply_normed
from auraflux.ops.linear.cuda.matvec_int4 import MOST_WEIGHTS, multiply_stream
from auraflux.ops.linear.reference import Weight
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm
from auraflux.quant import QTensor

__all__ = [
    "KERNELS",
    "add_norm_gate_up",
    "add_norm_linears",
    "add_norm_scores",
    "embed",
    "gate_up_swiglu",
    "linear",
    "linears",
]

DENSE_BATCH = 4096  # rows of dense weights; for more, cuBLAS is as good at one token


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    return linears(x, [weight], [bias])[0]


def linears(x: Tensor, weights: Sequence[Weight], biases: Sequence[Tensor | None] | None = None) -> tuple[Tensor, ...]:
    _check(x, weights)
    flat = x.view(-1, x.shape[-1])
    added = list(biases or [None] * len(weights))
    alike, plain = _one_format(weights), _small_and_dense(weights)
    if len(flat) == 1 and 1 < len(alike) <= MOST_WEIGHTS and not any(b is not None for b in added) and _fit(flat, alike):
        outs = [x.new_empty(1, weight.shape[0]) for weight in weights]
        multiply_stream(flat, alike, outs)
    elif _by_codes(flat, alike, added):
        outs = [x.new_empty(1, weight.shape[0]) for weight in weights]
        multiply_codes_one(flat, alike, outs, added)
    elif len(flat) == 1 and len(alike) == 3 and not fits_hopper(flat, alike[0]):
        outs = [x.new_empty(1, weight.shape[0]) for weight in weights]
        multiply_one_three(flat, alike, added, outs)
    elif len(flat) == 1 and len(plain) == 2 and not any(b is not None for b in added):
        outs = multiply_dense(flat, plain[0], plain[1])
    elif not any(b is not None for b in added) and (len(alike) > 1 or len(flat) > FEW) and fits_batch(flat, alike):
        outs = [x.new_empty(len(flat), weight.shape[0]) for weight in weights]
        multiply_batch(flat, alike, outs)
    elif _by_tiles(flat, alike):
        outs = _tiled(flat, alike, added)
    else:
        outs = [_product(flat, weight, bias) for weight, bias in zip(weights, added, strict=True)]
    return tuple(out.view(*x.shape[:-1], out.shape[-1]) for out in outs)


def add_norm_linears(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    _check(x, weights)
    flat, alike = x.view(-1, x.shape[-1]), _one_format(weights)
    added = any(bias is not None for bias in biases or ())
    if len(flat) == 1 and 0 < len(alike) <= MOST_WEIGHTS and not added and _fit(flat, alike) and norm.dtype is torch.float32:
        outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
        total = x if delta is None else torch.empty_like(x)
        multiply_stream(flat, alike, outs, normed=(delta, norm, total, eps))
        return total, tuple(outs)
    several = _for_streams(flat, alike)
    if several and delta is not None and not added and norm.dtype is torch.float32:
        outs = [x.new_empty(*x.shape[:-1], weight.shape[0]) for weight in weights]
        total = torch.empty_like(x)
        several(flat, alike, outs, normed=(delta, norm, total, eps))
        return total, tuple(outs)
    h, total = _normed(x, delta, norm, eps)
    return total, linears(h, weights, biases)


def add_norm_scores(
    x: Tensor,
    delta: Tensor | None,
    norm: Tensor,
    eps: float,
    weights: Sequence[Weight],
    biases: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    _check(x, weights)
    plain, added = _small_and_dense(weights), any(bias is not None for bias in biases or ())
    width = x.shape[-1]
    if x.numel() == width <= WIDEST and len(plain) in (1, 2) and not added:
        h, total, outs = multiply_normed(x, delta, norm, eps, plain)
        return h, total, tuple(out.view(*x.shape[:-1], -1) for out in outs)
    if delta is not None and not added and fits_scores(x.view(-1, width), norm, plain):
        h, total, outs = multiply_scores(x.view(-1, width), delta.view(-1, width), norm, eps, plain)
        return h.view(x.shape), total.view(x.shape), tuple(out.view(*x.shape[:-1], -1) for out in outs)
    h, total = _normed(x, delta, norm, eps)
    return h, total, linears(h, weights, biases)


def add_norm_gate_up(
    x: Tensor, delta: Tensor | None, norm: Tensor, eps: float, gate: Weight, up: Weight
) -> tuple[Tensor, Tensor]:
    _check(x, (gate, up))
    flat, alike = x.view(-1, x.shape[-1]), _one_format((gate, up))
    if len(flat) == 1 and alike and _fit(flat, alike) and norm.dtype is torch.float32:
        out = x.new_empty(*x.shape[:-1], gate.shape[0])
        total = x if delta is None else torch.empty_like(x)
        multiply_stream(flat, alike, [out], gated=True, normed=(delta, norm, total, eps))
        return total, out
    if (
        delta is not None
        and norm.dtype is torch.float32
        and x.shape[-1] <= WIDEST_NORMED
        and _by_tiles(flat, alike, gated=True)
    ):
        out = x.new_empty(*x.shape[:-1], gate.shape[0])
        total = torch.empty_like(x)
        multiply_hopper_tiles(flat, alike, [out], gated=True, normed=(delta, norm, total, eps))
        return total, out
    h, total = _normed(x, delta, norm, eps)
    return total, gate_up_swiglu(h, gate, up)


def _normed(x: Tensor, delta: Tensor | None, norm: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm of a stream to which delta is added, and their sum."""
    return (rms_norm(x, norm, eps), x) if delta is None else add_rms_norm(delta, x, norm, eps)


def gate_up_swiglu(x: Tensor, gate: Weight, up: Weight) -> Tensor:
    _check(x, (gate, up))
    flat = x.view(-1, x.shape[-1])
    tokens = len(flat)
    alike = _one_format((gate, up))
    if alike and tokens == 1:
        out = x.new_empty(tokens, gate.shape[0])
        if _fit(flat, alike):
            multiply_stream(flat, alike, [out], gated=True)
        elif _by_codes(flat, alike, ()):
            multiply_codes_one(flat, alike, [out], gated=True)
        else:
            multiply_one_gated(flat, alike[0], alike[1], out)
    elif _by_tiles(flat, alike, gated=True):
        out = x.new_empty(tokens, gate.shape[0])
        multiply_hopper_tiles(flat, alike, [out], gated=True)
    else:
        out = swiglu(_product(flat, gate, None), _product(flat, up, None))
    return out.view(*x.shape[:-1], out.shape[-1])


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


def _one_format(weights: Sequence[Weight]) -> list[QTensor]:
    """The weights where they are quantized alike, else none."""
    held = [weight for weight in weights if isinstance(weight, QTensor)]
    return held if len(held) == len(weights) and len({weight.format for weight in held}) == 1 else []


def _small_and_dense(weights: Sequence[Weight]) -> list[Tensor]:
    """The weights where they are dense, small and of one dtype, else none."""
    found = [weight for weight in weights if isinstance(weight, Tensor) and 0 < weight.shape[0] <= DENSE_BATCH]
    return found if len(found) == len(weights) and len({weight.dtype for weight in found}) == 1 else []


def _fit(x: Tensor, weights: Sequence[QTensor]) -> bool:
    return all(fits_hopper(x, weight) for weight in weights)


def _by_codes(x: Tensor, weights: Sequence[QTensor], added: Sequence[Tensor | None]) -> bool:
    """Whether one token goes to the kernel for every format: not where that for the commonest one serves."""
    bare = all(vector is None for vector in added)
    return fits_codes_one(x, weights, added) and not (bare and _fit(x, weights))


def _by_tiles(x: Tensor, weights: Sequence[QTensor], gated: bool = False) -> bool:
    """Whether weights of one format are multiplied by tiles of tokens: not where the kernel for few tokens serves."""
    return bool(weights) and fits_tiles(x, weights, gated) and not (len(x) <= FEW and _fit(x, weights))


def _for_streams(x: Tensor, weights: Sequence[QTensor]) -> Callable[..., None] | None:
    """What multiplies several tokens of a normalised stream by weights of one format in few launches, if anything."""
    if weights and fits_batch(x, weights):
        return multiply_batch
    if len(weights) <= MOST_TOGETHER and x.shape[1] <= WIDEST_NORMED and _by_tiles(x, weights):
        return multiply_hopper_tiles
    return None


def _tiled(x: Tensor, weights: Sequence[QTensor], biases: Sequence[Tensor | None]) -> list[Tensor]:
    outs = [x.new_empty(len(x), weight.shape[0]) for weight in weights]
    for first in range(0, len(outs), MOST_TOGETHER):
        some = slice(first, first + MOST_TOGETHER)
        multiply_hopper_tiles(x, weights[some], outs[some])
    return [out if bias is None else (out + bias).to(x.dtype) for out, bias in zip(outs, biases, strict=True)]


def _product(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x [T, K] times a weight, [T, N] in x's dtype."""
    tokens, rows = x.shape[0], weight.shape[0]
    if not tokens or not rows or not x.shape[1]:
        return x.new_zeros(tokens, rows) + (0 if bias is None else bias.to(x.dtype))
    if isinstance(weight, QTensor):
        out = x.new_empty(tokens, rows)
        if bias is None and fits_hopper(x, weight):
            multiply_hopper(x, weight, out)
            return out
        if _by_codes(x, [weight], [bias]):
            multiply_codes_one(x, [weight], [out], [bias])
            return out
        if fits_some(x, weight):
            multiply_some(x, weight, out)
            return out if bias is None else (out + bias).to(x.dtype)
        if tokens == 1:
            multiply_one(x, weight, bias, out)
            return out
        weight = written(weight) if fits_written(weight, x.dtype) else dequantized(weight, x.dtype)
    out = _dense(x, weight)
    return (out if bias is None else out + bias).to(x.dtype)


def _dense(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] == 1 and (x.dtype != weight.dtype or weight.shape[0] <= DENSE_BATCH):
        return multiply_dense(x, weight)[0]
    return x @ weight.T if x.dtype == weight.dtype else x.float() @ weight.float().T
