"""How the kernels of `slots` are launched."""

from typing import Any

import torch
from torch import Tensor

from auraflux.ops.hopper.device import multiprocessors
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.moe.cuda.slots import down_slots, up_slots
from auraflux.ops.moe.cuda.stacks import Added, gate_of, passed
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing

UP_WARPS = 16
DOWN_WARPS = 8
MOST_TILES = 5  # of a program of `up_slots`, one lane of a warp for each of their pieces
MOST_NBYTES = 112 << 10  # of shared memory for tiles; more, and `down_slots` has no room beside them
MOST_GROUPS = 256  # of 16 rows, all slots together: their codes lie in shared memory at once
MOST_SLOTS = 32  # one lane for each
MOST_CHOICES = 512  # experts that the lanes of a warp hold the scores of
MOST_ORDERED = 2048  # inputs, of which each warp of `up_slots` has one quad


def multiply(x: Tensor, ids: Tensor, weights: Tensor | None, experts: Experts, out: Tensor) -> Tensor:
    """`expert_mlp` for few tokens, or without weights `expert_parts`: each pair reads its expert for itself."""
    return _launch(x, ids.shape[1], experts, (ids, weights, None, None, 1.0, Added()), (0, "", False), None, out)


def mix(
    x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None, experts: Experts, h: Tensor,
    shared: Tensor | SharedExpert | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """`mixture` for few tokens."""
    rule = cdiv(experts.count, 32) * 32, routing.scoring, routing.renormalize
    own, beside = (shared, None) if isinstance(shared, SharedExpert) else (None, shared)
    choice = None, None, scores, bias, float(routing.scale), Added(h, beside, shared_gate)
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
    own_gate, own_up, own_down = (None,) * 3 if own is None else map(passed, (gate_of(own), own.up, own.down))
    programs, most = up_sizes(hidden, slots * inner // 16, tokens, multiprocessors(x.device))
    launch(up_slots, (programs, tokens))(
        x, ids, scores, bias, passed(gate_of(experts)), passed(experts.up), own_gate, own_up, between, experts.count, inner,
        hidden, k, *rule[:2], most, num_warps=UP_WARPS, launch_pdl=True,
    )  # fmt: skip
    launch(down_slots, (hidden // 16, tokens))(
        between, ids, weights, scores, bias, *more, passed(experts.down), own_down, out, experts.count, hidden, inner, k,
        *rule, DOWN_WARPS, num_warps=DOWN_WARPS, launch_pdl=True,
    )  # fmt: skip
    return out


def order_of(experts: Experts, k: int) -> tuple[int, int]:
    """How `persistent` adds up as these kernels do without a shared expert: quads one by one, or of a slot together."""
    quads = experts.inner // 256
    return 1, 2 if cdiv(k * quads, DOWN_WARPS) == quads else 1


def up_sizes(hidden: int, tiles: int, tokens: int, processors: int) -> tuple[int, int]:
    """Programs of `up_slots` for each token, about one a multiprocessor if that does, and how many tiles they have at most."""
    room = max(1, min(MOST_TILES, MOST_NBYTES // (18 * hidden)))
    most = min(cdiv(tiles * tokens, processors), room)
    return max(cdiv(tiles, most), min(processors // tokens, tiles)), most
