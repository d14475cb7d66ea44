"""Experts of a layer of which each rank has some: every rank runs its own over all tokens, and the results are added up.

All ranks have all tokens, so that only sums travel: one row per token and layer from each rank to each other. They are added
in the order of the ranks, so that a result can be had again.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from auraflux.ops import combine, route
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.balanced import Balance
from auraflux.weights.placement import Placement
from auraflux.weights.slices import Slices
from auraflux.weights.streamed import Guess, LayerExperts, Mix


@dataclass(frozen=True)
class Division:
    """Which of every layer's experts a rank has.

    placement  says which, see `placement.py`
    join       adds up what all ranks have found: [T, H] -> [T, H]
    balance    deals out what is read from disk as it is chosen, see `balanced.py`; None where each rank has its own
    """

    placement: Placement
    join: Callable[[Tensor], Tensor]
    balance: Balance | None = None


def by_expert(slices: Slices) -> Division:
    """Whole experts to ranks that have heads and columns of all else: what they give is joined with that."""
    return Division(Placement(slices.rank, slices.size), alone_sum)


def alone_sum(mine: Tensor) -> Tensor:
    """Leave a part as it is: it is joined with others later."""
    return mine


class Some(Protocol):
    """Experts that are asked for some of every token's."""

    def announce(self, guess: Guess | None) -> None: ...

    def fetch(self, ids: Tensor) -> None:
        """Begin to read what the next call will ask for: [T, k]."""

    def some(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum the experts of each token that are not negative: [T, H] float32."""


# brings experts to the places of others, and says where each is then
Move = Callable[[Sequence[int], Sequence[int]], Sequence[int]]


def unmoved(experts: Sequence[int], places: Sequence[int]) -> Sequence[int]:
    """Nothing: all experts can be had here, each under its number."""
    return experts


class Divided:
    """A rank's experts of one layer, which `Placement` may exchange for others between steps.

    move  brings others; by default all can be had, and are asked for by their numbers
    """

    def __init__(
        self,
        experts: Some,
        division: Division,
        name: str,
        count: int,
        device: torch.device,
        move: Move = unmoved,
    ):
        self.experts, self.join, self._move = experts, division.join, move
        share = division.placement.share(name, count)
        # kernels that were recorded refer to it
        self._places = torch.full((count,), -1, dtype=torch.int32, device=device)
        self._put(share, share if move is unmoved else range(len(share)))
        self._uses, self._one = (
            torch.zeros(count, dtype=torch.int64, device=device),
            torch.ones((), dtype=torch.int64, device=device),
        )
        division.placement.layers[name] = self

    def _put(self, experts: Sequence[int], places: Sequence[int]) -> None:
        self._places[list(experts)] = torch.tensor(list(places), dtype=torch.int32, device=self._places.device)

    @property
    def counted(self) -> list[int]:
        """How often each expert of the layer was chosen, here and elsewhere, in steps that are not replayed."""
        return self._uses.tolist()

    def begin_count(self) -> None:
        """Count from none again."""
        self._uses.zero_()

    def take(self, share: Sequence[int]) -> None:
        """Have these experts, instead of those that are here; all of it or, if that raises, nothing."""
        places = self._places.tolist()
        gained = [expert for expert in share if places[expert] < 0]
        lost = [expert for expert, place in enumerate(places) if place >= 0 and expert not in set(share)]
        if not gained:
            return
        put = self._move(gained, [places[expert] for expert in lost])
        self._put(lost, [-1] * len(lost))
        self._put(gained, put)

    def announce(self, guess: Guess | None) -> None:
        """Say how to guess what the next mixture will ask for; None if there is none."""
        self.experts.announce(None if guess is None else lambda residual: self._mine(guess(residual)))

    def mix(self, tokens: Mix) -> Tensor:
        """Choose every token's experts and add what they give, here and elsewhere, to the residual stream: [T, H]."""
        ids, weights = route(tokens.scores, tokens.routing, tokens.bias)
        mine = self._mine(ids)
        self.experts.fetch(mine)
        self._count(ids)
        shared = shared_result(tokens.x, tokens.shared)
        return combine(tokens.residual, self._sum(tokens.x, mine, weights), shared, tokens.gate)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        self._count(ids)
        return self._sum(x, self._mine(ids), weights)

    def _sum(self, x: Tensor, mine: Tensor, weights: Tensor) -> Tensor:
        return self.join(self.experts.some(x, mine, weights)).to(x.dtype)

    def _mine(self, ids: Tensor) -> Tensor:
        """Where experts that are here lie, and -1 for the others."""
        return self._places.index_select(0, ids.flatten()).view(ids.shape)

    def _count(self, ids: Tensor) -> None:
        # a graph would launch it in every step of decoding; prompts tell as much
        if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
            self._uses.index_add_(0, ids.flatten(), self._one.expand(ids.numel()))


@dataclass(frozen=True, eq=False)
class Joined:
    """Experts of which ranks have some columns each, or some experts, beside columns of the MLP that all tokens go to."""

    experts: LayerExperts
    join: Callable[[Tensor], Tensor]

    def announce(self, guess: Guess | None) -> None:
        """Say how to guess what the next mixture will ask for; None if there is none."""
        self.experts.announce(guess)

    def mix(self, tokens: Mix) -> Tensor:
        """Choose every token's experts and add what they give, here and elsewhere, to the residual stream: [T, H]."""
        mine = self.experts.mix(replace(tokens, residual=torch.zeros_like(tokens.residual)))
        return combine(tokens.residual, self.join(mine))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        return self.join(self.experts(x, ids, weights))
