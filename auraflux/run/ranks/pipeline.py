"""A pipeline: each rank has consecutive layers, and one row of numbers per token goes from each to the next.

The last rank gives its rows to rank 0, which has the last norm and the head beside the embedding: a row is much shorter than
scores of all tokens, and a matrix that is embedding and head at once is held once. A piece of a prompt that nobody asks
anything about is not waited for: while the others are at it, rank 0 reads the next.
"""

from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.cache.journal import Journal, Mirror, facts_of
from auraflux.ops import exact
from auraflux.run.graph import Replayer
from auraflux.run.ranks.group import Expected, Group
from auraflux.run.runner import Runner


class PipelineRunner(Runner):
    """Rank 0's layers, and then those of the others."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group):
        super().__init__(model, cache, exact)
        self.part, self.group, self.journal = model, group, Journal(cache)
        # rows that are on their way to nobody, since a step was interrupted
        self._unread: list[Expected] = []

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens for which there is room: the final hidden states [T, H]; none of a silent batch."""
        return self._hidden(self.repeated(flat, batch), batch)

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """Run the layers that are here: [T, H]."""
        self.group.check()
        with exact(self.exact):
            return self.part.part(given, batch, self.cache)

    def after(self, found: Tensor, batch: Batch) -> Tensor:
        """Let the others go on with what was found here: the scores [B, V]."""
        return self.score(self._hidden(found, batch))

    def _hidden(self, rows: Tensor, batch: Batch) -> Tensor:
        while self._unread:
            self._unread[0].wait()
            del self._unread[0]
        try:
            if not batch.silent:
                self._unread.append(self.group.expect(*rows.shape, source=self.group.size - 1))
            self.group.say({"journal": self.journal.take(), "batch": facts_of(batch)}, 1)
            self.group.send(rows, 1)
        except BaseException:
            self.group.break_up("a step was broken off while it was passed on.")
            raise
        if batch.silent:
            return torch.empty(0)
        found = self._unread[0].wait()
        del self._unread[0]
        with exact(self.exact):
            return self.part.normed(found)

    def renew(self, group: Group) -> None:
        """Go on with another group, whose caches are empty."""
        self.group, self._unread = group, []
        self.journal.take()


class StageRunner(Runner):
    """The layers of a rank that follows, as a `Replayer` runs them."""

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, H]."""
        with exact(self.exact):
            return self.model.part(given, batch, self.cache)  # type: ignore[attr-defined]


class Stage:
    """Takes steps as rank 0 tells."""

    def __init__(self, model: Any, cache: Cache, exact: bool, graphs: bool, group: Group):
        self.group, self.mirror = group, Mirror(cache)
        self.width = model.config.hidden
        self.runner = StageRunner(model, cache, exact)
        self.replayer = Replayer(self.runner, graphs)

    def follow(self) -> None:
        """Take steps until rank 0 ends."""
        group, last = self.group, self.group.rank == self.group.size - 1
        for told in group.notes(group.rank - 1):
            if "end" in told:
                if not last:
                    group.say(told, group.rank + 1)
                return
            rows = group.receive(sum(told["batch"]["counts"]), self.width, source=group.rank - 1)
            found = self._step(told, rows)
            if not last:
                group.say(told, group.rank + 1)
                group.send(found, group.rank + 1)
            elif not told["batch"]["silent"]:
                group.send(found, 0)

    def _step(self, told: dict[str, Any], rows: Tensor) -> Tensor:
        self.mirror.repeat(told["journal"])
        batch = self.mirror.batch(told["batch"])
        if batch.single and not batch.silent:
            return self.replayer.repeat(batch, rows)
        return self.runner.repeated(rows, batch)


class Passing:
    """Some layers of a model and those before and after them, all ranks in step: what a calibration runs."""

    def __init__(self, model: Any, group: Group):
        self.config, self.layers, self.span = model.config, model.layers, model.span
        self._model, self._group = model, group

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run tokens through the layers that are here: [T, H], of no use to anybody."""
        group = self._group
        given = ids if group.rank == 0 else group.receive(len(ids), self.config.hidden, source=group.rank - 1)
        found = self._model.part(given, batch, cache)
        if group.rank < group.size - 1:
            group.send(found, group.rank + 1)
        return found
