"""What both kinds of expert kernels share: how stacks are passed to them, and what lies between up and down.

A stack is passed as codes, scales, biases and how far apart the experts lie in each; a dense one (`BITS` 0) as the same tensor
three times. Experts need not lie side by side in memory, see `Experts`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops._dispatch import Declined
from auraflux.ops._triton import FLOATS, cdiv, sigmoid, silu
from auraflux.ops.linear._codes import UNITS, check_order, constants, operands
from auraflux.ops.moe.experts import Experts, Stack
from auraflux.quant import QTensor

SUMMED = 1024  # elements a program sums

# the residual stream, a shared expert's result and its gate
Added = tuple[Tensor | None, Tensor | None, Tensor | None]


@triton.jit
def activate(gate, up, alpha, limit, CLAMP: tl.constexpr):
    """silu(gate) * up, or the clamped form."""
    if CLAMP:
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * sigmoid(alpha * gate)
    else:  # noqa: RET505
        return silu(gate) * up


@triton.jit
def add_bias(total, bias, at, there):
    if bias is not None:
        total += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def sum_slots(
    parts, spots, ids, weights, residual, beside, beside_gate, out, experts, k, hidden, BLOCK: tl.constexpr
):  # fmt: skip
    """A token's weighted sum, in the order of its slots; NaN where an expert is not there, if `ids` are given.

    Parts lie pair by pair, or, if `spots` are given, each pair's in the row that is its spot. The sum is added to `residual`
    and to `beside` where they are given, rounded first as `combine` would find it.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for slot in range(k):
        there = column < hidden
        if ids is not None:
            expert = tl.load(ids + token * k + slot)
            there &= (expert >= 0) & (expert < experts)
        row = token * k + slot if spots is None else tl.load(spots + token * k + slot).to(tl.int64)
        part = tl.load(parts + row * hidden + column, mask=there, other=float("nan"))
        weight = tl.load(weights + token * k + slot) + tl.zeros_like(total)
        total = tl.fma(part.to(tl.float32), weight, total)
    if residual is not None:
        at, there = token * hidden + column, column < hidden
        total = total.to(out.dtype.element_ty).to(tl.float32) + tl.load(residual + at, mask=there, other=0.0).to(tl.float32)
        if beside is not None:
            more = tl.load(beside + at, mask=there, other=0.0).to(tl.float32)
            if beside_gate is not None:
                more *= sigmoid(tl.load(beside_gate + token).to(tl.float32))
            total += more
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=column < hidden)


def summed(
    parts: Tensor, spots: Tensor | None, ids: Tensor | None, weights: Tensor, experts: int, dtype: torch.dtype,
    added: Added = (None, None, None),
) -> Tensor:  # fmt: skip
    """The weighted sum of each token's parts, and what is added to it."""
    (tokens, k), hidden = weights.shape, parts.shape[-1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.device)
    sum_slots[tokens, cdiv(hidden, SUMMED)](parts, spots, ids, weights, *added, out, experts, k, hidden, SUMMED)
    return out


def check_stacks(experts: Experts) -> None:
    for stack in (experts.gate, experts.up, experts.down):
        one = stack[0]
        if isinstance(stack, QTensor):
            check_order(stack)
        elif stack.dtype not in FLOATS:
            raise Declined(f"experts of {stack.dtype}")
        if not one.is_contiguous():
            raise Declined("the arrays of one expert are not contiguous")
    if form(experts.gate) != form(experts.up):
        raise Declined("gate and up are held in different formats")


def form(stack: Stack) -> dict[str, int | bool]:
    return constants(stack) if isinstance(stack, QTensor) else {"BITS": 0, "GROUP": 1, "AFFINE": False}


def unit(stack: Stack) -> int:
    """Codes that are read together; dense weights are read one by one."""
    return UNITS[stack.bits] if isinstance(stack, QTensor) else 1


def passed(stack: Stack) -> tuple[Any, ...]:
    """The arrays of a stack, and the steps from one expert to the next."""
    parts = operands(stack) if isinstance(stack, QTensor) else (stack, stack, stack)
    return *parts, parts[0].stride(0), parts[1].stride(0)


def clamp_of(experts: Experts) -> tuple[float, float]:
    return (experts.clamp.alpha, experts.clamp.limit) if experts.clamp else (0.0, 0.0)


def dense_bias(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
