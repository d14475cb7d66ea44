"""When the kernels of `_cuda_slots` serve a mixture, and how they are launched."""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._triton import INTERPRETED, capability, cdiv
from auraflux.ops.moe._cuda_slots import down_slots, up_slots
from auraflux.ops.moe._cuda_stacks import passed
from auraflux.ops.moe.experts import Experts, SharedExpert, Stack
from auraflux.ops.moe.routing import Routing
from auraflux.quant import QTensor

QUAD = 256  # inputs whose codes lie in 128 bytes
HOPPER = (9, 0)
UP_WARPS = 8  # half of them for gate, half for up
DOWN_WARPS = 16
UP_RING = 4  # quads of 16 rows that a warp has in flight at most
MOST_RUNS = 2 * DOWN_WARPS  # of two quads, all slots together: their codes lie in shared memory at once
WIDEST = 8192
MOST_CHOICES = 512  # experts that the lanes of a warp hold the scores of


def _aligned(stack: Stack) -> bool:
    """Whether weights have the form the kernels are written for, each expert's arrays where they can be copied in pieces."""
    if not isinstance(stack, QTensor) or stack.format != (4, 64, 1, torch.bfloat16) or stack.biases is None:
        return False
    parts, (rows, width) = (stack.packed, stack.scales, stack.biases), stack.shape[-2:]
    one = [part[0] if len(stack.shape) == 3 else part for part in parts]
    return (
        rows % 16 == 0
        and width % QUAD == 0
        and width <= WIDEST
        and all(part.is_contiguous() for part in one)
        and not (parts[0].data_ptr() | parts[0].stride(0) * 4) % 16
        and not (parts[1].data_ptr() | parts[2].data_ptr() | parts[1].stride(0) * 2) % 8
        and parts[1].stride(0) == parts[2].stride(0)
    )


def fits_hopper(x: Tensor, experts: Experts) -> bool:
    """Whether the kernels here serve a mixture: 4 bits in groups of 64, all in bf16, without biases or clamp."""
    return (
        not INTERPRETED
        and x.dtype is torch.bfloat16
        and experts.clamp is experts.gate_bias is experts.up_bias is experts.down_bias is None
        and capability(x.device) == HOPPER
        and not x.data_ptr() % 16
        and all(_aligned(stack) for stack in (experts.gate, experts.up, experts.down))
    )


def fits_few(x: Tensor, k: int, experts: Experts) -> bool:
    """Whether the kernels of `_cuda_slots` serve k slots of few tokens."""
    return k * _runs(experts) <= MOST_RUNS and fits_hopper(x, experts)


def _runs(experts: Experts) -> int:
    return cdiv(experts.inner // QUAD, 2)


def fits_slot(shared: SharedExpert, k: int, experts: Experts) -> bool:
    """Whether a shared expert can be one more slot: of the experts' width and format."""
    weights = (shared.gate, shared.up, shared.down)
    few = (k + 1) * _runs(experts) <= MOST_RUNS
    return few and shared.gate.shape[0] == experts.inner and all(_aligned(weight) for weight in weights)


def few_hopper(x: Tensor, ids: Tensor, weights: Tensor | None, experts: Experts, out: Tensor) -> Tensor:
    """`expert_mlp` for few tokens, or without weights `expert_parts`: each pair reads its expert for itself."""
    return _launch(x, ids.shape[1], experts, (ids, weights, None, None, 1.0, None, None, None), (0, "", False), None, out)


def chosen_hopper(
    x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None, experts: Experts, h: Tensor,
    shared: Tensor | SharedExpert | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """`mixture` for few tokens."""
    rule = cdiv(experts.count, 32) * 32, routing.scoring, routing.renormalize
    own = shared if isinstance(shared, SharedExpert) else None
    choice = None, None, scores, bias, float(routing.scale), h, None if own else shared, shared_gate
    return _launch(x, routing.k, experts, choice, rule, own, torch.empty_like(x))


def _launch(
    x: Tensor,
    k: int,
    experts: Experts,
    choice: tuple[Any, ...],
    rule: tuple[int, str, bool],
    own: SharedExpert | None,
    out: Tensor,
) -> Tensor:
    tokens, inner, hidden, slots = x.shape[0], experts.inner, experts.hidden, k if own is None else k + 1
    ids, weights, scores, bias, *more = choice
    between = x.new_empty(tokens * slots, inner)
    own_gate, own_up, own_down = [(None,) * 3] * 3 if own is None else (passed(w)[:3] for w in (own.gate, own.up, own.down))
    deep = min(UP_RING, 2 * cdiv(hidden // QUAD, UP_WARPS))
    up_slots[inner // 16, tokens * slots](
        x, ids, scores, bias, *passed(experts.gate), *passed(experts.up), *own_gate, *own_up, between, experts.count, inner,
        hidden, k, *rule[:2], UP_WARPS, deep, num_warps=UP_WARPS, launch_pdl=True,
    )  # fmt: skip
    down_slots[hidden // 16, tokens](
        between, ids, weights, scores, bias, *more, *passed(experts.down), *own_down, out, experts.count, hidden, inner, k,
        *rule, DOWN_WARPS, num_warps=DOWN_WARPS, launch_pdl=True,
    )  # fmt: skip
    return out
