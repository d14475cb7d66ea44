"""Adapters of routed experts: the products of each expert run apart, because its activation lies between them."""

from typing import NamedTuple

import torch
from torch import Tensor

from auraflux import ops
from auraflux.adapters.pairs import Pair
from auraflux.ops import Adapters, Clamp, Experts, Gelu, Limit, LinearInput, ReluSquare
from auraflux.ops.moe.experts import Stack


class ExpertPairs(NamedTuple):
    """All adapters' changes of each expert of a layer, by expert; None where no adapter has one."""

    gate: dict[int, Pair]
    up: dict[int, Pair]
    down: dict[int, Pair]


def adapted_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts, pairs: ExpertPairs, slots: Tensor) -> Tensor:
    """Return the weighted sum of every token's experts with its adapter.

    x        [T, H]
    ids      [T, k]  int32
    weights  [T, k]  float32
    slots    [T]     int32, see `Adapters`
    returns  [T, H]
    """
    parts = torch.empty(*ids.shape, x.shape[1], dtype=torch.float32, device=x.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        parts[token, choice] = _one(x[token], expert, experts, pairs, slots[token]).float()
    return ops.sum_parts(parts, weights, x.dtype)


def _one(x: Tensor, expert: int, experts: Experts, pairs: ExpertPairs, slots: Tensor) -> Tensor:
    """Apply one expert to the rows that chose it."""

    def product(rows: Tensor, stack: Stack, bias: Tensor | None, changes: dict[int, Pair]) -> Tensor:
        y = ops.linear(rows, stack[expert], None if bias is None else bias[expert])
        if expert in changes:
            pair = changes[expert]
            ops.add_lora(LinearInput(rows), [y], Adapters(slots, [pair.a], [pair.b]), overlap=True)
        return y

    up = product(x, experts.up, experts.up_bias, pairs.up)
    gate = up if experts.gate is None else product(x, experts.gate, experts.gate_bias, pairs.gate)
    match experts.activation:
        case Clamp(alpha, limit):
            hidden = ops.clamped_swiglu(gate, up, alpha, limit)
        case Limit(limit, gate_limit):
            hidden = ops.limited_swiglu(gate, up, limit, gate_limit)
        case Gelu():
            hidden = ops.geglu(gate, up)
        case ReluSquare():
            hidden = ops.relu_square(up)
        case None:
            hidden = ops.swiglu(gate, up)
    return product(hidden, experts.down, experts.down_bias, pairs.down)
