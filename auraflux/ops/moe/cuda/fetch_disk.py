"""Copies of missing experts into the slots of an `ExpertPool` whose experts are on disk, decided on the device.

The first program asks for all missing experts at once (`DiskMailbox`), polls host memory for the answers, and repeats each in
GPU memory. All programs copy experts in the order of the answers: those in host memory first, the others while threads still
read more. An expert that cannot be read leaves the tables as they were, and the host raises after the step.

Other pools go to `fetch.py`, which has the parts that both kernels share.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.device import INTERPRETED, launches_early, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.moe.cuda import fetch as fetch_pool
from auraflux.ops.moe.cuda.fetch import (
    CHUNK,
    MOST_EXPERTS,
    PROGRAMS,
    WARPS,
    WINDOW,
    FetchShape,
    Step,
    _copy_expert,
    _count_uses,
    _eviction_costs,
    _store_rows,
    _used_by_ids,
    _used_by_scores,
    pool_args,
)
from auraflux.ops.moe.pool import CpuMailbox, DiskMailbox, ExpertPool
from auraflux.ops.moe.routing import Routing

assert MOST_EXPERTS <= 1 << 10, "an answer has 10 bits for the expert"
ON_GPU = tl.constexpr(not INTERPRETED)  # the interpreter runs no PTX
POLL_NS = tl.constexpr(1000)  # that a poll of the interpreter counts as


class DiskArgs(NamedTuple):
    """Kernel arguments of a `DiskMailbox`: slots in words of 4 bytes, and the words from one to the next."""

    request: Tensor
    header: Tensor
    experts: Tensor
    answers: Tensor
    late: Tensor
    slots: Tensor
    arrived: Tensor
    failed: Tensor
    patience: Tensor
    step: int


@triton.jit
def _elapsed(word, polls):
    """Return a time in nanoseconds, by the GPU's clock or from the number of polls; `word` is what the last poll returned."""
    time = polls * POLL_NS
    if ON_GPU:
        time = tl.inline_asm_elementwise(
            "mov.u64 $0,%globaltimer; // $1", "=l,l,~{memory}", [word], tl.int64, is_pure=False, pack=1
        )
    return time


@triton.jit
def _poll_host(address):
    """Load a word that the host writes, before all that the host wrote earlier."""
    if ON_GPU:
        at = address.to(tl.int64)
        word = tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0,[$1];", "=l,l,~{memory}", [at], tl.int64, is_pure=False, pack=1
        )
    else:
        word = tl.load(address, volatile=True)
    return word


@triton.jit
def _poll_gpu(address):
    """Load a word that another program writes, after a pause."""
    if ON_GPU:
        at = address.to(tl.int64)
        word = tl.inline_asm_elementwise(
            "nanosleep.u32 100; ld.acquire.gpu.global.b64 $0,[$1];", "=l,l,~{memory}", [at], tl.int64, is_pure=False, pack=1
        )
    else:
        word = tl.load(address, volatile=True)
    return word


@triton.jit
def _publish(address, word):
    """Store a word for other programs, after all that this one has seen."""
    if ON_GPU:
        at = address.to(tl.int64)
        tl.inline_asm_elementwise(
            "st.release.gpu.global.b64 [$1],$2; mov.b64 $0,$2;", "=l,l,l,~{memory}", [at, word], tl.int64, is_pure=False, pack=1
        )
    else:
        tl.store(address, word)


@triton.jit
def _ask(disk, missing, misses, expert, layer):
    """Ask for the missing experts and return the request's number; -1, without asking, after an expert could not be read."""
    number = tl.load(disk.request, volatile=True)
    number = tl.where(tl.load(disk.failed, volatile=True) != 0, -1, (number + 1) & 0x7FFFFFFF)
    if number >= 0:
        place = tl.cumsum(missing.to(tl.int32), 0) - 1
        tl.store(disk.experts + place, expert, mask=missing)
        tl.store(disk.header, layer)
        tl.store(disk.header + 1, misses)
        tl.store(disk.header + 2, 0)
        # all threads have stored, then the fence makes that visible to the host before the request is
        tl.debug_barrier()
        if ON_GPU:
            tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0,$1;", "=r,r,~{memory}", [number], tl.int32, False, 1)
        tl.store(disk.request, number)
    return number.to(tl.int64)


@triton.jit
def _await_answer(disk, place, number, late):
    """Return an answer to a request, 0 where none comes, and whether the disk is late by now."""
    word, polls = _poll_host(disk.answers + place), tl.full([], 0, tl.int64)
    limit = tl.load(disk.patience) + _elapsed(word, polls)
    while (word >> 32 != number) & (late == 0):
        word, polls = _poll_host(disk.answers + place), polls + 1
        late = (_elapsed(word, polls) > limit).to(tl.int32)
    there = word >> 32 == number
    if (word & 0x3FFFFF == 0) | ~there:
        tl.store(disk.failed, tl.full([], 1, tl.int64))
        if (number >= 0) & ~there:
            tl.store(disk.late, 1)
    return tl.where(there, word, 0), late


@triton.jit
def _next_arrival(disk, place, number, late):
    """Return an answer, which the first program repeats for the others, and whether the disk is late."""
    address = disk.arrived + place
    if tl.program_id(0) == 0:
        word, late = _await_answer(disk, place, number, late)
        _publish(address, word + 1)
    else:
        word = _poll_gpu(address)
        while word == 0:
            word = _poll_gpu(address)
        word -= 1
    return word, late


@triton.jit
def _copy_arriving(pool, disk, missing, misses, slot, counts, expert, layer, tokens, experts, count, SHAPE: tl.constexpr):
    """Copy this program's part of the missing experts as they arrive in host memory.

    Return the slots of all experts, and which experts could not be read.
    """
    index = tl.arange(0, SHAPE.window)
    first = ((tl.load(pool.state) // tl.maximum(tokens, 1) * SHAPE.window) % count).to(tl.int32)
    first = tl.where(count > SHAPE.window, first, 0)
    costs = _eviction_costs(pool, (first + index) % count, index < count, counts, layer, experts)
    left, late, number = missing, tl.full([], 0, tl.int32), tl.full([], -1, tl.int64)
    if tl.program_id(0) == 0:
        number = _ask(disk, missing, misses, expert, layer)
        late = (number < 0).to(tl.int32)
    for place in range(misses):
        word, late = _next_arrival(disk, place, number, late)
        source, target = word & 0x3FFFFF, (word >> 22 & 0x3FF).to(tl.int32)
        if source > 0:
            left = left & (expert != target)
            victim = tl.argmin(costs, 0)
            costs = tl.where(index == victim, float("inf"), costs)
            victim = (first + victim) % count
            slot = tl.where(expert == target, victim, slot)
            _copy_expert(disk.slots + (source - 1) * disk.step, pool.memory + victim.to(tl.int64) * pool.step, SHAPE)
    # any slot will do for the others: the step is dropped
    return tl.where(left, 0, slot), left


@triton.jit(do_not_specialize=["layer", "tokens", "pairs", "blocks"])
def fetch_disk_kernel(
    step, rows, owner, pool, disk, layer, tokens, pairs, experts, blocks, count, SHAPE: tl.constexpr
):  # fmt: skip
    """Bring the experts that a step uses in a layer into slots, as `fetch_kernel` does."""
    scores, bias, ids, _ = step
    if SHAPE.early:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.arange(0, SHAPE.experts)
    if scores is None:
        counts = _used_by_ids(ids, pairs, experts, SHAPE)
    else:
        counts = _used_by_scores(scores, bias, expert, experts, ids, SHAPE)
    slot = tl.load(pool.slots + expert, mask=expert < experts, other=0)
    missing = (counts > 0) & (slot < 0)
    misses, absent = tl.sum(missing.to(tl.int32), 0), missing & (slot >= 0)
    last = tl.program_id(0) == 0
    if misses > 0:
        slot, absent = _copy_arriving(pool, disk, missing, misses, slot, counts, expert, layer, tokens, experts, count, SHAPE)
        tl.debug_barrier()
        last = tl.atomic_add(pool.state + 3, 1) == tl.num_programs(0) - 1
    if tl.program_id(0) == 0:
        _store_rows(ids, rows, owner, slot, pairs, experts, blocks, count, SHAPE)
    if last:
        arrived = missing & ~absent
        if misses > 0:
            evicted = tl.load(pool.owners + slot, mask=arrived, other=-1)
            tl.store(pool.every_slot + evicted, -1, mask=arrived & (evicted >= 0))
            tl.debug_barrier()
            tl.store(pool.slots + expert, slot, mask=arrived)
            tl.store(pool.owners + slot, layer * experts + expert, mask=arrived)
            tl.store(disk.arrived + expert, expert.to(tl.int64) * 0, mask=expert < misses)
            tl.store(pool.state + 3, tl.full([], 0, tl.int64))
        _count_uses(pool, slot, tl.where(absent, 0, counts), arrived, absent & ~absent, tokens, SHAPE)


def disk_args(box: DiskMailbox) -> DiskArgs:
    """Return the kernel arguments of a mailbox."""
    slots = box.slots.view(torch.int32)
    return DiskArgs(
        box.request, box.header, box.experts, box.answers, box.late, slots, box.arrived, box.failed, box.patience,
        slots.stride(0),
    )  # fmt: skip


def fetch(pool: ExpertPool, layer: int, ids: Tensor, owner: Tensor | None = None) -> Tensor:
    """Bring the experts of ids [T, k] into slots and return these, [T, k]; replace the blocks' owners by slots too."""
    if pool.disk is None:
        return fetch_pool.fetch(pool, layer, ids, owner)
    return _launch(pool, pool.disk.mailbox, layer, Step(None, None, ids, None), owner, None)


def fetch_chosen(
    pool: ExpertPool, layer: int, x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None
) -> tuple[Tensor, Tensor, CpuMailbox | None]:
    """Select the experts of few tokens by their scores [T, E] and bring them into slots; return ids and slots [T, k]."""
    if pool.disk is None:
        return fetch_pool.fetch_chosen(pool, layer, x, scores, routing, bias)
    ids = torch.empty(scores.shape[0], routing.k, dtype=torch.int32, device=scores.device)
    return ids, _launch(pool, pool.disk.mailbox, layer, Step(scores, bias, ids, None), None, routing), None


def _launch(
    pool: ExpertPool, box: DiskMailbox, layer: int, step: Step, owner: Tensor | None, routing: Routing | None
) -> Tensor:  # fmt: skip
    (tokens, k), (slots, experts) = step.ids.shape, (len(pool.memory), pool.slots.shape[1])
    words, early, rows = pool.nbytes[layer] // 4, launches_early(pool.memory.device), torch.empty_like(step.ids)
    blocks = 0 if owner is None else len(owner)
    shape = FetchShape(
        0 if routing is None else tokens, k, routing is not None and routing.scoring == "sigmoid", power_of_two(tokens * k),
        power_of_two(experts), min(power_of_two(slots), WINDOW), power_of_two(blocks) if blocks else 0,
        words, min(CHUNK, power_of_two(words)), pool.half_life, early,
    )  # fmt: skip
    # all programs run at once, as they wait for the first
    programs = min(PROGRAMS * multiprocessors(pool.memory.device), cdiv(words, shape.chunk))
    args: tuple[Any, ...] = step, rows, owner, pool_args(pool, layer), disk_args(box), layer, tokens, tokens * k
    launch(fetch_disk_kernel, (programs,))(*args, experts, blocks, slots, shape, num_warps=WARPS, launch_pdl=early)
    return rows
