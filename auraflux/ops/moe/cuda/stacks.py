"""Code shared by the expert kernels: kernel arguments of weight stacks, activations, and the weighted sum over slots.

A stack is passed as `StackArgs`; a dense one (`BITS` 0) has the same tensor for codes, scales and biases. Experts need not be
adjacent in memory, see `Experts`.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.codes import Codes, constants, operands
from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.elementwise import gelu, sigmoid, silu
from auraflux.ops.gpu.device import FLOATS
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cached_per_weight, cdiv, power_of_two
from auraflux.ops.moe.experts import Clamp, Experts, Gelu, Limit, ReluSquare, SharedExpert, Stack
from auraflux.ops.moe.routing import Routing
from auraflux.quant import QTensor

SUMMED = 512  # elements a program sums, doubled above FEW_SUMMED tokens
FEW_SUMMED = 128
TRANSLATED = 1024  # ids whose rows a program looks up


class StackArgs(NamedTuple):
    """Kernel arguments of a stack.

    packed, scales, biases  of its codes
    step, scale_step        strides between experts, in codes and in scales

    A bias is separate (`BiasedStackArgs`): kernels test whether a shared expert is given, and Triton 3.6 cannot compare a tuple
    that holds None with None.
    """

    packed: Tensor
    scales: Tensor
    biases: Tensor
    step: int
    scale_step: int


class BiasedStackArgs(NamedTuple):
    """`StackArgs` with a bias [experts, rows] added to the products, and the stride between experts' biases."""

    packed: Tensor
    scales: Tensor
    biases: Tensor
    step: int
    scale_step: int
    bias: Tensor | None
    bias_step: int


class Epilogue(NamedTuple):
    """Terms added to a token's sum: the residual stream, and the shared expert's output times its gate."""

    residual: Tensor | None = None
    shared: Tensor | None = None
    gate: Tensor | None = None


NO_EPILOGUE = Epilogue()


class SumShape(NamedTuple):
    """Compile-time settings of `sum_slots`.

    k, scoring, renormalize  see `Routing`; no scoring where weights are given
    experts                  rounded up to a power of two
    block                    elements of a program
    early                    only `parts` are written by the preceding kernel; everything before it is complete
    """

    k: int
    scoring: str
    renormalize: bool
    experts: int
    block: int
    early: bool


@triton.jit
def activate(gate, up, alpha, limit, KIND: tl.constexpr):
    """Return silu(gate) * up, one of its two clamped forms, tanh-approximated gelu(gate) * up, or relu(up) ** 2."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -limit, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, limit, propagate_nan=tl.PropagateNan.ALL)
        return (up + 1.0) * gate * sigmoid(alpha * gate)
    elif KIND == "limited":  # noqa: RET505
        gate = tl.minimum(gate, alpha, propagate_nan=tl.PropagateNan.ALL)
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
def _slot_weights(
    scores, ids, experts, scale,
    K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    """Return the weights of a token's slots from their router scores."""
    place, shares, total = tl.arange(0, BE), (), 0.0
    if SCORING == "softmax":
        every = tl.load(scores + place, mask=place < experts, other=float("-inf")).to(tl.float32)
        top = tl.max(every, 0)
        denominator = tl.sum(tl.exp(every - top), 0)
    for slot in tl.static_range(K):
        score = tl.load(scores + tl.load(ids + slot)).to(tl.float32)
        if SCORING == "chosen" and slot == 0:
            # the first slot has the highest score
            top = score
        share = sigmoid(score) if SCORING == "sigmoid" else tl.exp(score - top)
        if SCORING == "softmax":
            share /= denominator
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
    parts, spots, ids, weights, scores, epilogue, out, experts, hidden, scale, SHAPE: tl.constexpr
):  # fmt: skip
    """Sum a token's expert outputs in slot order; NaN where an expert does not exist, if `ids` are given.

    Parts are stored pair by pair, or, if `spots` are given, each pair's in the row of its spot. Weights are given, or computed
    from `scores`. The sum is rounded before the epilogue, as in `combine`.
    """
    K: tl.constexpr = SHAPE.k
    SCORING: tl.constexpr = SHAPE.scoring
    RENORMALIZE: tl.constexpr = SHAPE.renormalize
    PADDED: tl.constexpr = SHAPE.experts
    BLOCK: tl.constexpr = SHAPE.block
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside, at = column < hidden, token * hidden + column
    shares, known = (), ()
    if weights is None:
        shares = _slot_weights(scores + token * experts, ids + token * K, experts, scale, K, SCORING, RENORMALIZE, PADDED)
    else:
        for slot in tl.static_range(K):
            shares += (tl.load(weights + token * K + slot),)  # type: ignore[assignment]
    for slot in tl.static_range(K):
        expert = 0
        if ids is not None:
            expert = tl.load(ids + token * K + slot)
        known += (expert,)  # type: ignore[assignment]
    if epilogue.residual is not None:
        residual = tl.load(epilogue.residual + at, mask=inside, other=0.0).to(tl.float32)
        if epilogue.shared is not None:
            more = tl.load(epilogue.shared + at, mask=inside, other=0.0).to(tl.float32)
            if epilogue.gate is not None:
                more *= sigmoid(tl.load(epilogue.gate + token).to(tl.float32))
    if SHAPE.early:
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
    if epilogue.residual is not None:
        total = total.to(out.dtype.element_ty).to(tl.float32) + residual
        if epilogue.shared is not None:
            total += more
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def summed(
    parts: Tensor, spots: Tensor | None, ids: Tensor | None, weights: Tensor, experts: int, dtype: torch.dtype,
    epilogue: Epilogue = NO_EPILOGUE, early: bool = False,
) -> Tensor:  # fmt: skip
    """Return each token's weighted sum of parts plus the epilogue.

    early  parts were written by `persistent`
    """
    (tokens, k), hidden = weights.shape, parts.shape[-1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.device)
    size = SUMMED if tokens <= FEW_SUMMED else 2 * SUMMED
    launch(sum_slots, (tokens, cdiv(hidden, size)))(
        parts,
        spots,
        ids,
        weights,
        None,
        epilogue,
        out,
        experts,
        hidden,
        1.0,
        SumShape(k, "", False, 1, size, early),
        launch_pdl=early,
    )
    return out


def summed_by_scores(
    parts: Tensor, ids: Tensor, scores: Tensor, routing: Routing, dtype: torch.dtype, epilogue: Epilogue
) -> Tensor:  # fmt: skip
    """Return `summed` of parts written by `persistent`, weighted by the scores that selected the experts."""
    (tokens, k), experts, hidden = ids.shape, scores.shape[1], parts.shape[-1]
    out = torch.empty(tokens, hidden, dtype=dtype, device=parts.device)
    launch(sum_slots, (tokens, cdiv(hidden, SUMMED)))(
        parts, None, ids, None, scores, epilogue, out, experts, hidden, float(routing.scale),
        SumShape(k, routing.scoring, routing.renormalize, power_of_two(experts), SUMMED, True), launch_pdl=True,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count"])
def slot_rows(ids, slots, rows, count, experts, past, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(ids + at, mask=at < count, other=-1)
    good = (given >= 0) & (given < experts)
    row = tl.load(slots + given, mask=good, other=-1)
    row = tl.where(row < 0, past, row)
    tl.store(rows + at, tl.where(good, row, tl.where(given < 0, -1, past)), mask=at < count)


def rows_of(ids: Tensor, experts: Experts, out: Tensor | None = None) -> Tensor:
    """Return the rows of the stacks that hold experts; those of experts that do not exist are past the last row.

    out  receives the rows, and may be `ids`
    """
    if experts.slots is None:
        return ids
    made = torch.empty_like(ids) if out is None else out
    count = ids.numel()
    launch(slot_rows, (cdiv(count, TRANSLATED),))(
        ids, experts.slots, made, count, experts.count, experts.rows, TRANSLATED, num_warps=4
    )
    return made


@cached_per_weight
def unsupported(experts: Experts) -> str | None:
    """Return why no kernel supports these experts."""
    for stack in experts.stacks:
        if isinstance(stack, QTensor):
            if stack.lanes != 1:
                return f"{stack.lanes} weight rows are interleaved, which is the CPU layout"
        elif stack.dtype not in FLOATS:
            return f"experts of {stack.dtype}"
        if not stack[0].is_contiguous():
            return "the arrays of one expert are not contiguous"
    return "gate and up have different formats" if form(experts.stacks[0]) != form(experts.up) else None


def form(stack: Stack) -> dict[str, int | str]:
    return constants(stack) if isinstance(stack, QTensor) else {"BITS": 0, "GROUP": 1, "FORM": ""}


def stack_args(stack: Stack) -> StackArgs:
    """Return the kernel arguments of a stack, or of a shared expert's weight, whose strides are unused."""
    packed, scales, biases = operands(stack) if isinstance(stack, QTensor) else Codes(stack, stack, stack)
    assert biases is not None  # a placeholder at least
    return StackArgs(packed, scales, biases, packed.stride(0), scales.stride(0))


def shared_args(shared: SharedExpert | None) -> tuple[StackArgs | None, ...]:
    """Return the kernel arguments of a shared expert's gate, up and down; three times None without one."""
    return (None,) * 3 if shared is None else tuple(map(stack_args, (gate_of(shared), shared.up, shared.down)))


def biased_stack_args(stack: Stack, bias: Tensor | None) -> BiasedStackArgs:
    return BiasedStackArgs(*stack_args(stack), bias, 0 if bias is None else bias.stride(0))


@triton.jit
def of_expert(stack, expert, FORM: tl.constexpr):
    """Return the codes of one expert's matrix; placeholder biases are shared by all experts."""
    at = expert * stack.scale_step
    biases = stack.biases + at if FORM == "affine" else stack.biases
    return Codes(stack.packed + expert * stack.step, stack.scales + at, biases)


def gate_of(experts: Experts | SharedExpert) -> Stack:
    """Return the gate, or up as an unused placeholder where there is none."""
    return experts.up if experts.gate is None else experts.gate


def activation_of(experts: Experts) -> tuple[float, float, str]:
    """Return alpha, limit and kind for `activate`; alpha is the gate's limit where it is limited."""
    match experts.activation:
        case Clamp(alpha, limit):
            return alpha, limit, "clamped"
        case Limit(limit, gate_limit):
            return limit if gate_limit is None else gate_limit, limit, "limited"
        case Gelu():
            return 0.0, 0.0, "gelu"
        case ReluSquare():
            return 0.0, 0.0, "relu2"
    return 0.0, 0.0, "silu"
