"""Ranks that have all layers and take every step together: they meet within it, where each has a part.

That is some of every layer's experts, whose sums are added up: two machines with a disk each read two experts at a time, and
hold twice as many. Or it is some pages of every sequence, and what is found there is joined: two machines hold a context that
neither has room for. Or it is some heads and columns of every layer, for GPUs of one machine that read their parts of the
weights at the same time. All else is computed by all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.cache.journal import Journal, Mirror, facts_of
from auraflux.run.device import sent
from auraflux.run.ranks.group import Group
from auraflux.run.runner import Runner


class WholeRunner(Runner):
    """Rank 0: it tells the others of every step, and takes it with them."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group):
        super().__init__(model, cache, exact)
        self.group, self.journal = group, Journal(cache)

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens for which there is room: the final hidden states [T, H]; none of a silent batch."""
        self.group.check()
        try:
            self.group.say_all({"journal": self.journal.take(), "batch": facts_of(batch), "ids": flat.tolist()})
            return super().forward(flat, batch)
        except BaseException:
            # the others wait in the middle of the step, and there is no way to call them back
            self.group.break_up("a step was broken off, and the ranks are no longer at the same place.")
            raise

    def score(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        found = super().score(hidden)
        if found.is_cuda:
            # a GPU goes on with whatever is there when a rank that it waited for is given up
            torch.cuda.synchronize(found.device)
            self.group.check()
        return found

    def renew(self, group: Group) -> None:
        """Go on with another group, whose caches are empty."""
        self.group = group
        self.journal.take()


class WholeRank:
    """Takes steps as rank 0 tells.

    read_nbytes  tells how much of experts was read here
    """

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, read_nbytes: Callable[[], int]):
        self._read_nbytes = read_nbytes
        self.runner, self.group, self.mirror = Runner(model, cache, exact), group, Mirror(cache)

    def follow(self) -> None:
        """Take steps until rank 0 ends."""
        for told in self.group.notes(0):
            if "end" in told:
                return
            if "read" in told:
                self.group.say({"nbytes": self._read_nbytes()}, 0)
                continue
            self.mirror.repeat(told["journal"])
            self.runner.forward(sent(told["ids"], self.runner.device), self.mirror.batch(told["batch"]))
