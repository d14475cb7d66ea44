"""When the kernels of `_cuda_slots` serve a mixture, and how they are launched."""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops._triton import INTERPRETED, capability, cdiv, power_of_two
from auraflux.ops.moe._cuda_slots import down_slots, up_slots
from auraflux.ops.moe._cuda_stacks import passed
from auraflux.ops.moe.experts import Experts, Stack
from auraflux.ops.moe.routing import Routing
from auraflux.quant import QTensor

QUAD = 256  # inputs whose codes lie in 128 bytes
HOPPER = (9, 0)
UP_WARPS = 4
MOST_WARPS = 16  # of a token's slots
SLOTS = 8  # quads of 16 rows that a warp has in flight at most
WIDEST = 8192
MOST_CHOICES = 512  # experts that the lanes of a warp hold the scores of


def _aligned(stack: Stack) -> bool:
    """Whether a stack has the form the kernels are written for, each expert's arrays where they can be copied in pieces."""
    if not isinstance(stack, QTensor) or stack.format != (4, 64, 1, torch.bfloat16) or stack.biases is None:
        return False
    parts, rows, width = (stack.packed, stack.scales, stack.biases), stack.shape[1], stack.shape[2]
    return (
        rows % 16 == 0
        and width % QUAD == 0
        and width <= WIDEST
        and all(part[0].is_contiguous() for part in parts)
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


def few_hopper(x: Tensor, ids: Tensor, weights: Tensor | None, experts: Experts, out: Tensor) -> Tensor:
    """`expert_mlp` for few tokens, or without weights `expert_parts`: each pair reads its expert for itself."""
    return _launch(x, ids.shape[1], experts, (ids, weights, None, None, 1.0, None, None, None), (0, "", False), out)


def chosen_hopper(
    x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None, experts: Experts, added: tuple[Tensor | None, ...]
) -> Tensor:
    """`mixture` for few tokens; `added` are the residual stream, the shared expert's result and its gate."""
    rule = cdiv(experts.count, 32) * 32, routing.scoring, routing.renormalize
    choice = None, None, scores, bias, float(routing.scale), *added
    return _launch(x, routing.k, experts, choice, rule, torch.empty_like(x))


def _launch(x: Tensor, k: int, experts: Experts, choice: tuple[Any, ...], rule: tuple[int, str, bool], out: Tensor) -> Tensor:
    tokens, inner, hidden = x.shape[0], experts.inner, experts.hidden
    ids, weights, scores, bias, *more = choice
    between = x.new_empty(tokens * k, inner)
    deep = min(SLOTS, 4 * cdiv(hidden // QUAD, 2 * UP_WARPS))
    up_slots[inner // 16, tokens * k](
        x, ids, scores, bias, *passed(experts.gate), *passed(experts.up), between, experts.count, inner, hidden, k, *rule[:2],
        UP_WARPS, deep, num_warps=UP_WARPS, launch_pdl=True,
    )  # fmt: skip
    warps = min(MOST_WARPS, power_of_two(k))
    deep = min(SLOTS, 2 * cdiv(inner // QUAD, 2) * cdiv(k, warps))
    down_slots[hidden // 16, tokens](
        between, ids, weights, scores, bias, *more, *passed(experts.down), out, experts.count, hidden, inner, k, *rule,
        warps, deep, num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    return out
