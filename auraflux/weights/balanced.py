"""Experts of a layer that every rank's disk has: whoever holds one runs it, and all others are dealt out evenly.

Two disks then read as much as each other, whichever experts a token chooses. Not sums but every expert's row goes from the rank
that ran it to the others, and each adds a token's rows in the order of its slots: the bits of one process, whoever ran what.
Of many tokens each rank adds up a share, and the sums travel then, so that fewer rows have to.

With its rows a rank sends which experts it has of this mixture and of the next. So all ranks know that without a message of
its own, and deal alike; who has forgotten an expert meanwhile reads it again.
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
from auraflux.weights.streamed import GUESSED, Guess, Mix, Streamed

DIGEST = struct.Struct("<I")
MANY = 64  # tokens whose rows take longer to send than a second message does


class Meeting(Protocol):
    """The ranks of one model.

    number  of the group; another after it was lost and came back
    """

    number: int

    def swap(self, mine: Sequence[Tensor], nbytes: Sequence[int], most: int) -> list[Tensor]:
        """Octets that all ranks give to this one, so many each, in their order; none gives more than `most`."""


class Balance:
    """Who runs which experts: every rank finds the same, from what all have told.

    meeting  the group as it is now
    """

    def __init__(self, rank: int, size: int, meeting: Callable[[], Meeting]):
        self.rank, self.size, self._meeting = rank, size, meeting
        self.layers: list[Balanced] = []
        self._begin(None)

    def _begin(self, number: int | None) -> None:
        self._number = number
        self._held: dict[int, list[int]] = {}
        self._read = [0] * self.size

    def deal(self, layer: int, experts: Iterable[int]) -> tuple[dict[int, int], list[int]]:
        """The ranks that run some experts of a layer: who holds one, else who has least to read; and how many each reads."""
        if (number := self._meeting().number) != self._number:
            # whoever joined knows nothing of what was told before
            self._begin(number)
        ranks, held = range(self.size), self._held.get(layer, [0] * self.size)
        found: dict[int, int] = {}
        running, reading = [0] * self.size, [0] * self.size
        for expert in dict.fromkeys(experts):
            holders = [rank for rank in ranks if held[rank] >> expert & 1]
            if holders:
                rank = min(holders, key=running.__getitem__)
                running[rank] += 1
            else:
                rank = min(ranks, key=lambda rank: (reading[rank], self._read[rank]))
                reading[rank] += 1
                self._read[rank] += 1
            found[expert] = rank
        return found, reading

    def spare(self, layer: int, reading: list[int], experts: Iterable[int]) -> list[int]:
        """Experts that this rank may read of another layer, while others still read and it has nothing to do.

        experts  that are likely to be asked for; those are taken that no rank holds
        """
        held = self._held.get(layer, [0] * self.size)
        missing = [expert for expert in dict.fromkeys(experts) if not any(mask >> expert & 1 for mask in held)]
        idle = [max(reading) - count for count in reading]
        first = sum(idle[: self.rank])
        return missing[first : first + idle[self.rank]]

    def swap(self, layer: int, digest: int, rows: list[int], most: int, mine: list[Tensor]) -> list[Tensor]:
        """Rows [n, H] that all ranks give to this one, so many each; what they hold of this layer and the next is learnt.

        most  rows that any may give
        mine  rows for each rank
        """
        around = [layer, (layer + 1) % len(self.layers)]
        masks = [self.layers[number].held() for number in around]
        widths = [-(-self.layers[number].experts.file.count // 8) for number in around]
        told = DIGEST.pack(digest) + b"".join(mask.to_bytes(n, "little") for mask, n in zip(masks, widths, strict=True))
        # rows begin where numbers may
        head, width = -(-len(told) // 4) * 4, 4 * mine[0].shape[1]
        first = torch.frombuffer(bytearray(told.ljust(head, b"\0")), dtype=torch.uint8)
        sizes = [head + count * width for count in rows]
        whole = [torch.cat([first, each.view(torch.uint8).flatten()]) for each in mine]
        given = self._meeting().swap(whole, sizes, head + most * width)
        heads = [bytes(each[:head].numpy()) for each in given]
        if any(DIGEST.unpack_from(each) != (digest,) for each in heads):
            raise RankError(
                "ranks have chosen different experts for the same tokens: their processors round differently. "
                "Give --expert-balance off."
            )
        at = DIGEST.size
        for number, n in zip(around, widths, strict=True):
            self._held[number] = [int.from_bytes(each[at : at + n], "little") for each in heads]
            at += n
        return [each[head:].view(torch.float32).view(-1, mine[0].shape[1]) for each in given]

    def spans(self, tokens: int) -> list[range]:
        """The tokens that each rank adds up: all of a few, so that all have them at once, a share of many."""
        if tokens < MANY:
            return [range(tokens)] * self.size
        return [range(rank * tokens // self.size, (rank + 1) * tokens // self.size) for rank in range(self.size)]

    def join(self, mine: Tensor, spans: list[range]) -> Tensor:
        """All tokens' sums, of which each rank has its share: [T, H]."""
        width = mine.shape[1] * mine.element_size()
        octets, sizes = mine.contiguous().view(torch.uint8).flatten(), [len(span) * width for span in spans]
        given = self._meeting().swap([octets] * self.size, sizes, max(sizes))
        return torch.cat(given).view(mine.dtype).view(-1, mine.shape[1])


@dataclass(frozen=True, eq=False)
class Turn:
    """Who runs what of some tokens' experts.

    ids     [T, k]  of all
    owners  [T, k]  ranks
    mine    [T, k]  experts that are run here, and -1 for the others
    reading how many experts each rank has to read
    """

    ids: Tensor
    owners: Tensor
    mine: Tensor
    reading: list[int]


class Balanced:
    """The experts of one layer. Layers must be made in the order in which they run."""

    def __init__(self, experts: Streamed, balance: Balance):
        self.experts, self.balance, self.number = experts, balance, len(balance.layers)
        self._guess: Guess | None = None
        # what this rank was dealt last tells nothing of what it is dealt next
        experts.overlap = replace(experts.overlap, ahead=False)
        balance.layers.append(self)

    def held(self) -> int:
        """Experts that are here or on their way, as bits."""
        return sum(1 << expert for expert in self.experts.held())

    def announce(self, guess: Guess | None) -> None:
        """Say how to guess what the next mixture will ask for; None if there is none."""
        following, self._guess = self.number + 1, guess
        self.experts.announce(None if guess is None else lambda residual: self._turn(following, guess(residual)).mine)

    def mix(self, tokens: Mix) -> Tensor:
        """Choose every token's experts and add what they give, here and elsewhere, to the residual stream: [T, H]."""
        ids, weights = route(tokens.scores, tokens.routing, tokens.bias)
        turn = self._turn(self.number, ids)
        self.experts.fetch(turn.mine)
        self._look_ahead(turn, tokens.residual)
        shared = shared_result(tokens.x, tokens.shared)
        return combine(tokens.residual, self._sum(tokens.x, turn, weights), shared, tokens.gate)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        return self._sum(x, self._turn(self.number, ids), weights)

    def _look_ahead(self, turn: Turn, residual: Tensor) -> None:
        """Read what the next mixture is likely to ask for: all of it where that is wanted, else what a disk has time for."""
        self.experts.look_ahead(residual)
        here, most = turn.reading[self.balance.rank], max(turn.reading)
        if self._guess is None or self.experts.overlap.guess or here == most or len(residual) > GUESSED:
            return
        likely, following = self._guess(residual).flatten().tolist(), self.number + 1
        self.balance.layers[following].experts.expect(self.balance.spare(following, turn.reading, likely))

    def _turn(self, layer: int, ids: Tensor) -> Turn:
        owners, reading = self.balance.deal(layer, ids.flatten().tolist())
        ranks = torch.full((self.experts.file.count,), -1, dtype=torch.int32)
        ranks[list(owners)] = torch.tensor(list(owners.values()), dtype=torch.int32)
        whose = ranks[ids.long()]
        return Turn(ids, whose, torch.where(whose == self.balance.rank, ids, -1).int(), reading)

    def _sum(self, x: Tensor, turn: Turn, weights: Tensor) -> Tensor:
        parts = x.new_empty(*turn.ids.shape, x.shape[1], dtype=torch.float32)
        self.experts.fill(x, turn.mine, parts)
        balance, here, k = self.balance, self.balance.rank, turn.ids.shape[1]
        rows, owners, spans = parts.view(-1, x.shape[1]), turn.owners.flatten(), balance.spans(len(x))

        def places(owner: int, span: range) -> Tensor:
            """Where what a rank has found for some tokens belongs."""
            return (owners[span.start * k : span.stop * k] == owner).nonzero().flatten() + span.start * k

        coming = [places(rank, spans[here]) for rank in range(balance.size)]
        digest, most = zlib.crc32(turn.ids.contiguous().numpy().data), max(map(len, spans)) * k
        mine = [rows[places(here, span)] for span in spans]
        found = balance.swap(self.number, digest, list(map(len, coming)), most, mine)
        for rank, place in enumerate(coming):
            if rank != here:
                rows[place] = found[rank]
        own = slice(spans[here].start, spans[here].stop)
        total = sum_parts(parts[own], weights[own], x.dtype)
        return total if len(total) == len(x) else balance.join(total, spans)
