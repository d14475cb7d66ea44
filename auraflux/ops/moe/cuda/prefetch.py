"""A copy of one predicted expert into a slot of an `ExpertPool`, decided on the device beside other kernels.

As in `fetch.py`, every program comes to the same decision and copies its share, and the one that finishes last updates the
tables. No fetch of the same pool may run at the same time.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from auraflux.ops.gpu.device import multiprocessors
from auraflux.ops.gpu.launch import launch
from auraflux.ops.gpu.sizes import cdiv, power_of_two
from auraflux.ops.moe import prefetch as rules
from auraflux.ops.moe.cuda.fetch import (
    CHUNK,
    PROGRAMS,
    WARPS,
    WINDOW,
    FetchShape,
    _copy_expert,
    _eviction_costs,
    _used_by_ids,
    pool_args,
)
from auraflux.ops.moe.pool import NEVER_USED, ExpertPool

LEAST_TRUST, RETRY = tl.constexpr(rules.LEAST_TRUST), tl.constexpr(rules.RETRY)
NEVER = tl.constexpr(NEVER_USED)


@triton.jit
def _first_missing(pool, ids, tokens, pairs, experts, SHAPE: tl.constexpr):
    """Return the first predicted expert without a slot, by rank and then by token; -1 if there is none."""
    pair = tl.arange(0, SHAPE.pairs)
    given = tl.load(ids + pair, mask=pair < pairs, other=-1)
    good = (given >= 0) & (given < experts)
    missing = good & (tl.load(pool.slots + tl.where(good, given, 0), mask=good, other=0) < 0)
    order = tl.where(missing, pair % SHAPE.k * tokens + pair // SHAPE.k, SHAPE.pairs * SHAPE.k)
    first = tl.min(order, 0)
    return tl.max(tl.where(missing & (order == first), given, -1), 0)


@triton.jit(do_not_specialize=["layer", "tokens", "pairs"])
def prefetch_kernel(
    ids, found, pool, layer, tokens, pairs, experts, layers, count, SHAPE: tl.constexpr
):  # fmt: skip
    """Copy the first predicted expert that is missing, and store its slot; see `prefetch_expert`."""
    clock = tl.load(pool.state)
    target = _first_missing(pool, ids, tokens, pairs, experts, SHAPE)
    trusted = (tl.load(pool.trust + layer) > LEAST_TRUST) | (clock // layers % RETRY < tokens)
    if (target >= 0) & trusted:
        index = tl.arange(0, SHAPE.window)
        first = ((clock // tl.maximum(tokens, 1) * SHAPE.window) % count).to(tl.int32)
        first = tl.where(count > SHAPE.window, first, 0)
        place = (first + index) % count
        counts = _used_by_ids(ids, pairs, experts, SHAPE)
        costs = _eviction_costs(pool, place, index < count, counts, layer, experts)
        owner = tl.load(pool.owners + place, mask=index < count, other=-1)
        running = (owner >= (layer - 1) * experts) & (owner < layer * experts) & (owner >= 0)
        costs = tl.where(running, float("inf"), costs)
        victim = ((first + tl.argmin(costs, 0)) % count).to(tl.int32)
        victim = tl.where(tl.min(costs, 0) < float("inf"), victim, -1)
        if victim >= 0:
            _copy_expert(pool.host + tl.load(pool.offsets + target) // 4, pool.memory + victim.to(tl.int64) * pool.step, SHAPE)
        tl.debug_barrier()
        if tl.atomic_add(pool.state + 3, 1) == tl.num_programs(0) - 1:
            _note_prefetched(pool, victim, target, layer, experts)
            tl.store(found, victim)
            tl.store(pool.state + 3, tl.full([], 0, tl.int64))
    elif tl.program_id(0) == 0:
        tl.store(found, -1)


@triton.jit
def _note_prefetched(pool, victim, target, layer, experts):
    """Update the tables after an expert was copied into the slot of an evicted one; nothing if there was none."""
    if victim >= 0:
        evicted = tl.load(pool.owners + victim)
        if evicted >= 0:
            tl.store(pool.every_slot + evicted, -1)
        tl.store(pool.slots + target, victim)
        tl.store(pool.owners + victim, layer * experts + target)
        tl.store(pool.uses + victim, NEVER)
        tl.store(pool.state + 5, tl.load(pool.state + 5) + 1)
        tl.store(pool.prefetched + layer, target)


def prefetch(ids: Tensor, pool: ExpertPool, layer: int) -> Tensor:
    """Run `prefetch_expert`."""
    (tokens, k), (slots, experts), words = ids.shape, (len(pool.memory), pool.slots.shape[1]), pool.nbytes[layer] // 4
    shape = FetchShape(
        0, k, False, power_of_two(tokens * k), power_of_two(experts), min(power_of_two(slots), WINDOW), 0, words,
        min(CHUNK, power_of_two(words)), pool.half_life, False,
    )  # fmt: skip
    found = torch.empty(1, dtype=torch.int32, device=ids.device)
    programs = min(PROGRAMS * multiprocessors(pool.memory.device), cdiv(words, shape.chunk))
    launch(prefetch_kernel, (programs,))(
        ids, found, pool_args(pool, layer), layer, tokens, tokens * k, experts,
        pool.slots.shape[0], slots, shape, num_warps=WARPS,
    )  # fmt: skip
    return found
