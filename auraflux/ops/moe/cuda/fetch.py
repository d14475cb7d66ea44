"""Copies of missing experts into the slots of an `ExpertPool`, decided on the device.

Every program of `fetch_kernel` reads the same tables and comes to the same decision, then copies its share of the missing
experts from pinned host memory. The program that finishes last updates the tables, so that no other reads them half updated.
A step whose experts are all cached only counts their uses.

With a mailbox, some of the missing experts are not fetched: CPU threads compute them meanwhile, and the kernel that sums the
experts' outputs waits for theirs (`matvec/few_tokens_down.py`).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.blocks.dependent_launch import gdc_launch_dependents, gdc_wait
from auraflux.ops.gpu.blocks.elementwise import sigmoid
from auraflux.ops.gpu.device import INTERPRETED, launches_early, multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.moe import pool as pools
from auraflux.ops.moe.cuda.routing.kernels import LOWEST, score_keys
from auraflux.ops.moe.pool import CpuMailbox, ExpertPool
from auraflux.ops.moe.routing import Routing

WARPS = 4  # of a program
CHUNK = 4096  # words that a program copies at once
WINDOW = 1024  # slots among which a victim is chosen; with more, the window moves from call to call
PROGRAMS = 1  # of a multiprocessor: more wait longer for their first bytes
MOST_PAIRS = 4096  # (token, expert) pairs of a call
MOST_EXPERTS = 1024  # of a layer
FORGET = tl.constexpr(pools.FORGET)
MOST_ON_CPU = tl.constexpr(32)  # pairs of a request to the CPU
FENCED = tl.constexpr(not INTERPRETED)  # the interpreter runs no PTX
COLUMNS = 1024  # inputs that are copied to the mailbox at once
MOST_RANKED_TOKENS, MOST_RANKED = 8, 256  # tokens and experts up to which the kernel also selects the experts


class PoolArgs(NamedTuple):
    """Kernel arguments of an `ExpertPool`: memory and host in words of 4 bytes, slots and offsets of one layer."""

    memory: Tensor
    every_slot: Tensor
    slots: Tensor
    owners: Tensor
    uses: Tensor
    state: Tensor
    prefetched: Tensor
    trust: Tensor
    host: Tensor
    offsets: Tensor
    step: int


class FetchShape(NamedTuple):
    """Compile-time shape of `fetch_kernel`.

    tokens, k, sigmoid  of the scores; no tokens where ids are given
    pairs               padded
    experts, window     padded experts of a layer, and slots among which a victim is chosen
    blocks              padded blocks whose owners are translated; 0 for none
    words, chunk        of an expert, and of one copy
    half_life           of uses
    early               programmatic dependent launch, which needs Hopper
    hidden, columns     of x, and those copied at once; with a mailbox
    """

    tokens: int
    k: int
    sigmoid: bool
    pairs: int
    experts: int
    window: int
    blocks: int
    words: int
    chunk: int
    half_life: float
    early: bool
    hidden: int = 0
    columns: int = 0


@triton.jit
def _used_by_scores(scores, bias, expert, experts, ids, SHAPE: tl.constexpr):
    """Select the top-k experts of each token, store them in `ids`, and return how many tokens use each expert."""
    E: tl.constexpr = SHAPE.experts
    T: tl.constexpr = SHAPE.tokens
    K: tl.constexpr = SHAPE.k
    listed = expert < experts
    counts = tl.zeros([E], tl.int32)
    for token in tl.static_range(T):
        x = tl.load(scores + token * experts + expert, mask=listed, other=float("-inf")).to(tl.float32)
        if SHAPE.sigmoid:
            x = sigmoid(x)
            if bias is not None:
                x += tl.load(bias + expert, mask=listed, other=0.0).to(tl.float32)
        keys = score_keys(x, expert, listed)
        rank = tl.zeros([E], tl.int32) + K
        for slot in range(K):
            best = keys == tl.max(keys, 0)
            rank = tl.where(best, slot, rank)
            keys = tl.where(best, LOWEST, keys)
        chosen = rank < K
        counts += chosen.to(tl.int32)
        tl.store(ids + token * K + rank, expert, mask=chosen & (tl.program_id(0) == 0))
    return counts


@triton.jit
def _used_by_ids(ids, pairs, experts, SHAPE: tl.constexpr):
    """Return how many pairs use each expert; ids out of range are skipped."""
    pair = tl.arange(0, SHAPE.pairs)
    given = tl.load(ids + pair, mask=pair < pairs, other=-1)
    good = (given >= 0) & (given < experts)
    return tl.histogram(tl.where(good, given, 0), SHAPE.experts, mask=good)


@triton.jit
def _eviction_costs(pool, place, there, counts, layer, experts):
    """Return the use count of each slot of the window; infinite where the step needs its expert."""
    owner = tl.load(pool.owners + place, mask=there, other=-1)
    uses = tl.load(pool.uses + place, mask=there, other=float("inf"))
    own = owner - layer * experts
    inside = (owner >= 0) & (own >= 0) & (own < experts)
    needed = inside & (tl.gather(counts, tl.where(inside, own, 0), 0) > 0)
    return tl.where(there & (owner < 0), float("-inf"), tl.where(needed, float("inf"), uses))


@triton.jit
def _copy_expert(source, target, SHAPE: tl.constexpr):
    """Copy this program's chunks of an expert."""
    lane = tl.arange(0, SHAPE.chunk)
    for chunk in range(tl.program_id(0), tl.cdiv(SHAPE.words, SHAPE.chunk), tl.num_programs(0)):
        at = chunk * SHAPE.chunk + lane
        there = at < SHAPE.words
        words = tl.load(source + at, mask=there, other=0, cache_modifier=".cv")
        tl.store(target + at, words, mask=there)


@triton.jit
def _number_fetched(pool, mailbox, misses):
    """Return how many of a step's missing experts are fetched; averages that are no integers are rounded up at times."""
    average = tl.load(mailbox.fetched + tl.minimum(misses, MOST_ON_CPU))
    turn = tl.load(pool.state).to(tl.float32) * 0.6180340
    return tl.minimum((average + (turn - tl.floor(turn))).to(tl.int32), misses)


@triton.jit
def _choose_fetched(missing, misses, number, clock, expert, experts):
    """Return which of the missing experts are fetched: `number` in a row, beginning elsewhere in every call."""
    first = (clock * 7 % experts).to(tl.int32)
    rank = tl.cumsum(missing.to(tl.int32), 0) - 1 - tl.sum((missing & (expert < first)).to(tl.int32), 0)
    rank = tl.where(rank < 0, rank + misses, rank)
    return missing & (rank < number)


@triton.jit
def _send_request(mailbox, x, ids, on_cpu, layer, pairs, experts, SHAPE: tl.constexpr):
    """Write the pairs of some experts and their tokens to the mailbox."""
    pair = tl.arange(0, SHAPE.pairs)
    given = tl.load(ids + pair, mask=pair < pairs, other=-1)
    mine = (given >= 0) & (given < experts)
    mine = mine & (tl.gather(on_cpu.to(tl.int32), tl.where(mine, given, 0), 0) > 0)
    place = tl.cumsum(mine.to(tl.int32), 0) - 1
    tl.store(mailbox.tokens + place, pair // SHAPE.k, mask=mine)
    tl.store(mailbox.experts + place, given, mask=mine)
    tl.store(mailbox.state + 3 + place, pair, mask=mine)
    column = tl.arange(0, SHAPE.columns)
    T: tl.constexpr = SHAPE.tokens
    for token in tl.static_range(T):
        for start in range(0, SHAPE.hidden, SHAPE.columns):
            at = token * SHAPE.hidden + start + column
            there = start + column < SHAPE.hidden
            tl.store(mailbox.x + at, tl.load(x + at, mask=there), mask=there)
    count, number = tl.sum(mine.to(tl.int32), 0), tl.load(mailbox.state) + 1
    tl.store(mailbox.header, layer)
    tl.store(mailbox.header + 1, count)
    tl.store(mailbox.state, number)
    tl.store(mailbox.state + 1, count)
    # all threads have stored, then the fence makes that visible to the host before the request is
    tl.debug_barrier()
    if FENCED:
        tl.inline_asm_elementwise("fence.acq_rel.sys; mov.b32 $0,$1;", "=r,r,~{memory}", [number], tl.int32, False, 1)
    tl.store(mailbox.request, number)


@triton.jit
def _count_uses(pool, slot, counts, missing, on_cpu, tokens, SHAPE: tl.constexpr):
    """Add a step's uses to the decayed counts of its slots, and its hits and misses to the totals."""
    clock = tl.load(pool.state)
    needed = (counts > 0) & ~on_cpu
    new = clock.to(tl.float32) / SHAPE.half_life + tl.log2(tl.maximum(counts, 1).to(tl.float32))
    old = tl.load(pool.uses + slot, mask=needed & ~missing, other=-1e30)
    top = tl.maximum(old, new)
    tl.store(pool.uses + slot, top + tl.log2(1.0 + tl.exp2(tl.minimum(old, new) - top)), mask=needed)
    misses = tl.sum(missing.to(tl.int32), 0)
    tl.store(pool.state + 1, tl.load(pool.state + 1) + tl.sum(needed.to(tl.int32), 0) - misses)
    tl.store(pool.state + 2, tl.load(pool.state + 2) + misses)
    tl.store(pool.state + 4, tl.load(pool.state + 4) + tl.sum(on_cpu.to(tl.int32), 0))
    tl.store(pool.state, clock + tokens)


@triton.jit
def _copy_missing(pool, missing, slot, counts, expert, layer, tokens, experts, count, SHAPE: tl.constexpr):
    """Copy this program's part of the missing experts into slots of evicted ones, and return the slots of all experts."""
    index = tl.arange(0, SHAPE.window)
    first = ((tl.load(pool.state) // tl.maximum(tokens, 1) * SHAPE.window) % count).to(tl.int32)
    first = tl.where(count > SHAPE.window, first, 0)
    costs = _eviction_costs(pool, (first + index) % count, index < count, counts, layer, experts)
    left = missing
    for _ in range(tl.sum(missing.to(tl.int32), 0)):
        target = tl.min(tl.where(left, expert, SHAPE.experts), 0)
        left = left & (expert != target)
        victim = tl.argmin(costs, 0)
        costs = tl.where(index == victim, float("inf"), costs)
        victim = (first + victim) % count
        slot = tl.where(expert == target, victim, slot)
        source = pool.host + tl.load(pool.offsets + target) // 4
        _copy_expert(source, pool.memory + victim.to(tl.int64) * pool.step, SHAPE)
    return slot


@triton.jit(do_not_specialize=["layer", "tokens", "pairs", "blocks"])
def fetch_kernel(
    step, rows, owner, pool, mailbox, layer, tokens, pairs, experts, blocks, count, SHAPE: tl.constexpr
):  # fmt: skip
    """Bring the experts that a step uses in a layer into slots.

    step     scores [T, E] and their bias select the experts, which are stored in ids; scores are None where ids are given
    rows     [T, k]  receives the slot of each id; -1 where the CPU computes it
    owner    [B]     experts of blocks of pairs, replaced by their slots; or None
    mailbox  of the CPU, which computes some of the missing experts; or None
    """
    scores, bias, ids, x = step
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
    misses, on_cpu = tl.sum(missing.to(tl.int32), 0), missing & (slot >= 0)
    last = tl.program_id(0) == 0
    if mailbox is not None:  # noqa: SIM102
        if last & (misses == 0):
            tl.store(mailbox.state + 1, 0)
    if misses > 0:
        if mailbox is not None:
            number = _number_fetched(pool, mailbox, misses)
            fetched = _choose_fetched(missing, misses, number, tl.load(pool.state), expert, experts)
            on_cpu, missing = missing & ~fetched, fetched
            if last:
                tl.debug_barrier()
                if number < misses:
                    _send_request(mailbox, x, ids, on_cpu, layer, pairs, experts, SHAPE)
                else:
                    tl.store(mailbox.state + 1, 0)
        slot = _copy_missing(pool, missing, slot, counts, expert, layer, tokens, experts, count, SHAPE)
        tl.debug_barrier()
        last = tl.atomic_add(pool.state + 3, 1) == tl.num_programs(0) - 1
    if tl.program_id(0) == 0:
        _store_rows(ids, rows, owner, slot, pairs, experts, blocks, count, SHAPE)
    if last:
        if misses > 0:
            evicted = tl.load(pool.owners + slot, mask=missing, other=-1)
            tl.store(pool.every_slot + evicted, -1, mask=missing & (evicted >= 0))
            tl.debug_barrier()
            tl.store(pool.slots + expert, slot, mask=missing)
            tl.store(pool.owners + slot, layer * experts + expert, mask=missing)
            tl.store(pool.state + 3, tl.full([], 0, tl.int64))
        _count_uses(pool, slot, counts, missing, on_cpu, tokens, SHAPE)
        _update_trust(pool, counts, expert, layer)


@triton.jit
def _update_trust(pool, counts, expert, layer):
    """Update a layer's trust by the expert that was prefetched for this step."""
    predicted, trust = tl.load(pool.prefetched + layer), tl.load(pool.trust + layer)
    if predicted >= 0:
        used = tl.max(tl.where(expert == predicted, counts, 0), 0) > 0
        tl.store(pool.trust + layer, trust + FORGET * (used.to(tl.float32) - trust))
        tl.store(pool.state + 6, tl.load(pool.state + 6) + used.to(tl.int64))
        tl.store(pool.prefetched + layer, -1)


@triton.jit
def _store_rows(ids, rows, owner, slot, pairs, experts, blocks, count, SHAPE: tl.constexpr):
    """Store the slots of ids and of blocks' owners; those of experts that do not exist are past the last slot."""
    if SHAPE.tokens > 0:
        # the selection was stored by other threads of this program
        tl.debug_barrier()
    pair = tl.arange(0, SHAPE.pairs)
    given = tl.load(ids + pair, mask=pair < pairs, other=-1)
    good = (given >= 0) & (given < experts)
    found = tl.gather(slot, tl.where(good, given, 0), 0)
    tl.store(rows + pair, tl.where(good, found, tl.where(given < 0, -1, count)), mask=pair < pairs)
    if owner is not None:
        block = tl.arange(0, SHAPE.blocks)
        given = tl.load(owner + block, mask=block < blocks, other=experts)
        good = given < experts
        found = tl.gather(slot, tl.where(good, given, 0), 0)
        tl.store(owner + block, tl.where(good, found, count), mask=block < blocks)


def pool_args(pool: ExpertPool, layer: int) -> PoolArgs:
    """Return the kernel arguments of a layer; a slot's words are those of the pool's largest expert."""
    memory, host = pool.memory.view(torch.int32), pool.host.view(torch.int32)
    tables = pool.slots, pool.slots[layer], pool.owners, pool.uses, pool.state, pool.prefetched, pool.trust
    return PoolArgs(memory, *tables, host, pool.offsets[layer], memory.stride(0))


def refuses(pool: ExpertPool, pairs: int) -> str | None:
    """Return why `fetch_kernel` does not serve a call."""
    experts = pool.slots.shape[1]
    if pairs > MOST_PAIRS or experts > MOST_EXPERTS:
        return f"{pairs} pairs of {experts} experts; it is for up to {MOST_PAIRS} of {MOST_EXPERTS}"
    return None


def fetch(pool: ExpertPool, layer: int, ids: Tensor, owner: Tensor | None = None) -> Tensor:
    """Bring the experts of ids [T, k] into slots and return these, [T, k]; replace the blocks' owners by slots too."""
    return _launch(pool, layer, Step(None, None, ids, None), owner, None, None)


def fetch_chosen(
    pool: ExpertPool, layer: int, x: Tensor, scores: Tensor, routing: Routing, bias: Tensor | None
) -> tuple[Tensor, Tensor, CpuMailbox | None]:
    """Select the experts of few tokens by their scores [T, E] and bring them into slots, or hand them to the CPU.

    Return ids and slots [T, k], where those on the CPU have none; and the mailbox, if it may have a request.
    """
    ids = torch.empty(scores.shape[0], routing.k, dtype=torch.int32, device=scores.device)
    mailbox = pool.mailbox
    if mailbox is not None and (x.shape[0] > mailbox.x.shape[0] or ids.numel() > len(mailbox.tokens)):
        mailbox = None
    return ids, _launch(pool, layer, Step(scores, bias, ids, x), None, routing, mailbox), mailbox


class Step(NamedTuple):
    """Scores and bias of the router, ids and x of a step."""

    scores: Tensor | None
    bias: Tensor | None
    ids: Tensor
    x: Tensor | None


def _launch(
    pool: ExpertPool, layer: int, step: Step, owner: Tensor | None, routing: Routing | None, mailbox: CpuMailbox | None
) -> Tensor:  # fmt: skip
    (tokens, k), (slots, experts) = step.ids.shape, (len(pool.memory), pool.slots.shape[1])
    words, early, rows = pool.nbytes[layer] // 4, launches_early(pool.memory.device), torch.empty_like(step.ids)
    blocks = 0 if owner is None else len(owner)
    shape = FetchShape(
        0 if routing is None else tokens, k, routing is not None and routing.scoring == "sigmoid", power_of_two(tokens * k),
        power_of_two(experts), min(power_of_two(slots), WINDOW), power_of_two(blocks) if blocks else 0,
        words, min(CHUNK, power_of_two(words)), pool.half_life, early,
        0 if mailbox is None else mailbox.x.shape[1], COLUMNS,
    )  # fmt: skip
    programs = min(PROGRAMS * multiprocessors(pool.memory.device), cdiv(words, shape.chunk))
    # a kernel that also waits for another stream starts after the one before it
    early = not (pool.side_copies is not None and pool.side_copies.before_fetch()) and early
    launch(fetch_kernel, (programs,))(
        step, rows, owner, pool_args(pool, layer), mailbox, layer, tokens, tokens * k, experts, blocks, slots, shape,
        num_warps=WARPS, launch_pdl=early,
    )  # fmt: skip
    if pool.side_copies is not None:
        pool.side_copies.after_fetch()
    return rows
