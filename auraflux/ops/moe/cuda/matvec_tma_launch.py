"""How the kernels of `matvec_tma` are launched."""

import torch
from torch import Tensor

from auraflux.ops.hopper.device import SHARED_NBYTES, multiprocessors
from auraflux.ops.hopper.launch import launch
from auraflux.ops.hopper.sizes import cdiv
from auraflux.ops.moe.cuda.matvec_tma import down_ring, up_ring
from auraflux.ops.moe.cuda.stacks import Added, gate_of, passed
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.routing import Routing

LEAST_WEIGHTS = 5120 * 1536  # of a matrix of an expert; of smaller ones, `slots` has several tiles under way
UP_WARPS, DOWN_WARPS = 8, 8
UP_DEEP = 5  # stages in flight at most
DOWN_NBYTES = 56 << 10  # of a program, in flight
DOWN_PROGRAMS = 2  # of a multiprocessor
MOST_SLOTS = 31
GROUP = 32  # experts, where they lie in groups
AROUND = 6144  # bytes of shared memory beside stages, inputs and sums, at most


def up_sizes(hidden: int, inner: int, slots: int, processors: int) -> tuple[int, int, int]:
    """Programs of `up_ring`, stages of one, and how many are in flight."""
    count = cdiv(slots * (inner // 8), processors)
    return processors, count, min(UP_DEEP, (SHARED_NBYTES - AROUND - count * (64 * UP_WARPS + 48)) // (9 * hidden))


def down_sizes(hidden: int, inner: int, slots: int, processors: int) -> tuple[int, int, int]:
    """Programs of `down_ring`, tiles of one, and how many stages are in flight: the same for each team of warps.

    A place that teams took in turns would tell one of them that its stage has come when it is the one before that has.
    """
    programs = DOWN_PROGRAMS * processors
    count, teams = cdiv(hidden // 8, programs), DOWN_WARPS // (inner // 512)
    around = AROUND + slots * (2 * inner + count * (inner // 16 + 24))
    deep = min(DOWN_NBYTES, SHARED_NBYTES // DOWN_PROGRAMS - around) // (9 * inner // 2)
    return programs, count, deep // teams * teams


def mix(
    x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None, experts: Experts, h: Tensor,
    shared: Tensor | SharedExpert | None, shared_gate: Tensor | None,
) -> Tensor:  # fmt: skip
    """`mixture` for few tokens, one after the other."""
    tokens, inner, hidden, k = x.shape[0], experts.inner, experts.hidden, routing.k
    own, beside = (shared, None) if isinstance(shared, SharedExpert) else (None, shared)
    slots = k if own is None else k + 1
    sizes = hidden, inner, slots, multiprocessors(x.device)
    (up_programs, *up), (down_programs, *down) = up_sizes(*sizes), down_sizes(*sizes)
    between, out = x.new_empty(tokens * slots, inner), torch.empty_like(x)
    own_gate, own_up, own_down = (None,) * 3 if own is None else map(passed, (gate_of(own), own.up, own.down))
    kept = routing.kept_groups if routing.groups > 1 else 0
    rule = k, cdiv(experts.count, 32) * 32, routing.scoring
    launch(up_ring, (up_programs, tokens))(
        x, scores, bias, passed(gate_of(experts)), passed(experts.up), own_gate, own_up, between, experts.count, inner,
        hidden, *rule, kept, *up, UP_WARPS, num_warps=UP_WARPS, launch_pdl=True,
    )  # fmt: skip
    launch(down_ring, (down_programs, tokens))(
        between, scores, bias, float(routing.scale), Added(h, beside, shared_gate), passed(experts.down),
        own_down, out, experts.count, hidden, inner, *rule, routing.renormalize, kept, *down, DOWN_WARPS,
        num_warps=DOWN_WARPS, launch_pdl=True,
    )  # fmt: skip
    return out
