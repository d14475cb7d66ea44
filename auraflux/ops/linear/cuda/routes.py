"""Routes of products on CUDA, tried in order: the first whose conditions in `limits.py` hold multiplies.

One token is bound by reading codes, so every format has a matvec, and the last of them reads all formats. Up to 16 tokens are
multiplied from codes by skinny GEMMs, up to 64 by clusters that split K, or by tiles where there are no clusters, up to 1024
(4-bit gate and up: any number) by wgmma. Beyond that, and for other formats, the weight is dequantized to the activations'
dtype for cuBLAS, which also multiplies dense weights.

Where FP8 products are requested, 512 tokens and more are multiplied in FP8.

With batch invariance requested, four-bit weights have a matvec and a GEMM of one summation order; other weights have
`gemm_invariant`.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from auraflux.ops import route_speed as speed
from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.linear.cuda import limits
from auraflux.ops.linear.cuda.call import Call, FusedNorm, Products
from auraflux.ops.linear.cuda.dense import dequantized, multiply_dense
from auraflux.ops.linear.cuda.dequantize import dequantized_bf16
from auraflux.ops.linear.cuda.gemm import bits_skinny as gemm_bits_skinny
from auraflux.ops.linear.cuda.gemm import cluster as gemm_cluster
from auraflux.ops.linear.cuda.gemm import cluster_dense as gemm_cluster_dense
from auraflux.ops.linear.cuda.gemm import fp8 as gemm_fp8
from auraflux.ops.linear.cuda.gemm import int4_invariant as gemm_int4_invariant
from auraflux.ops.linear.cuda.gemm import int4_skinny as gemm_int4_skinny
from auraflux.ops.linear.cuda.gemm import int4_tiles as gemm_int4_tiles
from auraflux.ops.linear.cuda.gemm import invariant as gemm_invariant
from auraflux.ops.linear.cuda.gemm import wgmma_launch as gemm_wgmma_launch
from auraflux.ops.linear.cuda.matvec import any_format as matvec_any_format
from auraflux.ops.linear.cuda.matvec import bits as matvec_bits
from auraflux.ops.linear.cuda.matvec import dense_normed as matvec_dense_normed
from auraflux.ops.linear.cuda.matvec import int4 as matvec_int4
from auraflux.ops.linear.cuda.matvec import int4_loop as matvec_int4_loop
from auraflux.ops.linear.cuda.matvec import int4_tma as matvec_int4_tma
from auraflux.ops.linear.cuda.matvec import int8 as matvec_int8
from auraflux.ops.linear.cuda.matvec import integer as matvec_integer
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm
from auraflux.ops.routes import Route, Routes


def _fused_norm(call: Call) -> FusedNorm:
    """Return a call's norm with a buffer for x + delta; x itself where there is no delta."""
    assert call.norm is not None
    delta, weight, eps = call.norm
    return FusedNorm(delta, weight, call.x if delta is None else torch.empty_like(call.x), float(eps))


def _matvec_int4(multiply: Callable[..., None], call: Call) -> Products:
    outs = call.outs()
    if call.norm is None:
        multiply(call.x, call.quantized, outs, call.gated)
        return Products(outs)
    norm = _fused_norm(call)
    multiply(call.x, call.quantized, outs, call.gated, norm)
    return Products(outs, norm.total)


def _int4_invariant(call: Call) -> Products:
    outs = call.outs()
    if call.norm is None:
        gemm_int4_invariant.multiply(call.x, call.quantized, outs, call.gated)
        return Products(outs)
    norm = _fused_norm(call)
    gemm_int4_invariant.multiply(call.x, call.quantized, outs, call.gated, norm)
    return Products(outs, norm.total)


def _invariant(call: Call) -> Products:
    outs = call.outs()
    gemm_invariant.multiply(call.x, call.weights[0], call.biases[0], outs[0])
    return Products(outs)


def _matvec_int4_tma(call: Call) -> Products:
    outs = call.outs()
    matvec_int4_tma.multiply(call.x, call.quantized[0], outs[0], multiprocessors(call.x.device))
    return Products(outs)


def _matvec_bits(call: Call) -> Products:
    outs = call.outs()
    matvec_bits.multiply(call.x, call.quantized, outs, call.biases, call.gated)
    return Products(outs)


def _matvec_int8(call: Call) -> Products:
    outs = call.outs()
    matvec_int8.multiply(call.x, call.quantized, outs, call.biases, call.gated)
    return Products(outs)


def _matvec_integer(call: Call) -> Products:
    outs = call.outs()
    if call.gated:
        matvec_integer.multiply_gated(call.x, call.quantized[0], call.quantized[1], outs[0])
    else:
        matvec_integer.multiply(call.x, call.quantized, outs, call.biases)
    return Products(outs)


def _matvec_three(call: Call) -> Products:
    outs = call.outs()
    matvec_any_format.multiply_three(call.x, call.quantized, call.biases, outs)
    return Products(outs)


def _matvec_gated(call: Call) -> Products:
    outs = call.outs()
    matvec_any_format.multiply_gated(call.x, call.quantized[0], call.quantized[1], outs[0])
    return Products(outs)


def _matvec(call: Call) -> Products:
    outs = call.outs()
    matvec_any_format.multiply(call.x, call.quantized[0], call.biases[0], outs[0])
    return Products(outs)


def _dense_normed(call: Call) -> Products:
    assert call.norm is not None
    normed, total, outs = matvec_dense_normed.multiply(call.x, *call.norm, call.dense)
    return Products(outs, total, normed)


def _dense_two(call: Call) -> Products:
    return Products(multiply_dense(call.x, *call.dense))


def _cluster_dense(call: Call) -> Products:
    assert call.norm is not None
    assert call.norm.delta is not None
    normed, total, outs = gemm_cluster_dense.multiply(call.x, call.norm.delta, call.norm.weight, call.norm.eps, call.dense)
    return Products(outs, total, normed)


def _cluster(call: Call) -> Products:
    outs = call.outs()
    if call.norm is None:
        gemm_cluster.multiply(call.x, call.quantized, outs)
        return Products(outs)
    norm = _fused_norm(call)
    gemm_cluster.multiply(call.x, call.quantized, outs, norm)
    return Products(outs, norm.total)


def _wgmma(call: Call) -> Products:
    outs = call.outs()
    if call.norm is not None:
        norm = _fused_norm(call)
        gemm_wgmma_launch.multiply(call.x, call.quantized, outs, call.gated, norm)
        return Products(outs, norm.total)
    if call.gated:
        gemm_wgmma_launch.multiply(call.x, call.quantized, outs, gated=True)
        return Products(outs)
    for first in range(0, len(outs), gemm_wgmma_launch.MOST_TOGETHER):
        some = slice(first, first + gemm_wgmma_launch.MOST_TOGETHER)
        gemm_wgmma_launch.multiply(call.x, call.quantized[some], outs[some])
    return Products([_with_bias(out, bias) for out, bias in zip(outs, call.biases, strict=True)])


def _fp8(call: Call) -> Products:
    h, total = _normed(call)
    outs = gemm_fp8.multiply(h, call.weights)
    if call.gated:
        return Products([swiglu(*outs)], total)
    return Products([_with_bias(out, bias) for out, bias in zip(outs, call.biases, strict=True)], total)


def _int4_skinny(call: Call) -> Products:
    outs = call.outs()
    gemm_int4_skinny.multiply(call.x, call.quantized[0], outs[0])
    return Products(outs)


def _int4_tiles(call: Call) -> Products:
    return Products(gemm_int4_tiles.multiply(call.x, call.quantized, call.biases[0]))


def _several_int4_tiles(call: Call) -> Products:
    outs = gemm_int4_tiles.multiply(call.x, call.quantized, None)
    return Products([swiglu(*outs)] if call.gated else outs)


def _bits_skinny(call: Call) -> Products:
    outs = call.outs()
    gemm_bits_skinny.multiply(call.x, call.quantized[0], outs[0])
    return Products([_with_bias(outs[0], call.biases[0])])


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else (out + bias).to(out.dtype)


def _without_norm(call: Call, x: Tensor) -> Call:
    return Call(x, call.weights, call.biases, gated=call.gated)


def _normed(call: Call) -> tuple[Tensor, Tensor | None]:
    """Return a call's normalised activations, and the sum before the norm; x and None without a norm."""
    if call.norm is None:
        return call.x, None
    delta, weight, eps = call.norm
    return (rms_norm(call.x, weight, eps), call.x) if delta is None else add_rms_norm(delta, call.x, weight, eps)


def _norm_first(call: Call) -> Products:
    h, total = _normed(call)
    return Products(PRODUCTS(_without_norm(call, h)).outs, total, h)


def _separate(call: Call) -> list[Call]:
    return [Call(call.x, [weight], [bias]) for weight, bias in zip(call.weights, call.biases, strict=True)]


def _one_by_one(call: Call) -> Products:
    return Products([PRODUCTS(each).outs[0] for each in _separate(call)])


def _gate_and_up(call: Call) -> Products:
    gate, up = _one_by_one(call).outs
    return Products([swiglu(gate, up)])


def _empty(call: Call) -> Products:
    bias = call.biases[0]
    return Products([call.x.new_zeros(call.tokens, call.weights[0].shape[0]) + (0 if bias is None else bias.to(call.x.dtype))])


def _dequantized_bf16(call: Call) -> Products:
    return _cublas(Call(call.x, [dequantized_bf16(call.quantized[0])], call.biases))


def _dequantized(call: Call) -> Products:
    return _cublas(Call(call.x, [dequantized(call.quantized[0], call.x.dtype)], call.biases))


def _dense_one(call: Call) -> Products:
    weight = call.weights[0]
    assert isinstance(weight, Tensor)
    return _biased(multiply_dense(call.x, weight)[0], call)


def _cublas(call: Call) -> Products:
    x, weight = call.x, call.weights[0]
    assert isinstance(weight, Tensor)
    return _biased(x @ weight.T if x.dtype == weight.dtype else x.float() @ weight.float().T, call)


def _biased(out: Tensor, call: Call) -> Products:
    bias = call.biases[0]
    return Products([(out if bias is None else out + bias).to(call.x.dtype)])


def _then_each(call: Call) -> list[tuple[Routes[Call, Products], Call]]:
    return [(PRODUCTS, each) for each in _separate(call)]


PRODUCTS: Routes[Call, Products] = Routes(
    Route("nothing to multiply", limits.EMPTY, _empty, invariant=True),
    Route("matvec_int4_tma", limits.MATVEC_INT4_TMA, _matvec_int4_tma, speed=speed.MATVEC),
    Route("matvec_int4_invariant", limits.MATVEC_INT4_INVARIANT, _int4_invariant, invariant=True, speed=speed.MATVEC),
    Route("gemm_int4_invariant", limits.GEMM_INT4_INVARIANT, _int4_invariant, invariant=True, speed=speed.GEMM_INVARIANT),
    Route("matvec_int4_loop", limits.MATVEC_INT4_LOOP, partial(_matvec_int4, matvec_int4_loop.multiply), speed=speed.MATVEC),
    Route("matvec_int4", limits.MATVEC_INT4, partial(_matvec_int4, matvec_int4.multiply), speed=speed.MATVEC),
    Route("matvec_int8", limits.MATVEC_INT8, _matvec_int8, speed=speed.MATVEC),
    Route("matvec_bits", limits.MATVEC_BITS, _matvec_bits, speed=speed.MATVEC),
    Route("matvec_integer", limits.MATVEC_INTEGER, _matvec_integer, speed=speed.MATVEC_SLOWER),
    Route("matvec of three", limits.MATVEC_THREE, _matvec_three, speed=speed.MATVEC_SLOWER),
    Route("matvec of gate and up", limits.MATVEC_GATED, _matvec_gated, speed=speed.MATVEC_SLOWER),
    Route("matvec_dense_normed", limits.MATVEC_DENSE_NORMED, _dense_normed, invariant=True, speed=speed.DENSE_MATVEC),
    Route("dense matvec of two", limits.MATVEC_DENSE_TWO, _dense_two, speed=speed.DENSE_MATVEC),
    Route("gemm_fp8", limits.GEMM_FP8, _fp8, speed=speed.GEMM),
    Route("gemm_cluster_dense", limits.GEMM_CLUSTER_DENSE, _cluster_dense, speed=speed.DENSE_GEMM),
    Route("gemm_cluster", limits.GEMM_CLUSTER, _cluster, speed=speed.GEMM),
    Route("gemm_wgmma", limits.GEMM_WGMMA, _wgmma, speed=speed.GEMM),
    Route("norm first", limits.NORM_FIRST, _norm_first, lambda call: [(PRODUCTS, _without_norm(call, call.x))], invariant=True),
    Route("gemm_int4_tiles of several", limits.SEVERAL_INT4_TILES, _several_int4_tiles, speed=speed.GEMM),
    Route("gate and up separately", limits.GATE_AND_UP, _gate_and_up, _then_each, invariant=True),
    Route("one by one", limits.ONE_BY_ONE, _one_by_one, _then_each, invariant=True),
    Route("gemm_invariant", limits.GEMM_INVARIANT, _invariant, invariant=True, speed=speed.GEMM_INVARIANT),
    Route("gemm_int4_skinny", limits.GEMM_INT4_SKINNY, _int4_skinny, speed=speed.GEMM),
    Route("gemm_int4_tiles", limits.GEMM_INT4_TILES, _int4_tiles, speed=speed.GEMM),
    Route("gemm_bits_skinny", limits.GEMM_BITS_SKINNY, _bits_skinny, speed=speed.GEMM),
    Route("matvec", limits.MATVEC_ANY_FORMAT, _matvec, speed=speed.MATVEC_SLOWER),
    Route("dequantized in bf16, then cuBLAS", limits.DEQUANTIZE_BF16, _dequantized_bf16, speed=speed.DEQUANTIZED),
    Route("dequantized, then cuBLAS", limits.QUANTIZED, _dequantized, speed=speed.DEQUANTIZED),
    Route("dense matvec", limits.MATVEC_DENSE, _dense_one, speed=speed.DENSE_MATVEC),
    Route("cuBLAS", limits.ALWAYS, _cublas, speed=speed.DENSE_GEMM),
    key=limits.key,
)
ROUTES = dict.fromkeys(
    ("linear", "linears", "add_norm_linears", "add_norm_scores", "add_norm_gate_up", "gate_up_swiglu"), PRODUCTS
)
