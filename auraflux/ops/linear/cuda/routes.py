"""Which kernel multiplies tokens by weights on CUDA: the first below that does not refuse.

One token is bound by reading codes, so every format has a matvec. Some tokens are multiplied straight from codes: up to 16 by
skinny products, up to 64 by clusters that share the width, up to a thousand (for gate and up of 4 bits any number) with wgmma.
For more, the weight is written out in the activations' dtype, and cuBLAS does the rest, as it does with dense weights.
"""

import torch
from torch import Tensor

from auraflux.ops.activation.cuda import swiglu
from auraflux.ops.hopper.device import multiprocessors, not_hopper
from auraflux.ops.linear.cuda import (
    gemm_bits_skinny,
    gemm_cluster,
    gemm_cluster_dense,
    gemm_int4_skinny,
    gemm_wgmma_launch,
    matvec,
    matvec_bits,
    matvec_dense_normed,
    matvec_int4,
    matvec_int4_tma,
    matvec_int8,
)
from auraflux.ops.linear.cuda.call import DENSE_ROWS, Call, Made
from auraflux.ops.linear.cuda.dense import dequantized, multiply_dense
from auraflux.ops.linear.cuda.dequantize import not_written, written
from auraflux.ops.linear.cuda.row_copies import SERVED
from auraflux.ops.norm.cuda import add_rms_norm, rms_norm
from auraflux.ops.routes import Route, Routes
from auraflux.quant import QTensor

BF16 = torch.bfloat16
INT4 = (4, 64, 1, BF16)  # the commonest format: 4 bits in groups of 64
ALIGNED = 16  # bytes, as wide copies need it

NOT_ALIKE = "the weights are not all quantized, and alike"
NOT_PLAIN = "it is not a product alone"
BIASED = "a bias is added"
SEVERAL = "there are several weights"
UNALIGNED = "an address is not a multiple of 16 bytes"


def _unaligned(*tensors: Tensor | None) -> bool:
    addresses = 0
    for tensor in tensors:
        if tensor is not None:
            addresses |= tensor.data_ptr()
    return addresses % ALIGNED != 0


def _not_one(call: Call) -> str | None:
    return None if call.tokens == 1 else f"{call.tokens} tokens; it is for one"


def _not_int4(x: Tensor, weight: QTensor) -> str | None:
    """Why x and a weight are not in the commonest format."""
    if weight.format != INT4:
        return f"{weight.bits} bits in groups of {weight.group}; it is for 4 in 64, scales in bf16"
    if x.dtype is not BF16:
        return "activations are not bf16"
    return not_hopper(x.device) or (UNALIGNED if _unaligned(x, weight.packed, weight.scales) else None)


def _not_tiled(weight: QTensor) -> str | None:
    rows, width = weight.shape
    if rows % 16 or width % 256:
        return f"{rows} x {width} is not whole tiles of 16 x 256"
    return f"wider than {matvec_int4.WIDEST}" if width > matvec_int4.WIDEST else None


def _not_of_rows(x: Tensor, weight: QTensor) -> str | None:
    """Why the kernels that copy blocks of 16 rows do not read a weight."""
    (rows, width), kind = weight.shape, torch.uint8 if weight.biases is None else BF16
    if x.dtype is not BF16 or weight.scales.dtype is not kind:
        return "activations or scales are not bf16"
    if weight.lanes != 1 or (weight.bits, weight.group) not in SERVED:
        return f"{weight.bits} bits in groups of {weight.group}"
    if rows == 0 or rows % 16 or width * weight.bits % 128:
        return f"{rows} x {width} is not whole blocks of 16 rows, and of 16 bytes"
    return not_hopper(x.device) or (UNALIGNED if _unaligned(x, weight.packed, weight.scales, weight.biases) else None)


def _not_normed(call: Call) -> str | None:
    """Why a kernel that adds and normalises tokens itself does not do so here."""
    if call.scored:
        return "the normalised stream is wanted, too"
    return "the norm is not in float32" if call.norm is not None and call.norm.weight.dtype is not torch.float32 else None


def _refuses_matvec_int4(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    if not call.coded:
        return NOT_ALIKE
    if len(call.coded) > matvec_int4.MOST_WEIGHTS:
        return f"more than {matvec_int4.MOST_WEIGHTS} weights"
    if call.biased:
        return BIASED
    for weight in call.coded:
        if reason := _not_int4(call.x, weight) or _not_tiled(weight):
            return reason
    return _not_normed(call)


def _refuses_matvec_int4_tma(call: Call) -> str | None:
    if not call.plain:
        return NOT_PLAIN
    if len(call.weights) > 1:
        return SEVERAL
    if reason := _refuses_matvec_int4(call):
        return reason
    return matvec_int4_tma.slower(call.coded[0], multiprocessors(call.x.device))


def _refuses_matvec_bits(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    if not call.coded:
        return NOT_ALIKE
    if call.norm is not None:
        return NOT_PLAIN
    if len(call.coded) > matvec_bits.MOST_WEIGHTS or not 0 < call.width <= matvec_bits.WIDEST:
        return f"more than {matvec_bits.MOST_WEIGHTS} weights, or wider than {matvec_bits.WIDEST}"
    if len({bias is None for bias in call.biases}) > 1:
        return "some weights have a bias, and some have none"
    return next((reason for weight in call.coded if (reason := _not_of_rows(call.x, weight))), None)


def _refuses_matvec_int8(call: Call) -> str | None:
    return _refuses_matvec_bits(call) or matvec_int8.slower(call.x, call.coded)


def _refuses_matvec_three(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    if not call.plain:
        return NOT_PLAIN
    if len(call.coded) != 3:
        return "there are not three weights, quantized alike"
    first = call.coded[0]
    return None if _not_int4(call.x, first) or _not_tiled(first) else "the first weight has a faster kernel for itself"


def _refuses_matvec_gated(call: Call) -> str | None:
    if not call.gated or call.norm is not None:
        return "it is not a gate and an up projection alone"
    return _not_one(call) or (None if call.coded else NOT_ALIKE)


def _refuses_dense_normed(call: Call) -> str | None:
    if not call.scored:
        return "the normalised stream is not wanted"
    if call.tokens != 1 or call.width > matvec_dense_normed.WIDEST:
        return f"{call.tokens} tokens, {call.width} wide; it is for one up to {matvec_dense_normed.WIDEST}"
    return BIASED if call.biased else None if len(call.dense) in (1, 2) else "the weights are not one or two small dense ones"


def _refuses_dense_two(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    if not call.plain or call.biased:
        return NOT_PLAIN
    return None if len(call.dense) == 2 else "the weights are not two small dense ones"


def _refuses_cluster_dense(call: Call) -> str | None:
    if not call.scored or call.norm is None or call.norm.delta is None:
        return "nothing is added, or the normalised stream is not wanted"
    if call.biased:
        return BIASED
    if not 1 < call.tokens <= gemm_cluster_dense.MOST_TOKENS:
        return f"{call.tokens} tokens; it is for 2 to {gemm_cluster_dense.MOST_TOKENS}"
    if len(call.dense) not in (1, 2) or call.width not in gemm_cluster_dense.WIDTHS:
        return "the weights are not one or two small dense ones of a width it is made for"
    if call.norm.weight.dtype is not torch.float32 or any(t.dtype is not BF16 for t in (call.x, *call.dense)):
        return "not all in bf16, the norm in float32"
    return not_hopper(call.x.device) or (UNALIGNED if _unaligned(call.x, *call.dense) else None)


def _refuses_cluster(call: Call) -> str | None:
    if not 1 < call.tokens <= gemm_cluster.MOST_TOKENS:
        return f"{call.tokens} tokens; it is for 2 to {gemm_cluster.MOST_TOKENS}"
    if not 0 < len(call.coded) <= gemm_cluster.MOST_WEIGHTS:
        return NOT_ALIKE
    if call.biased or call.gated:
        return "a bias is added, or the weights are gate and up"
    if call.norm is None and len(call.coded) == 1 and call.tokens <= gemm_wgmma_launch.FEW:
        return f"one weight and {call.tokens} tokens: a skinny product is as quick"
    if call.norm is not None and call.norm.delta is None:
        return "nothing is added before the norm"
    for weight in call.coded:
        if reason := _not_int4(call.x, weight):
            return reason
        if weight.shape[0] == 0 or _unaligned(weight.biases):
            return UNALIGNED
    return _not_normed(call) or gemm_cluster.slower(call.x, call.coded)


def _refuses_wgmma(call: Call) -> str | None:
    if not call.coded:
        return NOT_ALIKE
    bits = call.coded[0].bits
    if call.tokens < 2 or (call.tokens > gemm_wgmma_launch.MOST_TOKENS and not (call.gated and bits == 4)):
        return f"{call.tokens} tokens; it is for 2 to {gemm_wgmma_launch.MOST_TOKENS}, of 4-bit gate and up for any number"
    if call.norm is not None:
        if call.norm.delta is None or call.width > gemm_wgmma_launch.WIDEST or call.biased:
            return "nothing is added before the norm, a bias is, or tokens are too wide to be normalised on the way"
        if not call.gated and len(call.coded) > gemm_wgmma_launch.MOST_TOGETHER:
            return f"more than {gemm_wgmma_launch.MOST_TOGETHER} weights after a norm"
    if call.x.dtype is not BF16 or bits not in gemm_wgmma_launch.BITS:
        return f"{bits} bits, or activations that are not bf16"
    for weight in call.coded:
        if weight.biases is None or weight.scales.dtype is not BF16 or weight.shape[0] == 0:
            return "a weight is empty, or not affine with scales in bf16"
        if _unaligned(call.x, weight.packed):
            return UNALIGNED
    if call.tokens <= gemm_wgmma_launch.FEW and not any(_not_skinny(call, weight) for weight in call.coded):
        return f"{call.tokens} tokens: skinny products are quicker"
    return not_hopper(call.x.device) or _not_normed(call)


def _not_skinny(call: Call, weight: QTensor) -> str | None:
    if reason := _not_int4(call.x, weight):
        return reason
    return None if gemm_int4_skinny.plan_for(call.tokens, *weight.shape) else f"{weight.shape} is not whole runs of groups"


def _refuses_int4_skinny(call: Call) -> str | None:
    if not call.plain or call.biased:
        return NOT_PLAIN
    if len(call.coded) != 1:
        return "it is for one quantized weight"
    if not 1 < call.tokens <= gemm_int4_skinny.MOST_TOKENS:
        return f"{call.tokens} tokens; it is for 2 to {gemm_int4_skinny.MOST_TOKENS}"
    return _not_skinny(call, call.coded[0])


def _refuses_bits_skinny(call: Call) -> str | None:
    if not 1 < call.tokens <= gemm_bits_skinny.MOST_TOKENS or not call.coded or not call.width:
        return f"{call.tokens} tokens; it is for 2 to {gemm_bits_skinny.MOST_TOKENS} and a quantized weight"
    weight = call.coded[0]
    if reason := _not_of_rows(call.x, weight):
        return reason
    return None if gemm_bits_skinny.plan_for(call.tokens, weight) else "its block does not fit into shared memory"


def _refuses_norm_first(call: Call) -> str | None:
    return None if call.norm is not None else "there is no norm"


def _refuses_gate_and_up(call: Call) -> str | None:
    return None if call.gated else "it is not gate and up"


def _refuses_one_by_one(call: Call) -> str | None:
    return None if len(call.weights) != 1 else "there is one weight"


def _refuses_empty(call: Call) -> str | None:
    single = call.plain and len(call.weights) == 1
    return None if single and not call.tokens * call.weights[0].shape[0] * call.width else "there is something to multiply"


def _refuses_matvec(call: Call) -> str | None:
    return _not_one(call) or (None if call.coded else "the weight is dense")


def _refuses_written(call: Call) -> str | None:
    weight = call.weights[0]
    return not_written(weight, call.x.dtype) if isinstance(weight, QTensor) else "the weight is dense"


def _refuses_dequantized(call: Call) -> str | None:
    return None if call.coded else "the weight is dense"


def _refuses_dense_one(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    weight = call.weights[0]
    same = isinstance(weight, Tensor) and call.x.dtype == weight.dtype and weight.shape[0] > DENSE_ROWS
    return f"more than {DENSE_ROWS} rows of x's dtype: cuBLAS is as quick" if same else None


def _never(call: Call) -> None:
    return None


def _total(call: Call) -> Tensor:
    assert call.norm is not None
    return call.x if call.norm.delta is None else torch.empty_like(call.x)


def _matvec_int4(call: Call) -> Made:
    outs = call.outs()
    if call.norm is None:
        matvec_int4.multiply(call.x, call.coded, outs, call.gated)
        return Made(outs)
    total = _total(call)
    matvec_int4.multiply(call.x, call.coded, outs, call.gated, (call.norm.delta, call.norm.weight, total, call.norm.eps))
    return Made(outs, total)


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
    assert call.norm.delta is not None
    total = _total(call)
    gemm_cluster.multiply(call.x, call.coded, outs, (call.norm.delta, call.norm.weight, total, call.norm.eps))
    return Made(outs, total)


def _wgmma(call: Call) -> Made:
    outs = call.outs()
    if call.norm is not None:
        assert call.norm.delta is not None
        total = _total(call)
        normed = call.norm.delta, call.norm.weight, total, call.norm.eps
        gemm_wgmma_launch.multiply(call.x, call.coded, outs, call.gated, normed)
        return Made(outs, total)
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
    Route("nothing to multiply", _refuses_empty, _empty),
    Route("matvec_int4_tma", _refuses_matvec_int4_tma, _matvec_int4_tma),
    Route("matvec_int4", _refuses_matvec_int4, _matvec_int4),
    Route("matvec_int8", _refuses_matvec_int8, _matvec_int8),
    Route("matvec_bits", _refuses_matvec_bits, _matvec_bits),
    Route("matvec of three", _refuses_matvec_three, _matvec_three),
    Route("matvec of gate and up", _refuses_matvec_gated, _matvec_gated),
    Route("matvec_dense_normed", _refuses_dense_normed, _dense_normed),
    Route("dense matvec of two", _refuses_dense_two, _dense_two),
    Route("gemm_cluster_dense", _refuses_cluster_dense, _cluster_dense),
    Route("gemm_cluster", _refuses_cluster, _cluster),
    Route("gemm_wgmma", _refuses_wgmma, _wgmma),
    Route("norm first", _refuses_norm_first, _norm_first, lambda call: [(PRODUCTS, _without_norm(call, call.x))]),
    Route("gate and up apart", _refuses_gate_and_up, _gate_and_up, _each),
    Route("one by one", _refuses_one_by_one, _one_by_one, _each),
    Route("gemm_int4_skinny", _refuses_int4_skinny, _int4_skinny),
    Route("gemm_bits_skinny", _refuses_bits_skinny, _bits_skinny),
    Route("matvec", _refuses_matvec, _matvec),
    Route("dequantized in bf16, then cuBLAS", _refuses_written, _written),
    Route("dequantized, then cuBLAS", _refuses_dequantized, _dequantized),
    Route("dense matvec", _refuses_dense_one, _dense_one),
    Route("cuBLAS", _never, _cublas),
)
ROUTES = dict.fromkeys(
    ("linear", "linears", "add_norm_linears", "add_norm_scores", "add_norm_gate_up", "gate_up_swiglu"), PRODUCTS
)
