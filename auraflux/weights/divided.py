"""Experts of a layer of which each rank has some: every rank runs its own over all tokens, and the results are added up.

All ranks have all tokens, so that only sums travel: one row per token and layer from each rank to each other. They are added
in the order of the ranks, so that a result can be had again.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from auraflux.ops import combine, route
from auraflux.ops.moe.reference import shared_result
from auraflux.weights.balanced import Balance
from auraflux.weights.slices import Slices
from auraflux.weights.streamed import Guess, LayerExperts, Mix


@dataclass(frozen=True)
class Division:
    """Which of every layer's experts a rank has.

    join     adds up what all ranks have found: [T, H] -> [T, H]
    balance  deals out what is read from disk as it is chosen, see `balanced.py`; None where each rank has its own
    """

    rank: int
    size: int
    join: Callable[[Tensor], Tensor]
    balance: Balance | None = None

    def share(self, count: int) -> range:
        """Of so many experts."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)


def by_expert(slices: Slices) -> Division:
    """Whole experts to ranks that have heads and columns of all else: what they give is joined with that."""
    return Division(slices.rank, slices.size, alone_sum)


def alone_sum(mine: Tensor) -> Tensor:
    """What is joined later."""
    return mine


class Some(Protocol):
    """Experts that are asked for some of every token's."""

    def announce(self, guess: Guess | None) -> None: ...

    def fetch(self, ids: Tensor) -> None:
        """Begin to read what the next call will ask for: [T, k]."""

    def some(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum the experts of each token that are not negative: [T, H] float32."""


@dataclass(frozen=True, eq=False)
class Divided:
    """A rank's experts of one layer.

    share  the experts that are here
    first  the number of the one that `experts` begin with
    """

    experts: Some
    share: range
    first: int
    join: Callable[[Tensor], Tensor]

    def announce(self, guess: Guess | None) -> None:
        """Say how to guess what the next mixture will ask for; None if there is none."""
        self.experts.announce(None if guess is None else lambda residual: self._mine(guess(residual)))

    def mix(self, tokens: Mix) -> Tensor:
        """Choose every token's experts and add what they give, here and elsewhere, to the residual stream: [T, H]."""
        ids, weights = route(tokens.scores, tokens.routing, tokens.bias)
        mine = self._mine(ids)
        self.experts.fetch(mine)
        shared = shared_result(tokens.x, tokens.shared)
        return combine(tokens.residual, self._sum(tokens.x, mine, weights), shared, tokens.gate)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Sum every token's experts: x [T, H], ids and weights [T, k] -> [T, H]."""
        return self._sum(x, self._mine(ids), weights)

    def _sum(self, x: Tensor, mine: Tensor, weights: Tensor) -> Tensor:
        return self.join(self.experts.some(x, mine, weights)).to(x.dtype)

    def _mine(self, ids: Tensor) -> Tensor:
        """Numbers of experts that are here, and -1 for the others."""
        here = (ids >= self.share.start) & (ids < self.share.stop)
        return torch.where(here, ids - self.first, -1).int()


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
