"""What both kinds of expert kernels share: how stacks are passed to them, and what lies between up and down.

A stack is passed as `Passed`; a dense one (`BITS` 0) has the same tensor for codes, scales and biases. Experts need not lie
side by side in memory, see `Experts`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from auraflux.ops.hopper.codes import Codes, constants, operands
from auraflux.ops.hopper.device import FLOATS
from auraflux.ops.hopper.elementwise import gelu, sigmoid, silu
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv, once_for_each, power_of_two
from auraflux.ops.moe.experts import Clamp, Experts, Gelu, Limit, ReluSquare, SharedExpert, Stack
from auraflux.ops.moe.routing import Routing
from auraflux.quant import QTensor

SUMMED = 512  # elements a program sums, twice as many where there are more than FEW_SUMMED tokens
FEW_SUMMED = 128


class Passed(NamedTuple):
    """A stack as kernels take it.

    packed, scales, biases  of its codes
    step, scale_step        from one expert to the next, in codes and in scales

    Kernels ask whether there is a shared expert's; Triton 3.6 cannot compare a tuple that holds None with None.
    """

    packed: Tensor
    scales: Tensor
    biases: Tensor
    step: int
    scale_step: int


class Biased(NamedTuple):
    """The same, and a bias [experts, rows] that is added to the products."""

    packed: Tensor
    scales: Tensor
    biases: Tensor
    step: int
    scale_step: int
    bias: Tensor | None


class Added(NamedTuple):
    """What is added to a token's sum: the residual stream, and a shared expert's result, times its gate."""

    residual: Tensor | None = None
    beside: Tensor | None = None
    gate: Tensor | None = None


NOTHING = Added()


@triton.jit
def activate(gate, up, alpha, limit, KIND: tl.constexpr):
    """silu(gate) * up, its two clamped forms, the tanh form of gelu(gate) * up, or relu(up) ** 2."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * sigmoid(alpha * gate)
    elif KIND == "limited":  # noqa: RET505
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        return silu(gate) * tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
    elif KIND == "gelu":
        return gelu(gate) * up
    elif KIND == "relu2":
        return tl.maximum(up, 0.0, propagate_nan=tl.PropagateNan.ALL) * up
    else:
        return silu(gate) * up


@triton.jit
def add_bias(total, bias, at, there):
    if bias is not None:
        total += tl.load(bias + at, mask=there, other=0.0).to(tl.float32)
    return total


@triton.jit
def _shares(
    scores, ids, experts, scale,
    K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """What a token's slots weigh by the scores that they were chosen by."""
    place, shares, total = tl.arange(0, BE), (), 0.0
    if SCORING == "softmax":
        every = tl.load(scores + place, mask=place < experts, other=float("-inf")).to(tl.float32)
        top = tl.max(every, 0)
        whole = tl.sum(tl.exp(every - top), 0)
    for slot in tl.static_range(K):
        score = tl.load(scores + tl.load(ids + slot)).to(tl.float32)
        if SCORING == "chosen" and slot == 0:
            # the first slot has the highest score
            top = score
        share = sigmoid(score) if SCORING == "sigmoid" else tl.exp(score - top)
        if SCORING == "softmax":
            share /= whole
        total += share
        shares += (share,)  # type: ignore[assignment]
    factor = scale
    if RENORMALIZE or SCORING == "chosen":
        factor = scale / tl.where(total > 0, total, 1.0)
    weights = ()
    for slot in tl.static_range(K):
        weights += (shares[slot] * factor,)  # type: ignore[assignment]
    return weights


@triton.jit
def sum_slots(
    parts, spots, ids, weights, scores, added, out, experts, hidden, scale,
    K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A token's weighted sum, in the order of its slots; NaN where an expert is not there, if `ids` are given.

    Parts lie pair by pair, or, if `spots` are given, each pair's in the row that is its spot. Weights are given, or follow from
    `scores`. What is added to the sum is added to it rounded, as `combine` would find it.

    EARLY  only the parts are made by the kernel before, and all that comes before it is complete
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < hidden, token * hidden + column
    shares, known = (), ()
    if weights is None:
        shares = _shares(scores + token * experts, ids + token * K, experts, scale, K, SCORING, RENORMALIZE, BE)
    else:
        for slot in tl.static_range(K):
            shares += (tl.load(weights + token * K + slot),)  # type: ignore[assignment]
    for slot in tl.static_range(K):
        expert = 0
        if ids is not None:
            expert = tl.load(ids + token * K + slot)
        known += (expert,)  # type: ignore[assignment]
    if added.residual is not None:
        kept = tl.load(added.residual + at, mask=inside, other=0.0).to(tl.float32)
        if added.beside is not None:
            more = tl.load(added.beside + at, mask=inside, other=0.0).to(tl.float32)
            if added.gate is not None:
                more *= sigmoid(tl.load(added.gate + token).to(tl.float32))
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for slot in tl.static_range(K):
        there = inside
        if ids is not None:
            there &= (known[slot] >= 0) & (known[slot] < experts)
        row = token * K + slot if spots is None else tl.load(spots + token * K + slot).to(tl.int64)
        part = tl.load(parts + row * hidden + column, mask=there, other=float("nan"))
        total = tl.fma(part.to(tl.float32), shares[slot] + tl.zeros_like(total), total)
    if added.residual is not None:
        total = total.to(out.dtype.element_ty).to(tl.float32) + kept
        if added.beside is not None:
            total += more
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def summed(
    parts: Tensor, spots: Tensor | None, ids: Tensor | None, weights: Tensor, experts: int, dtype: torch.dtype,
    added: Added = NOTHING, early: bool = False,
) -> Tensor:  # fmt: skip
    """The weighted sum of each token's parts, and what is added to it.

    early  parts were made by `persistent`
    """
    (tokens, k), hidden = weights.shape, parts.shape[-1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.device)
    size = SUMMED if tokens <= FEW_SUMMED else 2 * SUMMED
    launch(sum_slots, (tokens, cdiv(hidden, size)))(
        parts, spots, ids, weights, None, added, out, experts, hidden, 1.0, k, "", False, 1, size, early, launch_pdl=early
    )
    return out


def summed_by_scores(
    parts: Tensor, ids: Tensor, scores: Tensor, routing: Routing, dtype: torch.dtype, added: Added
) -> Tensor:  # fmt: skip
    """The same of parts that `persistent` made, weighted by the scores that experts were chosen by."""
    (tokens, k), experts, hidden = ids.shape, scores.shape[1], parts.shape[-1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.device)
    launch(sum_slots, (tokens, cdiv(hidden, SUMMED)))(
        parts, None, ids, None, scores, added, out, experts, hidden, float(routing.scale), k, routing.scoring,
        routing.renormalize, power_of_two(experts), SUMMED, True, launch_pdl=True,
    )  # fmt: skip
    return out


@once_for_each
def not_served(experts: Experts) -> str | None:
    """Why no kernel reads these experts."""
    for stack in experts.stacks:
        if isinstance(stack, QTensor):
            if stack.lanes != 1:
                return f"{stack.lanes} rows of the weight lie side by side, which is the CPU's order"
        elif stack.dtype not in FLOATS:
            return f"experts of {stack.dtype}"
        if not stack[0].is_contiguous():
            return "the arrays of one expert are not contiguous"
    return "gate and up are held in different formats" if form(experts.stacks[0]) != form(experts.up) else None


def form(stack: Stack) -> dict[str, int | str]:
    return constants(stack) if isinstance(stack, QTensor) else {"BITS": 0, "GROUP": 1, "FORM": ""}


def passed(stack: Stack) -> Passed:
    """A stack, or a shared expert's weight, whose steps are not read."""
    packed, scales, biases = operands(stack) if isinstance(stack, QTensor) else Codes(stack, stack, stack)
    assert biases is not None  # something stands in for them
    return Passed(packed, scales, biases, packed.stride(0), scales.stride(0))


def biased(stack: Stack, bias: Tensor | None) -> Biased:
    return Biased(*passed(stack), None if bias is None else bias.contiguous())


@triton.jit
def of_expert(stack, expert, FORM: tl.constexpr):
    """The codes of one expert's matrix; what stands in for biases is everybody's."""
    at = expert * stack.scale_step
    biases = stack.biases + at if FORM == "affine" else stack.biases
    return Codes(stack.packed + expert * stack.step, stack.scales + at, biases)


def gate_of(experts: Experts | SharedExpert) -> Stack:
    """The gate, or what stands in its place and is not read where there is none."""
    return experts.up if experts.gate is None else experts.gate


def activation_of(experts: Experts) -> tuple[float, float, str]:
    """What `activate` takes: alpha, limit and kind."""
    match experts.activation:
        case Clamp(alpha, limit):
            return alpha, limit, "clamped"
        case Limit(limit):
            return 0.0, limit, "limited"
        case Gelu():
            return 0.0, 0.0, "gelu"
        case ReluSquare():
            return 0.0, 0.0, "relu2"
    return 0.0, 0.0, "silu"
