"""Balanced expert parallelism for offloaded experts, which every rank can read from its own disk.

In every step the rank that has an expert cached runs it, and uncached experts are assigned evenly, so that all disks read the
same amount whichever experts a token chooses. Ranks exchange the output rows of experts, not sums, and each rank sums a token's
rows in the order of its ids: the result is bitwise that of one process. With many tokens each rank sums some of them, and the
sums are gathered, so that fewer rows are sent.

Each exchange also carries which experts a rank has cached of this layer and the next. All ranks thus compute the same
assignment without further messages; a rank that has evicted an expert since then reads it again.
"""

import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from auraflux.errors import RankError
from auraflux.ops import combine, route, sum_parts
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.experts.offloaded import PREDICTED_TOKENS, OffloadedExperts
from auraflux.weights.experts.resident import ExpertPredictor, MixtureInput

DIGEST = struct.Struct("<I")
MIN_SHARDED_TOKENS = 64  # from here on, sending all rows takes longer than a second exchange


class RankGroup(Protocol):
    """Ranks of one model.

    number  of the group; it changes when the group is formed again
    """

    number: int

    def all_to_all(self, mine: Sequence[Tensor], nbytes: Sequence[int], most: int) -> list[Tensor]:
        """Return the bytes that each rank sends to this one, `nbytes` of each; none sends more than `most`."""


class ExpertBalancer:
    """Assignment of experts to ranks, computed identically on every rank from the exchanged cache contents.

    group  returns the current group
    """

    def __init__(self, rank: int, size: int, group: Callable[[], RankGroup]):
        self.rank, self.size, self._group = rank, size, group
        self.layers: list[BalancedExperts] = []
        self._reset(None)

    def _reset(self, number: int | None) -> None:
        self._number = number
        self._cached: dict[int, list[int]] = {}
        self._total_reads = [0] * self.size

    def assign(self, layer: int, experts: Iterable[int]) -> tuple[dict[int, int], list[int]]:
        """Assign each expert to a rank that has it cached, else to the one with the fewest reads; return reads per rank too."""
        if (number := self._group().number) != self._number:
            # a rank that has just joined knows nothing of earlier exchanges
            self._reset(number)
        ranks, cached = range(self.size), self._cached.get(layer, [0] * self.size)
        found: dict[int, int] = {}
        hits, reads = [0] * self.size, [0] * self.size
        for expert in dict.fromkeys(experts):
            holders = [rank for rank in ranks if cached[rank] >> expert & 1]
            if holders:
                rank = min(holders, key=hits.__getitem__)
                hits[rank] += 1
            else:
                rank = min(ranks, key=lambda rank: (reads[rank], self._total_reads[rank]))
                reads[rank] += 1
                self._total_reads[rank] += 1
            found[expert] = rank
        return found, reads

    def prefetch_share(self, layer: int, reads: list[int], experts: Iterable[int]) -> list[int]:
        """Return the experts of another layer that this rank may prefetch while other ranks still read.

        experts  predicted ones; only those that no rank has cached are returned
        """
        cached = self._cached.get(layer, [0] * self.size)
        missing = [expert for expert in dict.fromkeys(experts) if not any(mask >> expert & 1 for mask in cached)]
        idle = [max(reads) - count for count in reads]
        first = sum(idle[: self.rank])
        return missing[first : first + idle[self.rank]]

    def exchange(self, layer: int, digest: int, rows: list[int], most: int, mine: list[Tensor]) -> list[Tensor]:
        """Exchange expert outputs and cache contents; return the rows from each rank: [n, H].

        digest  of the step's expert ids, which must be the same on all ranks
        rows    number of rows from each rank
        most    rows that any rank sends
        mine    rows for each rank
        """
        around = [layer, (layer + 1) % len(self.layers)]
        masks = [self.layers[number].cached_mask() for number in around]
        widths = [-(-self.layers[number].experts.file.count // 8) for number in around]
        header = DIGEST.pack(digest) + b"".join(mask.to_bytes(n, "little") for mask, n in zip(masks, widths, strict=True))
        # rows start at a multiple of their element size
        head, width = -(-len(header) // 4) * 4, 4 * mine[0].shape[1]
        first = torch.frombuffer(bytearray(header.ljust(head, b"\0")), dtype=torch.uint8)
        sizes = [head + count * width for count in rows]
        messages = [torch.cat([first, each.view(torch.uint8).flatten()]) for each in mine]
        received = self._group().all_to_all(messages, sizes, head + most * width)
        headers = [bytes(each[:head].numpy()) for each in received]
        if any(DIGEST.unpack_from(each) != (digest,) for each in headers):
            raise RankError(
                "ranks have chosen different experts for the same tokens: their processors round differently. "
                "Give --expert-balance off."
            )
        at = DIGEST.size
        for number, n in zip(around, widths, strict=True):
            self._cached[number] = [int.from_bytes(each[at : at + n], "little") for each in headers]
            at += n
        return [each[head:].view(torch.float32).view(-1, mine[0].shape[1]) for each in received]

    def token_ranges(self, tokens: int) -> list[range]:
        """Return the tokens that each rank sums: all of a few, which needs no gather, a shard of many."""
        if tokens < MIN_SHARDED_TOKENS:
            return [range(tokens)] * self.size
        return [range(rank * tokens // self.size, (rank + 1) * tokens // self.size) for rank in range(self.size)]

    def all_gather(self, mine: Tensor, ranges: list[range]) -> Tensor:
        """Gather the sums of all tokens from the ranks: [T, H]."""
        width = mine.shape[1] * mine.element_size()
        data, sizes = mine.contiguous().view(torch.uint8).flatten(), [len(tokens) * width for tokens in ranges]
        received = self._group().all_to_all([data] * self.size, sizes, max(sizes))
        return torch.cat(received).view(mine.dtype).view(-1, mine.shape[1])


@dataclass(frozen=True, eq=False)
class StepAssignment:
    """Assignment of a step's experts to ranks.

    ids        [T, k]  of all experts
    ranks      [T, k]  that run them
    local_ids  [T, k]  experts of this rank, and -1 for the others
    reads      number of experts that each rank reads
    """

    ids: Tensor
    ranks: Tensor
    local_ids: Tensor
    reads: list[int]


class BalancedExperts:
    """Offloaded experts of one layer, assigned to ranks in every step. Create layers in the order in which they run."""

    def __init__(self, experts: OffloadedExperts, balancer: ExpertBalancer):
        self.experts, self.balancer, self.number = experts, balancer, len(balancer.layers)
        self._predictor: ExpertPredictor | None = None
        # the last assignment of this rank does not predict the next
        experts.policy = replace(experts.policy, prefetch_last=False)
        balancer.layers.append(self)

    def cached_mask(self) -> int:
        """Return the cached experts, and those being loaded, as a bit mask."""
        return sum(1 << expert for expert in self.experts.cached_experts())

    def prefetch_with(self, predictor: ExpertPredictor | None) -> None:
        """Set the predictor of the next mixture's experts; None if there is no next mixture."""
        following, self._predictor = self.number + 1, predictor
        self.experts.prefetch_with(
            None if predictor is None else lambda residual: self._assign(following, predictor(residual)).local_ids
        )

    def forward(self, inputs: MixtureInput) -> Tensor:
        """Route tokens, run their experts on all ranks and add the result to the residual stream: [T, H]."""
        ids, weights = route(inputs.scores, inputs.routing, inputs.bias)
        assignment = self._assign(self.number, ids)
        self.experts.fetch(assignment.local_ids)
        self._prefetch(assignment, inputs.residual)
        shared = shared_result(inputs.x, inputs.shared)
        return combine(inputs.residual, self._sum(inputs.x, assignment, weights), shared, inputs.gate)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        return self._sum(x, self._assign(self.number, ids), weights)

    def _prefetch(self, assignment: StepAssignment, residual: Tensor) -> None:
        """Prefetch predicted experts of the next layer: all with `prefetch_predicted`, else while this disk is idle."""
        self.experts.prefetch_predicted(residual)
        here, most = assignment.reads[self.balancer.rank], max(assignment.reads)
        predicted = self.experts.policy.prefetch_predicted
        if self._predictor is None or predicted or here == most or len(residual) > PREDICTED_TOKENS:
            return
        experts, following = self._predictor(residual).flatten().tolist(), self.number + 1
        share = self.balancer.prefetch_share(following, assignment.reads, experts)
        self.balancer.layers[following].experts.prefetch(share)

    def _assign(self, layer: int, ids: Tensor) -> StepAssignment:
        owners, reads = self.balancer.assign(layer, ids.flatten().tolist())
        table = torch.full((self.experts.file.count,), -1, dtype=torch.int32)
        table[list(owners)] = torch.tensor(list(owners.values()), dtype=torch.int32)
        ranks = table[ids.long()]
        return StepAssignment(ids, ranks, torch.where(ranks == self.balancer.rank, ids, -1).int(), reads)

    def _sum(self, x: Tensor, assignment: StepAssignment, weights: Tensor) -> Tensor:
        parts = x.new_empty(*assignment.ids.shape, x.shape[1], dtype=torch.float32)
        self.experts.run_experts(x, assignment.local_ids, parts)
        balancer, here, k = self.balancer, self.balancer.rank, assignment.ids.shape[1]
        rows, ranks, ranges = parts.view(-1, x.shape[1]), assignment.ranks.flatten(), balancer.token_ranges(len(x))

        def rows_of(rank: int, tokens: range) -> Tensor:
            """Return the indices of the rows that a rank computes for some tokens."""
            return (ranks[tokens.start * k : tokens.stop * k] == rank).nonzero().flatten() + tokens.start * k

        expected = [rows_of(rank, ranges[here]) for rank in range(balancer.size)]
        digest, most = zlib.crc32(assignment.ids.contiguous().numpy().data), max(map(len, ranges)) * k
        mine = [rows[rows_of(here, tokens)] for tokens in ranges]
        received = balancer.exchange(self.number, digest, list(map(len, expected)), most, mine)
        for rank, indices in enumerate(expected):
            if rank != here:
                rows[indices] = received[rank]
        own = slice(ranges[here].start, ranges[here].stop)
        total = sum_parts(parts[own], weights[own], x.dtype)
        return total if len(total) == len(x) else balancer.all_gather(total, ranges)
