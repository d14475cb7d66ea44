"""Launch of the `matvec_tma` kernels (`tma.py`)."""

import torch
from torch import Tensor

from auraflux.ops.gpu.device import multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.moe.cuda.matvec.tma import RingShape, down_ring, up_ring
from auraflux.ops.moe.cuda.stacks import Epilogue, gate_of, shared_args, stack_args
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing

LEAST_WEIGHTS = 5120 * 1536  # of an expert's matrix; with smaller ones `slots` has several tiles in flight
UP_WARPS, DOWN_WARPS = 8, 8
UP_DEEP = 5  # stages in flight at most
DOWN_NBYTES = 56 << 10  # of a program, in flight
DOWN_PROGRAMS = 2  # of a multiprocessor
MOST_SLOTS = 31
GROUP = 32  # experts of a group
AROUND = 6144  # bytes of shared memory other than stages, inputs and sums, at most


def up_sizes(hidden: int, inner: int, slots: int, device: torch.device) -> tuple[int, int, int]:
    """Return programs of `up_ring`, stages per program, and stages in flight."""
    processors = multiprocessors(device)
    count = cdiv(slots * (inner // 8), processors)
    room = shared_nbytes(device) - AROUND - count * (64 * UP_WARPS + 48)
    return processors, count, min(UP_DEEP, room // (9 * hidden))


def down_sizes(hidden: int, inner: int, slots: int, device: torch.device) -> tuple[int, int, int]:
    """Return programs of `down_ring`, tiles per program, and stages in flight, a multiple of the teams.

    If teams alternated on a ring slot, its barrier's phase bit could not distinguish a team's stage from the one before.
    """
    programs = DOWN_PROGRAMS * multiprocessors(device)
    count, teams = cdiv(hidden // 8, programs), DOWN_WARPS // (inner // 512)
    around = AROUND + slots * (2 * inner + count * (inner // 16 + 24))
    deep = min(DOWN_NBYTES, shared_nbytes(device) // DOWN_PROGRAMS - around) // (9 * inner // 2)
    return programs, count, deep // teams * teams


def mix(
    x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None, experts: Experts, h: Tensor,
    shared: Tensor | SharedExpert | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """Run `mixture` for few tokens, one after the other."""
    tokens, inner, hidden, k = x.shape[0], experts.inner, experts.hidden, routing.k
    shared_expert, shared_output = (shared, None) if isinstance(shared, SharedExpert) else (None, shared)
    slots = k if shared_expert is None else k + 1
    sizes = hidden, inner, slots, x.device
    up_programs, up_count, up_depth = up_sizes(*sizes)
    down_programs, down_count, down_depth = down_sizes(*sizes)
    between, out = x.new_empty(tokens * slots, inner), torch.empty_like(x)
    shared_gate_args, shared_up_args, shared_down_args = shared_args(shared_expert)
    topk_groups = routing.topk_groups if routing.groups > 1 else 0
    rule = k, cdiv(experts.count, 32) * 32, routing.scoring, routing.renormalize, topk_groups
    launch(up_ring, (up_programs, tokens))(
        x, scores, bias, stack_args(gate_of(experts)), stack_args(experts.up),
        shared_gate_args, shared_up_args, between, experts.count, inner,
        RingShape(hidden, *rule, up_count, up_depth, UP_WARPS), num_warps=UP_WARPS, launch_pdl=True,
    )  # fmt: skip
    launch(down_ring, (down_programs, tokens))(
        between, scores, bias, float(routing.scale), Epilogue(h, shared_output, shared_gate), stack_args(experts.down),
        shared_down_args, out, experts.count, hidden, RingShape(inner, *rule, down_count, down_depth, DOWN_WARPS),
        num_warps=DOWN_WARPS, launch_pdl=True,
    )  # fmt: skip
    return out
