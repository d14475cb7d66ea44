"""What each kernel for products does not take, in the order of `routes.py`: None, or why a call is not for it.

A refusal looks at nothing but what `key` holds.
"""

from collections.abc import Hashable

import torch
from torch import Tensor

from auraflux.ops._dispatch import is_invariant
from auraflux.ops.assumed import assumed
from auraflux.ops.hopper.device import multiprocessors, not_hopper
from auraflux.ops.hopper.sizes import once_for_each
from auraflux.ops.linear.cuda import (
    gemm_bits_skinny,
    gemm_cluster,
    gemm_cluster_dense,
    gemm_int4_skinny,
    gemm_wgmma_launch,
    matvec_bits,
    matvec_dense_normed,
    matvec_int4,
    matvec_int4_tma,
    matvec_int8,
    matvec_whole,
)
from auraflux.ops.linear.cuda.call import DENSE_ROWS, Call
from auraflux.ops.linear.cuda.dequantize import not_written
from auraflux.ops.linear.cuda.row_copies import SERVED
from auraflux.quant import QTensor

BF16 = torch.bfloat16
INT4 = (4, 64, 1, BF16)  # the commonest format: 4 bits in groups of 64
ALIGNED = 16  # bytes, as wide copies need it

NOT_ALIKE = "the weights are not all quantized, and alike"
NOT_PLAIN = "it is not a product alone"
BIASED = "a bias is added"
SEVERAL = "there are several weights"
UNALIGNED = "an address is not a multiple of 16 bytes"
BY_NUMBER = "kernels may be chosen by the number of tokens"


_kinds: dict[Hashable, int] = {}  # numbers of quantized weights that are alike


@once_for_each
def _kind(weight: QTensor) -> int:
    biases = None if weight.biases is None else weight.biases.dtype
    alike = weight.format, biases, weight.shape, tuple(address % ALIGNED for address in weight.addresses)
    return _kinds.setdefault(alike, len(_kinds))


def key(call: Call) -> Hashable:
    """All of a call that refusals look at: sizes, dtypes, how addresses are aligned, what is there and what is not."""
    x, norm = call.x, call.norm
    weights: list[Hashable] = [
        _kind(weight) if isinstance(weight, QTensor) else (weight.dtype, weight.shape, weight.data_ptr() % ALIGNED)
        for weight in call.weights
    ]
    return (
        *(call.tokens, call.width, x.dtype, x.data_ptr() % ALIGNED, x.device, assumed(), call.gated, call.scored),
        None if norm is None else (norm.delta is None, norm.weight.dtype),
        tuple([bias is None for bias in call.biases]) if call.biased else None,
        *weights,
    )


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


def refuses_matvec_int4(call: Call) -> str | None:
    return _not_one(call) or _not_ordered(call)


def refuses_matvec_int4_alike(call: Call) -> str | None:
    return refuses_int4_alike(call) or _not_one(call)


def refuses_int4_alike(call: Call) -> str | None:
    return _not_ordered(call) if is_invariant() else BY_NUMBER


def refuses_alike(call: Call) -> str | None:
    return None if is_invariant() else BY_NUMBER


def _not_ordered(call: Call) -> str | None:
    """Why `matvec_int4` and its like do not multiply weights."""
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


def refuses_matvec_int4_tma(call: Call) -> str | None:
    if not call.plain:
        return NOT_PLAIN
    if len(call.weights) > 1:
        return SEVERAL
    if reason := refuses_matvec_int4(call):
        return reason
    return matvec_int4_tma.slower(call.coded[0], multiprocessors(call.x.device))


def _not_plain_codes(call: Call) -> str | None:
    """Why a call is not one token, as it is, times codes."""
    if reason := _not_one(call):
        return reason
    if not call.coded:
        return NOT_ALIKE
    return None if call.norm is None else NOT_PLAIN


def refuses_matvec_bits(call: Call) -> str | None:
    if reason := _not_plain_codes(call):
        return reason
    if len(call.coded) > matvec_bits.MOST_WEIGHTS or not 0 < call.width <= matvec_bits.WIDEST:
        return f"more than {matvec_bits.MOST_WEIGHTS} weights, or wider than {matvec_bits.WIDEST}"
    if len({bias is None for bias in call.biases}) > 1:
        return "some weights have a bias, and some have none"
    return next((reason for weight in call.coded if (reason := _not_of_rows(call.x, weight))), None)


def refuses_matvec_int8(call: Call) -> str | None:
    return refuses_matvec_bits(call) or matvec_int8.slower(call.x, call.coded)


def refuses_matvec_whole(call: Call) -> str | None:
    if reason := _not_plain_codes(call):
        return reason
    if len(call.coded) > matvec_whole.MOST_WEIGHTS:
        return f"more than {matvec_whole.MOST_WEIGHTS} weights"
    if reason := matvec_whole.not_served(call.x, call.coded[0]):
        return reason
    # words are read of x
    return not_hopper(call.x.device) or (UNALIGNED if _unaligned(call.x) else None)


def refuses_matvec_three(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    if not call.plain:
        return NOT_PLAIN
    if len(call.coded) != 3:
        return "there are not three weights, quantized alike"
    first = call.coded[0]
    return None if _not_int4(call.x, first) or _not_tiled(first) else "the first weight has a faster kernel for itself"


def refuses_matvec_gated(call: Call) -> str | None:
    if not call.gated or call.norm is not None:
        return "it is not a gate and an up projection alone"
    return _not_one(call) or (None if call.coded else NOT_ALIKE)


def refuses_dense_normed(call: Call) -> str | None:
    if not call.scored:
        return "the normalised stream is not wanted"
    if (call.tokens != 1 and not is_invariant()) or call.width > matvec_dense_normed.WIDEST:
        return f"{call.tokens} tokens, {call.width} wide; it is for one up to {matvec_dense_normed.WIDEST}"
    return BIASED if call.biased else None if len(call.dense) in (1, 2) else "the weights are not one or two small dense ones"


def refuses_dense_two(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    if not call.plain or call.biased:
        return NOT_PLAIN
    return None if len(call.dense) == 2 else "the weights are not two small dense ones"


def refuses_cluster_dense(call: Call) -> str | None:
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


def refuses_cluster(call: Call) -> str | None:
    if not 1 < call.tokens <= gemm_cluster.MOST_TOKENS:
        return f"{call.tokens} tokens; it is for 2 to {gemm_cluster.MOST_TOKENS}"
    if not 0 < len(call.coded) <= gemm_cluster.MOST_WEIGHTS:
        return NOT_ALIKE
    if call.biased or call.gated:
        return "a bias is added, or the weights are gate and up"
    if call.norm is None and len(call.coded) == 1 and call.tokens <= gemm_wgmma_launch.FEW:
        return f"one weight and {call.tokens} tokens: a skinny product is as quick"
    for weight in call.coded:
        if reason := _not_int4(call.x, weight):
            return reason
        if weight.shape[0] == 0 or _unaligned(weight.biases):
            return UNALIGNED
    return _not_normed(call) or gemm_cluster.slower(call.x, call.coded)


def refuses_wgmma(call: Call) -> str | None:
    if not call.coded:
        return NOT_ALIKE
    bits = call.coded[0].bits
    if call.tokens < 2 or (call.tokens > gemm_wgmma_launch.MOST_TOKENS and not (call.gated and bits == 4)):
        return f"{call.tokens} tokens; it is for 2 to {gemm_wgmma_launch.MOST_TOKENS}, of 4-bit gate and up for any number"
    if call.norm is not None:
        if call.width > gemm_wgmma_launch.WIDEST or call.biased:
            return "a bias is added, or tokens are too wide to be normalised on the way"
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


def refuses_int4_skinny(call: Call) -> str | None:
    if not call.plain or call.biased:
        return NOT_PLAIN
    if len(call.coded) != 1:
        return "it is for one quantized weight"
    if not 1 < call.tokens <= gemm_int4_skinny.MOST_TOKENS:
        return f"{call.tokens} tokens; it is for 2 to {gemm_int4_skinny.MOST_TOKENS}"
    return _not_skinny(call, call.coded[0])


def refuses_bits_skinny(call: Call) -> str | None:
    if not 1 < call.tokens <= gemm_bits_skinny.MOST_TOKENS or not call.coded or not call.width:
        return f"{call.tokens} tokens; it is for 2 to {gemm_bits_skinny.MOST_TOKENS} and a quantized weight"
    weight = call.coded[0]
    if reason := _not_of_rows(call.x, weight):
        return reason
    return None if gemm_bits_skinny.plan_for(call.tokens, weight) else "its block does not fit into shared memory"


def refuses_norm_first(call: Call) -> str | None:
    return None if call.norm is not None else "there is no norm"


def refuses_gate_and_up(call: Call) -> str | None:
    return None if call.gated else "it is not gate and up"


def refuses_one_by_one(call: Call) -> str | None:
    return None if len(call.weights) != 1 else "there is one weight"


def refuses_empty(call: Call) -> str | None:
    single = call.plain and len(call.weights) == 1
    return None if single and not call.tokens * call.weights[0].shape[0] * call.width else "there is something to multiply"


def refuses_matvec(call: Call) -> str | None:
    return _not_one(call) or (None if call.coded else "the weight is dense")


def refuses_written(call: Call) -> str | None:
    weight = call.weights[0]
    return not_written(weight, call.x.dtype) if isinstance(weight, QTensor) else "the weight is dense"


def refuses_dequantized(call: Call) -> str | None:
    return None if call.coded else "the weight is dense"


def refuses_dense_one(call: Call) -> str | None:
    if reason := _not_one(call):
        return reason
    weight = call.weights[0]
    same = isinstance(weight, Tensor) and call.x.dtype == weight.dtype and weight.shape[0] > DENSE_ROWS
    return f"more than {DENSE_ROWS} rows of x's dtype: cuBLAS is as quick" if same else None


def refuses_nothing(call: Call) -> None:
    return None
