"""Ranks that have all layers and take every step together: they meet within it, where each has a part.

That is some of every layer's experts, whose sums are added up: two machines with a disk each read two experts at a time, and
hold twice as many. Or it is some pages of every sequence, and what is found there is joined: two machines hold a context that
neither has room for. Or it is some heads and columns of every layer, for GPUs of one machine that read their parts of the
weights at the same time. All else is computed by all.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.cache.journal import Journal, Mirror, facts_of
from auraflux.run.device import sent
from auraflux.run.graph import Replayer
from auraflux.run.ranks.answers import Answers
from auraflux.run.ranks.group import Group
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.rank_runner import RankRunner


class WholeRunner(RankRunner):
    """Rank 0: it tells the others of every step, and takes it with them."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh):
        super().__init__(model, cache, exact, group, mesh)
        self.journal = Journal(cache)

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens for which there is room: the final hidden states [T, H]; none of a silent batch."""
        with self._told(flat, batch, repeated=False):
            return super().forward(flat, batch)

    def telling(self, ids: Tensor, batch: Batch) -> AbstractContextManager[None]:
        """Let others know of a step that is repeated inside the block."""
        return self._told(ids, batch, repeated=True)

    @contextmanager
    def _told(self, ids: Tensor, batch: Batch, repeated: bool) -> Iterator[None]:
        self.group.check()
        try:
            told = {"journal": self.journal.take(), "batch": facts_of(batch), "ids": ids.tolist(), "repeated": repeated}
            self.group.say_all(told)
            yield
        except BaseException:
            # the others wait in the middle of the step, and there is no way to call them back
            self.group.break_up("a step was broken off, and the ranks are no longer at the same place.")
            raise

    def score(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, V] float32."""
        return self._settled(super().score(hidden))

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """The part of a step of decoding that can be recorded, which others were told of: the scores [B, V]."""
        return super().score(super().forward(given, batch))

    def after(self, found: Tensor, batch: Batch) -> Tensor:
        """Make scores of what was recorded."""
        return self._settled(found)

    def _settled(self, scores: Tensor) -> Tensor:
        if scores.is_cuda:
            # a GPU goes on with whatever is there when a rank that it waited for is given up
            torch.cuda.synchronize(scores.device)
            self.group.check()
        return scores

    def renew(self, group: Group) -> None:
        """Go on with another group, whose caches are empty."""
        self.group = group
        self.journal.take()


class FollowingRunner(RankRunner):
    """A rank that follows: nobody asks it for scores."""

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """The final hidden states, [T, H]."""
        return self.forward(given, batch)


class WholeRank:
    """Takes steps as rank 0 tells, and answers what it asks."""

    def __init__(self, runner: FollowingRunner, graphs: bool, answers: Answers):
        self.runner, self.group, self._answers = runner, runner.group, answers
        self.mirror, self.replayer = Mirror(runner.cache), Replayer(runner, graphs)

    def follow(self) -> None:
        """Take steps until rank 0 ends."""
        for told in self.group.notes(0):
            if "end" in told:
                return
            if "batch" not in told:
                self._answers.give(told, self.replayer.refused)
                continue
            self.mirror.repeat(told["journal"])
            ids, batch = sent(told["ids"], self.runner.device), self.mirror.batch(told["batch"])
            (self.replayer.repeat if told["repeated"] else self._forward)(batch, ids)

    def _forward(self, batch: Batch, ids: Tensor) -> None:
        self.runner.forward(ids, batch)
