"""Which kernel multiplies tokens by weights on CUDA: the first below that does not refuse.

One token is bound by reading codes, so every format has a matvec, and the last of them reads all. Some tokens are multiplied
straight from codes of MLX's formats: up to 16 by skinny products, up to 64 by clusters that share the width, up to a thousand
(for gate and up of 4 bits any number) with wgmma. For more, and for other formats, the weight is written out in the
activations' dtype, and cuBLAS does the rest, as it does with dense weights.

Inside `invariant` four-bit weights have kernels of one order of sums, for one token and for several, and others `gemm_alike`.
"""

import torch
from torch import Tensor

from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.linear.cuda import (
    gemm_alike,
    gemm_bits_skinny,
    gemm_cluster,
    gemm_cluster_dense,
    gemm_int4_alike,
    gemm_int4_skinny,
    gemm_wgmma_launch,
    limits,
    matvec,
    matvec_bits,
    matvec_dense_normed,
    matvec_int4,
    matvec_int4_tma,
    matvec_int8,
    matvec_whole,
)
from auraflux.ops.linear.cuda.call import Call, Made, Normed
from auraflux.ops.linear.cuda.dense import dequantized, multiply_dense
from auraflux.ops.linear.cuda.dequantize import written
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm
from auraflux.ops.routes import Route, Routes


def _normed(call: Call) -> Normed:
    """A call's norm with room for the sum of x and what is added to it; x itself, where nothing is."""
    assert call.norm is not None
    delta, weight, eps = call.norm
    return Normed(delta, weight, call.x if delta is None else torch.empty_like(call.x), float(eps))


def _matvec_int4(call: Call) -> Made:
    outs = call.outs()
    if call.norm is None:
        matvec_int4.multiply(call.x, call.coded, outs, call.gated)
        return Made(outs)
    normed = _normed(call)
    matvec_int4.multiply(call.x, call.coded, outs, call.gated, normed)
    return Made(outs, normed.total)


def _int4_alike(call: Call) -> Made:
    outs = call.outs()
    if call.norm is None:
        gemm_int4_alike.multiply(call.x, call.coded, outs, call.gated)
        return Made(outs)
    normed = _normed(call)
    gemm_int4_alike.multiply(call.x, call.coded, outs, call.gated, normed)
    return Made(outs, normed.total)


def _alike(call: Call) -> Made:
    outs = call.outs()
    gemm_alike.multiply(call.x, call.weights[0], call.biases[0], outs[0])
    return Made(outs)


def _matvec_int4_tma(call: Call) -> Made:
    outs = call.outs()
    matvec_int4_tma.multiply(call.x, call.coded[0], outs[0], multiprocessors(call.x.device))
    return Made(outs)


def _matvec_bits(call: Call) -> Made:
    outs = call.outs()
    matvec_bits.multiply(call.x, call.coded, outs, call.biases, call.gated)
    return Made(outs)


def _matvec_int8(call: Call) -> Made:
    outs = call.outs()
    matvec_int8.multiply(call.x, call.coded, outs, call.biases, call.gated)
    return Made(outs)


def _matvec_whole(call: Call) -> Made:
    outs = call.outs()
    if call.gated:
        matvec_whole.multiply_gated(call.x, call.coded[0], call.coded[1], outs[0])
    else:
        matvec_whole.multiply(call.x, call.coded, outs, call.biases)
    return Made(outs)


def _matvec_three(call: Call) -> Made:
    outs = call.outs()
    matvec.multiply_three(call.x, call.coded, call.biases, outs)
    return Made(outs)


def _matvec_gated(call: Call) -> Made:
    outs = call.outs()
    matvec.multiply_gated(call.x, call.coded[0], call.coded[1], outs[0])
    return Made(outs)


def _matvec(call: Call) -> Made:
    outs = call.outs()
    matvec.multiply(call.x, call.coded[0], call.biases[0], outs[0])
    return Made(outs)


def _dense_normed(call: Call) -> Made:
    assert call.norm is not None
    normed, total, outs = matvec_dense_normed.multiply(call.x, *call.norm, call.dense)
    return Made(outs, total, normed)


def _dense_two(call: Call) -> Made:
    return Made(multiply_dense(call.x, *call.dense))


def _cluster_dense(call: Call) -> Made:
    assert call.norm is not None
    assert call.norm.delta is not None
    normed, total, outs = gemm_cluster_dense.multiply(call.x, call.norm.delta, call.norm.weight, call.norm.eps, call.dense)
    return Made(outs, total, normed)


def _cluster(call: Call) -> Made:
    outs = call.outs()
    if call.norm is None:
        gemm_cluster.multiply(call.x, call.coded, outs)
        return Made(outs)
    normed = _normed(call)
    gemm_cluster.multiply(call.x, call.coded, outs, normed)
    return Made(outs, normed.total)


def _wgmma(call: Call) -> Made:
    outs = call.outs()
    if call.norm is not None:
        normed = _normed(call)
        gemm_wgmma_launch.multiply(call.x, call.coded, outs, call.gated, normed)
        return Made(outs, normed.total)
    if call.gated:
        gemm_wgmma_launch.multiply(call.x, call.coded, outs, gated=True)
        return Made(outs)
    for first in range(0, len(outs), gemm_wgmma_launch.MOST_TOGETHER):
        some = slice(first, first + gemm_wgmma_launch.MOST_TOGETHER)
        gemm_wgmma_launch.multiply(call.x, call.coded[some], outs[some])
    return Made([_with_bias(out, bias) for out, bias in zip(outs, call.biases, strict=True)])


def _int4_skinny(call: Call) -> Made:
    outs = call.outs()
    gemm_int4_skinny.multiply(call.x, call.coded[0], outs[0])
    return Made(outs)


def _bits_skinny(call: Call) -> Made:
    outs = call.outs()
    gemm_bits_skinny.multiply(call.x, call.coded[0], outs[0])
    return Made([_with_bias(outs[0], call.biases[0])])


def _with_bias(out: Tensor, bias: Tensor | None) -> Tensor:
    return out if bias is None else (out + bias).to(out.dtype)


def _without_norm(call: Call, x: Tensor) -> Call:
    return Call(x, call.weights, call.biases, gated=call.gated)


def _norm_first(call: Call) -> Made:
    assert call.norm is not None
    delta, weight, eps = call.norm
    h, total = (rms_norm(call.x, weight, eps), call.x) if delta is None else add_rms_norm(delta, call.x, weight, eps)
    return Made(PRODUCTS(_without_norm(call, h)).outs, total, h)


def _alone(call: Call) -> list[Call]:
    return [Call(call.x, [weight], [bias]) for weight, bias in zip(call.weights, call.biases, strict=True)]


def _one_by_one(call: Call) -> Made:
    return Made([PRODUCTS(each).outs[0] for each in _alone(call)])


def _gate_and_up(call: Call) -> Made:
    gate, up = _one_by_one(call).outs
    return Made([swiglu(gate, up)])


def _empty(call: Call) -> Made:
    bias = call.biases[0]
    return Made([call.x.new_zeros(call.tokens, call.weights[0].shape[0]) + (0 if bias is None else bias.to(call.x.dtype))])


def _written(call: Call) -> Made:
    return _cublas(Call(call.x, [written(call.coded[0])], call.biases))


def _dequantized(call: Call) -> Made:
    return _cublas(Call(call.x, [dequantized(call.coded[0], call.x.dtype)], call.biases))


def _dense_one(call: Call) -> Made:
    weight = call.weights[0]
    assert isinstance(weight, Tensor)
    return _biased(multiply_dense(call.x, weight)[0], call)


def _cublas(call: Call) -> Made:
    x, weight = call.x, call.weights[0]
    assert isinstance(weight, Tensor)
    return _biased(x @ weight.T if x.dtype == weight.dtype else x.float() @ weight.float().T, call)


def _biased(out: Tensor, call: Call) -> Made:
    bias = call.biases[0]
    return Made([(out if bias is None else out + bias).to(call.x.dtype)])


def _each(call: Call) -> list[tuple[Routes[Call, Made], Call]]:
    return [(PRODUCTS, each) for each in _alone(call)]


PRODUCTS: Routes[Call, Made] = Routes(
    Route("nothing to multiply", limits.refuses_empty, _empty, alike=True),
    Route("matvec_int4_tma", limits.refuses_matvec_int4_tma, _matvec_int4_tma),
    Route("matvec_int4_alike", limits.refuses_matvec_int4_alike, _int4_alike, alike=True),
    Route("gemm_int4_alike", limits.refuses_int4_alike, _int4_alike, alike=True),
    Route("matvec_int4", limits.refuses_matvec_int4, _matvec_int4),
    Route("matvec_int8", limits.refuses_matvec_int8, _matvec_int8),
    Route("matvec_bits", limits.refuses_matvec_bits, _matvec_bits),
    Route("matvec_whole", limits.refuses_matvec_whole, _matvec_whole),
    Route("matvec of three", limits.refuses_matvec_three, _matvec_three),
    Route("matvec of gate and up", limits.refuses_matvec_gated, _matvec_gated),
    Route("matvec_dense_normed", limits.refuses_dense_normed, _dense_normed, alike=True),
    Route("dense matvec of two", limits.refuses_dense_two, _dense_two),
    Route("gemm_cluster_dense", limits.refuses_cluster_dense, _cluster_dense),
    Route("gemm_cluster", limits.refuses_cluster, _cluster),
    Route("gemm_wgmma", limits.refuses_wgmma, _wgmma),
    Route(
        "norm first", limits.refuses_norm_first, _norm_first, lambda call: [(PRODUCTS, _without_norm(call, call.x))], alike=True
    ),
    Route("gate and up apart", limits.refuses_gate_and_up, _gate_and_up, _each, alike=True),
    Route("one by one", limits.refuses_one_by_one, _one_by_one, _each, alike=True),
    Route("gemm_alike", limits.refuses_alike, _alike, alike=True),
    Route("gemm_int4_skinny", limits.refuses_int4_skinny, _int4_skinny),
    Route("gemm_bits_skinny", limits.refuses_bits_skinny, _bits_skinny),
    Route("matvec", limits.refuses_matvec, _matvec),
    Route("dequantized in bf16, then cuBLAS", limits.refuses_written, _written),
    Route("dequantized, then cuBLAS", limits.refuses_dequantized, _dequantized),
    Route("dense matvec", limits.refuses_dense_one, _dense_one),
    Route("cuBLAS", limits.refuses_nothing, _cublas),
    key=limits.key,
)
ROUTES = dict.fromkeys(
    ("linear", "linears", "add_norm_linears", "add_norm_scores", "add_norm_gate_up", "gate_up_swiglu"), PRODUCTS
)
