"""A pipeline: each rank has consecutive layers, and one row of numbers per token goes from each to the next.

The last rank gives its rows to rank 0, which has the last norm and the head beside the embedding: a row is much shorter than
scores of all tokens, and a matrix that is embedding and head at once is held once. A piece of a prompt that nobody asks
anything about is not waited for: while the others are at it, rank 0 reads the next.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.cache.journal import Entry, Journal, Mirror, facts_of
from auraflux.ops import exact
from auraflux.run.device import sent
from auraflux.run.graph import Replayer
from auraflux.run.ranks.group import Expected, Group
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.runner import Runner


class PipelineRunner(Runner):
    """Rank 0's layers, and then those of the others."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh):
        super().__init__(model, cache, exact)
        self.part, self.group, self.mesh, self.journal = model, group, mesh, Journal(cache)
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
                self._unread.append(self.group.expect(*rows.shape, source=self.mesh.heads[-1]))
            following = self.mesh.heads[1]
            self.group.say({"journal": self._entries(), "batch": facts_of(batch)}, following)
            self.group.send(rows, following)
        except BaseException:
            self.group.break_up("a step was broken off while it was passed on.")
            raise
        if batch.silent:
            return torch.empty(0)
        found = self._unread[0].wait()
        del self._unread[0]
        with exact(self.exact):
            return self.part.normed(found)

    def _entries(self) -> list[Entry]:
        """What has happened to the cache since the last step."""
        return self.journal.take()

    def renew(self, group: Group) -> None:
        """Go on with another group, whose caches are empty."""
        self.group, self._unread = group, []
        self.journal.take()


class MeshRunner(PipelineRunner):
    """Rank 0 of a pipeline whose stages have several ranks: those of its own stage take every step with it."""

    _taken: list[Entry]

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """Run the layers of this stage: [T, H]."""
        self._taken = self.journal.take()
        try:
            told = {"journal": self._taken, "batch": facts_of(batch), "ids": given.tolist()}
            for rank in self.mesh.peers(0)[1:]:
                self.group.say(told, rank)
            return super().repeated(given, batch)
        except BaseException:
            # the others wait in the middle of the step, and there is no way to call them back
            self.group.break_up("a step was broken off, and the ranks are no longer at the same place.")
            raise

    def _entries(self) -> list[Entry]:
        return self._taken


class StageRunner(Runner):
    """The layers of a rank that follows, as a `Replayer` runs them."""

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, H]."""
        with exact(self.exact):
            return self.model.part(given, batch, self.cache)  # type: ignore[attr-defined]


class Stage:
    """Takes steps as rank 0 tells.

    read_nbytes  tells how much of experts was read here
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        exact: bool,
        graphs: bool,
        group: Group,
        mesh: Mesh,
        read_nbytes: Callable[[], int],
    ):
        self.group, self.mesh, self.mirror, self._read_nbytes = group, mesh, Mirror(cache), read_nbytes
        self.width = model.config.hidden
        self.runner = StageRunner(model, cache, exact)
        self.replayer = Replayer(self.runner, graphs)

    def follow(self) -> None:
        """Take steps until rank 0 ends."""
        group, before, after = self.group, self.mesh.before(self.group.rank), self.mesh.after(self.group.rank)
        for told in group.notes(before or 0):
            if "batch" not in told:
                if after is not None:
                    group.say(told, after)
                if "end" in told:
                    return
                group.say({"nbytes": self._read_nbytes()}, 0)
                continue
            if before is None:
                rows = sent(told.pop("ids"), self.runner.device)
            else:
                rows = group.receive(sum(told["batch"]["counts"]), self.width, source=before)
            found = self._step(told, rows)
            if after is not None:
                group.say(told, after)
                group.send(found, after)
            elif group.rank in self.mesh.heads and not told["batch"]["silent"]:
                group.send(found, 0)

    def _step(self, told: dict[str, Any], rows: Tensor) -> Tensor:
        self.mirror.repeat(told["journal"])
        batch = self.mirror.batch(told["batch"])
        if batch.single and not batch.silent:
            return self.replayer.repeat(batch, rows)
        return self.runner.repeated(rows, batch)


class Passing:
    """Some layers of a model and those before and after them, all ranks in step: what a calibration runs."""

    def __init__(self, model: Any, group: Group, mesh: Mesh):
        self.config, self.layers, self.span = model.config, model.layers, model.span
        self._model, self._group = model, group
        self._before, self._after = mesh.before(group.rank), mesh.after(group.rank)

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run tokens through the layers that are here: [T, H], of no use to anybody."""
        group = self._group
        given = ids if self._before is None else group.receive(len(ids), self.config.hidden, source=self._before)
        found = self._model.part(given, batch, cache)
        if self._after is not None:
            group.send(found, self._after)
        return found
