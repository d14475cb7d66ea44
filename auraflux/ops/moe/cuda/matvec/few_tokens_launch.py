"""Launch of the `slots` kernels (`few_tokens.py`, `few_tokens_down.py`)."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from auraflux.ops.gpu.device import launches_early, multiprocessor_nbytes, multiprocessors, shared_nbytes
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv
from auraflux.ops.moe.cuda.matvec.few_tokens import CpuResults, Router, SlotShape, up_slots
from auraflux.ops.moe.cuda.matvec.few_tokens_down import down_slots
from auraflux.ops.moe.cuda.matvec.few_tokens_once import COUNTERS, Buffers, once_nbytes, slots_at_once
from auraflux.ops.moe.cuda.stacks import Epilogue, gate_of, rows_of, shared_args, stack_args
from auraflux.ops.moe.experts import Experts, SharedExpert
from auraflux.ops.moe.pool import CpuMailbox
from auraflux.ops.moe.routing import Routing

UP_WARPS = 16
LATE_WARPS = 8  # where kernels do not start early: programs of one tile, all of which fit at once
DOWN_WARPS = 8
ONCE_REGISTERS = 80  # per thread of both in one launch: three programs fit a multiprocessor
ONCE_UNITS = 3  # of a warp's units of codes, at most; in registers where two programs would not fit a multiprocessor
MOST_TILES = 5  # of a program of `up_slots`, one lane of a warp for each of their arrays
MOST_NBYTES = 112 << 10  # of shared memory for tiles; with more, `down_slots` does not fit on the same multiprocessor
AROUND = 8192  # bytes of shared memory other than codes, at most
MOST_GROUPS = 256  # of 16 rows, all slots together: all their codes are in shared memory
MOST_SLOTS = 32  # one lane for each
MOST_CHOICES = 512  # experts whose scores fit the lanes of a warp
MOST_ORDERED = 2048  # inputs, of which each warp of `up_slots` has one quad


class Chosen(NamedTuple):
    """Experts of few tokens: their ids and rows in the stacks [T, k], and the mailbox of those that the CPU computes."""

    ids: Tensor | None
    rows: Tensor | None
    mailbox: CpuMailbox | None = None


def cpu_args(mailbox: CpuMailbox | None) -> CpuResults | None:
    return None if mailbox is None else CpuResults(mailbox.state, mailbox.done, mailbox.result)


def multiply(x: Tensor, ids: Tensor, weights: Tensor | None, experts: Experts, out: Tensor) -> Tensor:
    """Run `expert_mlp` for few tokens, or without weights `expert_parts`: each pair reads its expert separately."""
    shape, rows = SlotShape(0, ids.shape[1], 0, "", False, 0, DOWN_WARPS), rows_of(ids, experts)
    return _launch(x, (rows, weights), Router(None, None, 1.0), Epilogue(), experts, None, out, shape)


def mix(
    x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None, experts: Experts, h: Tensor,
    shared: Tensor | SharedExpert | None, shared_gate: Tensor | None, chosen: "Chosen | None" = None,
) -> Tensor:  # fmt: skip
    """Run `mixture` for few tokens.

    chosen  the tokens' experts, where these are in slots; otherwise the kernels select the experts
    """
    padded, (ids, rows, mailbox) = cdiv(experts.count, 32) * 32, chosen or Chosen(None, None)
    shape = SlotShape(
        0, routing.k, padded, routing.scoring, routing.renormalize, 0, DOWN_WARPS, 0 if chosen is None else experts.count
    )
    shared_expert, shared_output = (shared, None) if isinstance(shared, SharedExpert) else (None, shared)
    router, epilogue = (
        Router(scores, bias, float(routing.scale), ids, cpu_args(mailbox)),
        Epilogue(h, shared_output, shared_gate),
    )
    return _launch(x, (rows, None), router, epilogue, experts, shared_expert, torch.empty_like(x), shape)


def _launch(
    x: Tensor, given: tuple[Tensor | None, Tensor | None], router: Router, epilogue: Epilogue, experts: Experts,
    shared_expert: SharedExpert | None, out: Tensor, shape: SlotShape,
) -> Tensor:  # fmt: skip
    """Launch both kernels; `given` are ids and weights, `shape` lacks widths and tiles."""
    tokens, inner, hidden, k = x.shape[0], experts.inner, experts.hidden, shape.k
    slots, (ids, weights) = k if shared_expert is None else k + 1, given
    between = x.new_empty(tokens * slots, inner)
    shared_gate_args, shared_up_args, shared_down_args = shared_args(shared_expert)
    programs, most = up_sizes(hidden, slots * inner // 16, tokens, x.device)
    weighed = router.ids is None and (ids is None or weights is not None)
    if weighed and router.cpu is None and at_once(tokens, slots, inner, x.device):
        wide, narrow = shape._replace(width=hidden, tiles=most, warps=LATE_WARPS), shape._replace(width=inner)
        held = units_in_registers(hidden, inner, slots, x.device)
        stacks = tuple(stack_args(each) for each in (gate_of(experts), experts.up, experts.down))
        buffers = Buffers(between, _counters(stacks[1].packed))
        sizes = experts.rows, inner, hidden, programs
        launch(slots_at_once, (programs + hidden // 16, tokens))(
            x, given, router, epilogue, stacks, shared_args(shared_expert), buffers, out, sizes, wide, narrow, held,
            num_warps=DOWN_WARPS, maxnreg=ONCE_REGISTERS,
        )  # fmt: skip
        return out
    warps = UP_WARPS if launches_early(x.device) else LATE_WARPS
    launch(up_slots, (programs, tokens))(
        x, ids, router.scores, router.bias, stack_args(gate_of(experts)), stack_args(experts.up),
        shared_gate_args, shared_up_args, between, experts.rows, inner,
        shape._replace(width=hidden, tiles=most, warps=warps), num_warps=warps, launch_pdl=True,
    )  # fmt: skip
    launch(down_slots, (hidden // 16, tokens))(
        between, ids, weights, router, epilogue, stack_args(experts.down), shared_down_args, out, experts.rows, hidden,
        shape._replace(width=inner), num_warps=DOWN_WARPS, launch_pdl=True,
    )  # fmt: skip
    return out


def at_once(tokens: int, slots: int, inner: int, device: torch.device) -> bool:
    """Return whether one launch serves both for a token: where kernels do not start early and a warp has few codes."""
    few = cdiv(slots * (inner // 256), DOWN_WARPS) <= ONCE_UNITS and tokens == 1
    return few and not launches_early(device)


def units_in_registers(hidden: int, inner: int, slots: int, device: torch.device) -> int:
    """Return how many of a warp's units of codes are in registers, so that two programs fit a multiprocessor."""
    fits = (
        n
        for n in range(ONCE_UNITS)
        if 2 * once_nbytes(hidden, inner, slots, DOWN_WARPS, n) + 4096 <= multiprocessor_nbytes(device)
    )
    return next(fits, ONCE_UNITS)


# by the codes of the experts, so that launches that may run at the same time do not share them
_held_counters: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def _counters(codes: Tensor) -> Tensor:
    """Return the counters of a token; they never move, because graphs refer to them."""
    if codes not in _held_counters:
        _held_counters[codes] = torch.zeros(1, COUNTERS, dtype=torch.int32, device=codes.device)
    held: Tensor = _held_counters[codes]
    return held


def order_of(experts: Experts, k: int) -> tuple[int, int]:
    """Return ORDERED of the `persistent` kernels that sums as these do without a shared expert."""
    quads = experts.inner // 256
    return 1, 2 if cdiv(k * quads, DOWN_WARPS) == quads else 1


def fits(hidden: int, inner: int, slots: int, device: torch.device) -> bool:
    """Return whether a tile of `up_slots` and all slots of `down_slots` fit into shared memory."""
    return max(18 * hidden, slots * 9 * inner) + AROUND <= shared_nbytes(device)


def up_sizes(hidden: int, tiles: int, tokens: int, device: torch.device) -> tuple[int, int]:
    """Return programs of `up_slots` per token, about one per multiprocessor if that suffices, and their tiles at most."""
    processors = multiprocessors(device)
    room = max(1, min(MOST_TILES, min(MOST_NBYTES, shared_nbytes(device) - AROUND) // (18 * hidden)))
    most = min(cdiv(tiles * tokens, processors), room) if launches_early(device) else 1
    return max(cdiv(tiles, most), min(processors // tokens, tiles)), most
