"""`ExpertPool`: GPU slots shared by the experts of all layers, and the tables that find an expert's slot.

The tables are on the device, so a decode step looks up, evicts and copies experts without the host and can be replayed as a
CUDA graph. Policy, all of it (`fetch_experts`):

hit    `slots` has the expert's slot
miss   the expert is copied from host memory into a free slot, or into that of the evicted expert; with experts on disk,
       threads read it into host memory first (`DiskMailbox`)
evict  the least frequently used expert of any layer, where uses decay with a half-life of HALF_LIFE_TOKENS (LFU with decay);
       never one that the same step uses in the same layer
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from auraflux.errors import FormatError, InputError
from auraflux.ops._dispatch import check_dense, check_dtype, check_shape, op
from auraflux.ops.moe.experts import Activation, Experts, Stack, blob_nbytes
from auraflux.validation import check_fields

HALF_LIFE_TOKENS = 64
NEVER_USED = -1e30  # log2 of the use count of a free slot
FORGET = 0.1  # weight of the last prefetched expert in a layer's trust
CLOCK, HITS, MISSES, TICKET, ON_CPU, PREFETCHED, PREFETCHED_USED = range(7)  # entries of `state`
ALIGNMENT = 16  # bytes, of experts in host memory and of slots


def aligned(nbytes: int) -> int:
    """Round bytes up to the alignment of experts."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class CpuMailbox(NamedTuple):
    """Memory through which GPU kernels hand missing experts to CPU threads instead of fetching them.

    request, done  [1]       int32, numbers of the last request and of the last answer
    header         [2]       int32, layer and number of pairs of a request
    tokens, experts[P]       int32, of each pair
    x              [T, H]    bf16
    result         [P, H]    float32, of each pair
    state          [3 + P]   int32 on the GPU: number of the last request, its pairs, number of the last answer seen, and each
                             pair's place in the step's ids
    fetched        [P + 1]   float32 on the GPU: how many of n missing experts are fetched, on average; the others go to the CPU

    All but the last two are in pinned host memory. `auraflux.weights.experts.cpu_worker` has the protocol.
    """

    request: Tensor
    done: Tensor
    header: Tensor
    tokens: Tensor
    experts: Tensor
    x: Tensor
    result: Tensor
    state: Tensor
    fetched: Tensor


@dataclass(frozen=True, eq=False)
class DiskMailbox:
    """Memory through which GPU kernels ask for experts that are on disk.

    request  [1]     int32, number of the last request
    header   [4]     int32, layer and number of experts of a request; 1 if it is of a prefill stream; one word of the readers
    experts  [E]     int32, those of a request, each once
    answers  [E]     int64, experts in the order in which they arrive: number of the request (31 bits), expert (10) and
                     slot + 1 (22); a slot of 0 says that an expert cannot be read
    late     [1]     int32, set by a kernel that waited too long
    slots    [S, size]  uint8, host memory
    arrived  [E]     int64 on the GPU: answers + 1 that all programs of a kernel see; 0 between kernels
    failed   [1]     int64 on the GPU: an expert could not be read, so kernels ask for no more
    patience [1]     int64 on the GPU: nanoseconds after which a kernel stops waiting

    All but the last three are in pinned host memory. `read_loop.py` has the protocol.
    """

    request: Tensor
    header: Tensor
    experts: Tensor
    answers: Tensor
    late: Tensor
    slots: Tensor
    arrived: Tensor
    failed: Tensor
    patience: Tensor

    def __post_init__(self) -> None:
        check_fields(self)
        dtypes = {"answers": torch.int64, "slots": torch.uint8, **dict.fromkeys(("arrived", "failed", "patience"), torch.int64)}
        for name, tensor in vars(self).items():
            if isinstance(tensor, Tensor):
                check_dtype(name, tensor, dtypes.get(name, torch.int32))
                check_shape(name, tensor, *(None,) * (2 if name == "slots" else 1))


@runtime_checkable
class DiskExperts(Protocol):
    """Experts on disk behind a cache in host memory.

    mailbox  for kernels
    """

    @property
    def mailbox(self) -> DiskMailbox: ...

    def read(self, layer: int, experts: list[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield experts as they arrive in host memory, with their bytes; those that cannot be read are left out."""


@runtime_checkable
class SideCopies(Protocol):
    """Copies of experts on another stream than the kernels'."""

    def before_fetch(self) -> bool:
        """Make later kernels wait for the copies, which change the tables; return whether there are any."""

    def after_fetch(self) -> None:
        """Start copies, after the kernels that were launched."""


@dataclass(frozen=True, eq=False)
class ExpertPool:
    """Experts of L layers, E each, in S slots.

    memory      [S, size]  uint8, one expert a slot
    slots       [L, E]     int32, the slot of each expert; -1 if it is not cached
    owners      [S]        int32, layer * E + expert of each slot; -1 if it is free
    uses        [S]        float32, log2 of each slot's decayed use count
    state       [7]        int64: tokens times layers so far, hits, fetched misses, a counter that kernels reset, misses that
                           the CPU computed, experts that were prefetched, and those of them that were used
    prefetched  [L]        int32, the expert that was prefetched for each layer's next step, or -1
    trust       [L]        float32, the share of a layer's prefetched experts that were used lately
    host        [N]        uint8 in host memory, pinned where the pool is on a GPU
    offsets     [L, E]     int64, the first byte of each expert in `host`
    like        one expert's matrices and biases for each layer, for shapes and formats
    activation  of the experts, or None for silu
    mailbox     of CPU threads that compute experts of few tokens; None if all missing experts are fetched
    disk        experts on disk; `host` then has a cache of them, and `offsets` are not used
    side_copies copies on another stream; None without any
    """

    memory: Tensor
    slots: Tensor
    owners: Tensor
    uses: Tensor
    state: Tensor
    prefetched: Tensor
    trust: Tensor
    host: Tensor
    offsets: Tensor
    like: list[dict[str, Stack]]
    activation: Activation | None = None
    mailbox: CpuMailbox | None = None
    disk: DiskExperts | None = None
    side_copies: "SideCopies | None" = None

    def __post_init__(self) -> None:
        check_fields(self)
        check_shape("memory", self.memory, None, None)
        check_shape("slots", self.slots, None, None)
        check_shape("host", self.host, None)
        (slots, size), (layers, experts) = self.memory.shape, self.slots.shape
        if max(self.nbytes) > size or size % ALIGNMENT:
            raise FormatError(f"slots of {size} bytes are no multiple of {ALIGNMENT}, or smaller than an expert.")
        dtypes = {"uses": torch.float32, "state": torch.int64, "offsets": torch.int64, "slots": torch.int32}
        dtypes |= {
            "owners": torch.int32,
            "memory": torch.uint8,
            "host": torch.uint8,
            "prefetched": torch.int32,
            "trust": torch.float32,
        }
        for name, dtype in dtypes.items():
            check_dtype(name, getattr(self, name), dtype)
        wanted = {"owners": (slots,), "uses": (slots,), "state": (7,), "offsets": (layers, experts)}
        wanted |= {"prefetched": (layers,), "trust": (layers,)}
        for name, shape in wanted.items():
            if tuple(getattr(self, name).shape) != shape:
                raise FormatError(f"'{name}' has shape {list(getattr(self, name).shape)}; {list(shape)} is needed.")

    @classmethod
    def empty(
        cls,
        memory: Tensor,
        host: Tensor,
        offsets: Tensor,
        like: list[dict[str, Stack]],
        activation: Activation | None = None,
    ) -> "ExpertPool":
        """Return a pool without cached experts."""
        device, slots, shape = memory.device, memory.shape[0], offsets.shape
        return cls(
            memory,
            torch.full(shape, -1, dtype=torch.int32, device=device),
            torch.full((slots,), -1, dtype=torch.int32, device=device),
            torch.full((slots,), NEVER_USED, dtype=torch.float32, device=device),
            torch.zeros(7, dtype=torch.int64, device=device),
            torch.full(shape[:1], -1, dtype=torch.int32, device=device),
            torch.ones(shape[:1], device=device),
            host,
            offsets,
            like,
            activation,
        )

    @cached_property
    def nbytes(self) -> list[int]:
        """Bytes of an expert of each layer, a multiple of ALIGNMENT."""
        return [aligned(blob_nbytes(like)) for like in self.like]

    @cached_property
    def layers(self) -> list[Experts]:
        """The experts of each layer, as stacks over the slots."""
        return [self.experts_in(slots, layer) for layer, slots in enumerate(self.slots)]

    def experts_in(self, slots: Tensor, layer: int) -> Experts:
        """Return the experts of a layer that are in the given slots, [E]."""
        made = Experts.from_blobs(self.memory, self.like[layer])
        return replace(made, slots=slots) if self.activation is None else replace(made, slots=slots, activation=self.activation)

    @property
    def half_life(self) -> float:
        """Half-life of uses, in the unit of the clock."""
        return float(HALF_LIFE_TOKENS * self.slots.shape[0])


def check_fetch(ids: Tensor, pool: ExpertPool, layer: int) -> None:
    """Refuse arguments of `fetch_experts` that do not fit the pool."""
    check_dense(ids=ids)
    check_dtype("ids", ids, torch.int32)
    check_shape("ids", ids, None, None)
    layers, experts = pool.slots.shape
    if not 0 <= layer < layers:
        raise InputError(f"layer {layer} was requested of a pool of {layers}.")
    most = min(ids.numel(), experts)
    if most > len(pool.memory):
        raise InputError(f"{most} experts may be needed at once; the pool has {len(pool.memory)} slots.")


@op(check=check_fetch)
def fetch_experts(ids: Tensor, pool: ExpertPool, layer: int) -> Tensor:
    """Bring the experts of a step into slots of the pool, evicting others where none is free, and return their slots.

    ids      [T, k]  int32, experts of `layer`; negative ids are skipped
    returns  [T, k]  int32, -1 where the id is negative
    """
    experts = pool.slots.shape[1]
    used, counts = ids[(ids >= 0) & (ids < experts)].unique(return_counts=True)
    now = int(pool.state[CLOCK]) / pool.half_life
    cached = pool.slots[layer, used.long()]
    sources = _in_host_memory(pool, layer, used[cached < 0].tolist())
    costs = torch.where(pool.owners < 0, -torch.inf, pool.uses)
    costs[cached[cached >= 0].long()] = torch.inf
    for expert, count in zip(used.tolist(), counts.tolist(), strict=True):
        slot, new = int(pool.slots[layer, expert]), now + math.log2(count)
        if slot < 0:
            if expert not in sources:
                # it cannot be read from disk
                continue
            slot = int(costs.argmin())
            costs[slot] = torch.inf
            place_expert(pool, layer, expert, slot, sources[expert])
            pool.uses[slot] = new
        else:
            old = float(pool.uses[slot])
            pool.uses[slot] = max(old, new) + math.log2(1 + 2 ** -abs(old - new))
    misses, right = int((cached < 0).sum()), _update_trust(pool, layer, used.tolist())
    pool.state.add_(torch.tensor([len(ids), len(used) - misses, misses, 0, 0, 0, right], device=pool.state.device))
    found = torch.where(ids < experts, pool.slots[layer][ids.clamp(0, experts - 1).long()], len(pool.memory))
    return torch.where(ids < 0, -1, found).int()


def _update_trust(pool: ExpertPool, layer: int, used: list[int]) -> bool:
    """Update a layer's trust by the expert that was prefetched for a step, and return whether the step uses it."""
    predicted = int(pool.prefetched[layer])
    if predicted >= 0:
        pool.trust[layer] += FORGET * (float(predicted in used) - pool.trust[layer])
        pool.prefetched[layer] = -1
    return predicted in used


def _in_host_memory(pool: ExpertPool, layer: int, experts: list[int]) -> dict[int, Tensor]:
    """Return the bytes of experts in host memory, after they have been read from disk if necessary."""
    nbytes = pool.nbytes[layer]
    if pool.disk is not None:
        return {expert: row[:nbytes] for expert, row in pool.disk.read(layer, experts)} if experts else {}
    firsts = [int(pool.offsets[layer, expert]) for expert in experts]
    return {expert: pool.host[first : first + nbytes] for expert, first in zip(experts, firsts, strict=True)}


def place_expert(pool: ExpertPool, layer: int, expert: int, slot: int, source: Tensor) -> None:
    """Copy an expert into a slot and update the tables."""
    evicted, experts = int(pool.owners[slot]), pool.slots.shape[1]
    if evicted >= 0:
        pool.slots[evicted // experts, evicted % experts] = -1
    pool.memory[slot, : len(source)] = source.to(pool.memory.device)
    pool.slots[layer, expert], pool.owners[slot] = slot, layer * experts + expert
