"""Inputs for experts in the slots of a pool: hits, misses and evictions, few and many tokens."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from auraflux.ops._cases import Args, Case
from auraflux.ops.moe._expert_cases import matrices
from auraflux.ops.moe.experts import SharedExpert, blob_nbytes, blob_of
from auraflux.ops.moe.pool import DiskMailbox, ExpertPool, aligned
from auraflux.ops.moe.prefetch import prefetch_expert
from auraflux.ops.moe.reference import fetch_experts, pooled_mixture, route
from auraflux.ops.moe.routing import Routing

BF16 = torch.bfloat16
LAYERS, LAYER = 3, 1


def pool_of(count: int, hidden: int, inner: int, slots: int, cached: int, **options) -> ExpertPool:
    """Return a pool of LAYERS equal layers with some random experts in its slots."""
    stacks = matrices(count, hidden, inner, lanes=1, **options)
    parts = [{name: matrix[e] for name, matrix in stacks.items()} for e in range(count)]
    size = aligned(blob_nbytes(parts[0]))
    host = torch.zeros(LAYERS * count, size, dtype=torch.uint8)
    # rows in any order
    offsets = torch.randperm(LAYERS * count).view(LAYERS, count) * size
    for layer in range(LAYERS):
        for expert, part in enumerate(parts):
            blob_of(part, host[int(offsets[layer, expert]) // size])
    pool = ExpertPool.empty(torch.zeros(slots, size, dtype=torch.uint8), host.view(-1), offsets, [dict(parts[0])] * LAYERS)
    for slot, owner in enumerate(torch.randperm(LAYERS * count)[:cached].tolist()):
        pool.slots.view(-1)[owner], pool.owners[slot] = slot, owner
        pool.memory[slot] = host[int(offsets.view(-1)[owner]) // size]
        pool.uses[slot] = 4 * torch.rand(())
    pool.state.copy_(torch.tensor([1000, 7, 3, 0, 0, 2, 1]))
    return pool


def fetched(tokens: int, k: int, count: int, slots: int, cached: int) -> Args:
    pool = pool_of(count, 32, 32, slots, cached, group=32)
    ids = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)]).int()
    ids[0, 0] = -1
    return {"ids": ids, "pool": pool, "layer": LAYER}


def prefetched(
    tokens: int, k: int, count: int, slots: int, cached: int, trust: float = 0.9, clock: int = 1000
) -> Args:  # fmt: skip
    """Return predicted experts."""
    args = fetched(tokens, k, count, slots, cached)
    args["pool"].state[0], args["pool"].trust[LAYER] = clock, trust
    return args


def predicted(expert: int) -> Args:
    """Return a step after one of its layer's experts has been prefetched."""
    args = fetched(1, 4, 7, 21, 12)
    args["ids"][0, 1], args["pool"].prefetched[LAYER] = 3, expert
    args["ids"][0, 2:] = torch.tensor([5, 6])
    return args


def pooled(
    tokens: int, routing: Routing, count: int, hidden: int, inner: int, slots: int, cached: int,
    dtype: torch.dtype = BF16, shared: bool = False, **options,
) -> Args:  # fmt: skip
    pool = pool_of(count, hidden, inner, slots, cached, **options)
    made = {
        "x": torch.randn(tokens, hidden).to(dtype), "scores": torch.randn(tokens, count).to(dtype), "routing": routing,
        "pool": pool, "layer": LAYER, "h": torch.randn(tokens, hidden).to(dtype),
    }  # fmt: skip
    if shared:
        one = matrices(1, hidden, inner, lanes=1)
        made["shared"] = SharedExpert(*(one[name][0] for name in ("gate", "up", "down")))
        made["shared_gate"] = torch.randn(tokens).to(dtype)
    return made


@dataclass(frozen=True, eq=False)
class AnsweredDisk:
    """Experts on disk whose readers have answered the first request before it comes."""

    mailbox: DiskMailbox

    def read(self, layer: int, experts: list[int]) -> Iterator[tuple[int, Tensor]]:
        box = self.mailbox
        box.request.add_(1)
        box.header[:2] = torch.tensor([layer, len(experts)])
        box.experts[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
        for answer in box.answers[: len(experts)].tolist():
            yield answer >> 22 & 1023, box.slots[(answer & 0x3FFFFF) - 1]


def on_disk(args: Args) -> Args:
    """Return arguments with a pool whose experts are on disk; its host memory has slots for all."""
    pool = args["pool"]
    ids = args["ids"] if "ids" in args else route.reference(args["scores"], args["routing"], args.get("bias"))[0]
    used = ids[ids >= 0].unique().tolist()
    missing, size = [expert for expert in used if pool.slots[LAYER, expert] < 0], pool.memory.shape[1]
    answers = torch.zeros(pool.slots.shape[1], dtype=torch.int64)
    for place, expert in enumerate(missing):
        answers[place] = 1 << 32 | expert << 22 | int(pool.offsets[LAYER, expert]) // size + 1
    request, header, asked, late = (torch.zeros(count, dtype=torch.int32) for count in (1, 4, len(answers), 1))
    failed, arrived, patience = answers.new_zeros(1), torch.zeros_like(answers), answers.new_tensor([10**9])
    box = DiskMailbox(request, header, asked, answers, late, pool.host.view(-1, size), arrived, failed, patience)
    return {**args, "pool": replace(pool, disk=AnsweredDisk(box))}


SOFTMAX, FOUR = Routing(8, "softmax", True), Routing(4, "softmax", True)
POOL_CASES = [
    Case(fetch_experts, "evicts", lambda: fetched(1, 8, 9, 13, 13)),
    Case(fetch_experts, "free-slots", lambda: fetched(2, 4, 9, 20, 12)),
    Case(fetch_experts, "all-cached", lambda: fetched(1, 4, 7, 21, 21)),
    Case(fetch_experts, "many-tokens", lambda: fetched(33, 4, 9, 11, 11)),
    Case(fetch_experts, "predicted", lambda: predicted(3)),
    Case(fetch_experts, "predicted-wrongly", lambda: predicted(4)),
    Case(fetch_experts, "disk-evicts", lambda: on_disk(fetched(1, 8, 9, 13, 13))),
    Case(fetch_experts, "disk-many-tokens", lambda: on_disk(fetched(33, 4, 9, 11, 11))),
    Case(prefetch_expert, "evicts", lambda: prefetched(1, 4, 9, 13, 13)),
    Case(prefetch_expert, "free-slots", lambda: prefetched(2, 4, 9, 20, 12)),
    Case(prefetch_expert, "all-cached", lambda: prefetched(1, 4, 7, 21, 21)),
    Case(prefetch_expert, "no-trust", lambda: prefetched(3, 4, 9, 13, 13, trust=0.4)),
    Case(prefetch_expert, "tries-again", lambda: prefetched(1, 4, 9, 13, 13, trust=0.4, clock=16 * LAYERS)),
    Case(pooled_mixture, "disk-one-token", lambda: on_disk(pooled(1, FOUR, 7, 64, 32, 9, 8, group=32)), tol=6e-3),
    Case(pooled_mixture, "disk-256-wide", lambda: on_disk(pooled(1, SOFTMAX, 20, 256, 256, 24, 24)), tol=6e-3),
    Case(pooled_mixture, "disk-60-tokens", lambda: on_disk(pooled(60, FOUR, 7, 64, 32, 9, 8, group=32)), tol=6e-3),
    Case(pooled_mixture, "one-token", lambda: pooled(1, SOFTMAX, 20, 256, 256, 24, 24), tol=6e-3),
    Case(pooled_mixture, "four-tokens", lambda: pooled(4, SOFTMAX, 20, 256, 256, 40, 24), tol=6e-3),
    Case(pooled_mixture, "sigmoid", lambda: pooled(2, Routing(6, "sigmoid", True, scale=2.5), 20, 256, 256, 24, 24), tol=6e-3),
    Case(pooled_mixture, "shared-expert", lambda: pooled(1, SOFTMAX, 20, 256, 256, 24, 24, shared=True), tol=6e-3),
    Case(pooled_mixture, "60-tokens", lambda: pooled(60, SOFTMAX, 20, 256, 256, 24, 24), tol=6e-3),
    Case(pooled_mixture, "400-tokens", lambda: pooled(400, SOFTMAX, 20, 256, 256, 24, 24), tol=6e-3, slow=True),
    Case(pooled_mixture, "odd", lambda: pooled(5, Routing(3, "softmax", True), 11, 64, 32, 12, 9, group=32), tol=6e-3),
    Case(pooled_mixture, "8-bit", lambda: pooled(1, SOFTMAX, 20, 256, 256, 24, 24, bits=8), tol=6e-3),
    Case(pooled_mixture, "float32", lambda: pooled(3, FOUR, 9, 64, 32, 11, 9, dtype=torch.float32, group=32)),
]  # fmt: skip
