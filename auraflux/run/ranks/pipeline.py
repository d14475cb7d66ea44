"""A pipeline: each rank has consecutive layers, and one row of numbers per token goes from each to the next.

The last rank gives its rows to rank 0, which has the last norm and the head beside the embedding: a row is much shorter than
scores of all tokens, and a matrix that is embedding and head at once is held once. A piece of a prompt that nobody asks
anything about is not waited for: while the others are at it, rank 0 reads the next.
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
from auraflux.run.ranks.group import Expected, Group
from auraflux.run.ranks.members import ANSWERS, ROWS, copied
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.rank_runner import RankRunner
from auraflux.run.runner import Runner

ANSWER_NBYTES = 1 << 17
BROKEN_OFF = "a step was broken off while it was passed on."


class PipelineRunner(RankRunner):
    """Rank 0's layers, and then those of the others."""

    def __init__(self, model: Any, cache: Cache, exact: bool, group: Group, mesh: Mesh, graphs: bool):
        super().__init__(model, cache, exact, group, mesh)
        self.part, self.journal = model, Journal(cache)
        # rows that are on their way to nobody, since a step was interrupted
        self._unread: list[Expected] = []
        # the answer of the next step, asked for early
        self._asked: Expected | None = None
        # whether the next stage was told of a step and has not got its rows
        self._owing = False
        self._end = Replayer(EndRunner(self), graphs)

    def forward(self, flat: Tensor, batch: Batch) -> Tensor:
        """Run tokens for which there is room: the final hidden states [T, H]; none of a silent batch."""
        with self._told(flat, batch, repeated=False):
            found = self._hidden(self.repeated(flat, batch), batch)
            return found if batch.silent else self.normed(found)

    def telling(self, ids: Tensor, batch: Batch) -> AbstractContextManager[None]:
        """Let others know of a step that is repeated inside the block."""
        return self._told(ids, batch, repeated=True)

    @contextmanager
    def _told(self, ids: Tensor, batch: Batch, repeated: bool) -> Iterator[None]:
        """Tell the next stage of a step, which makes ready for it while this rank does its part, inside the block."""
        self.group.check()
        while self._unread:
            self._unread[0].wait()
            del self._unread[0]
        self._tell(ids, {"journal": self.journal.take(), "batch": facts_of(batch), "repeated": repeated})
        try:
            yield
        except BaseException:
            if self._owing:
                # the next stage waits for rows: it gets some, and what it makes of them is cut back with the step
                self._send(torch.zeros(len(ids), self.part.config.hidden, dtype=self.part.dtype), batch)
            raise

    def _tell(self, ids: Tensor, told: dict[str, Any]) -> None:
        try:
            self.group.say(told, self.mesh.heads[1])
        except BaseException:
            self.group.break_up(BROKEN_OFF)
            raise
        self._owing = True

    def _send(self, rows: Tensor, batch: Batch) -> None:
        """Give the next stage what it waits for, and ask for what comes of it."""
        try:
            if not batch.silent:
                self._unread.append(self._answer(rows))
            self.group.send(rows, self.mesh.heads[1])
            self._owing = False
            if self._asked is None:
                # to ask for it is a message, too, and nothing else is to be done now
                self._asked = self.group.expect(ANSWER_NBYTES, source=self.mesh.heads[-1], dtype=torch.uint8, tag=ANSWERS)
        except BaseException:
            self.group.break_up(BROKEN_OFF)
            raise

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """Run the layers that are here: [T, H]. That can be recorded; what ranks send to each other is not part of it."""
        with self.contract():
            return self.part.part(given, batch, self.cache)

    def after(self, found: Tensor, batch: Batch) -> Tensor:
        """Let the others go on with what was found here: the scores [B, V]."""
        rows = self._hidden(found, batch)
        return self._end.repeat(batch, rows) if batch.single else self.score(self.normed(rows))

    def _hidden(self, rows: Tensor, batch: Batch) -> Tensor:
        """What comes out of the last layer of all: [T, H]."""
        self._send(rows, batch)
        if batch.silent:
            return torch.empty(0)
        found = self._unread[0].wait()
        del self._unread[0]
        if is_short(rows):
            found = copied(found, 0, *rows.shape, dtype=rows.dtype)
        return found if rows.is_cpu else found.to(self.device)

    def _answer(self, rows: Tensor) -> Expected:
        """What the last rank makes of rows, on its way; octets if it is short."""
        if not is_short(rows):
            return self.group.expect(*rows.shape, source=self.mesh.heads[-1], dtype=rows.dtype)
        asked, self._asked = self._asked, None
        return asked or self.group.expect(ANSWER_NBYTES, source=self.mesh.heads[-1], dtype=torch.uint8, tag=ANSWERS)

    def normed(self, rows: Tensor) -> Tensor:
        """What comes out of the last layer, after the last norm: [T, H]."""
        with self.contract():
            return self.part.normed(rows)

    def renew(self, group: Group) -> None:
        """Go on with another group, whose caches are empty."""
        self.group, self._unread, self._asked, self._owing = group, [], None, False
        self.journal.take()
        self._end.forget()


class EndRunner(Runner):
    """The last norm and the head, as a `Replayer` runs them; they compute as rank 0's layers do."""

    def __init__(self, layers: PipelineRunner):
        super().__init__(layers.model, layers.cache, layers.exact)
        self._layers = layers

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, V] float32."""
        return self._layers.score(self._layers.normed(given))


class MeshRunner(PipelineRunner):
    """Rank 0 of a pipeline whose stages have several ranks: those of its own stage take every step with it."""

    @contextmanager
    def _told(self, ids: Tensor, batch: Batch, repeated: bool) -> Iterator[None]:
        with super()._told(ids, batch, repeated):
            try:
                yield
            except BaseException:
                # the others wait in the middle of the step, and there is no way to call them back
                self.group.break_up("a step was broken off, and the ranks are no longer at the same place.")
                self._owing = False
                raise

    def _tell(self, ids: Tensor, told: dict[str, Any]) -> None:
        try:
            for rank in self.mesh.peers(0)[1:]:
                self.group.say({**told, "ids": ids.tolist()}, rank)
        except BaseException:
            self.group.break_up(BROKEN_OFF)
            raise
        super()._tell(ids, told)


class StageRunner(RankRunner):
    """The layers of a rank that follows, as a `Replayer` runs them."""

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """[T, H] -> [T, H]."""
        with self.contract():
            return self.model.part(given, batch, self.cache)  # type: ignore[attr-defined]


class Stage:
    """Takes steps as rank 0 tells, and answers what it asks."""

    def __init__(self, runner: StageRunner, graphs: bool, answers: Answers):
        self.runner, self.group, self.mesh, self._answers = runner, runner.group, runner.mesh, answers
        self.mirror, self.replayer = Mirror(runner.cache), Replayer(runner, graphs)

    def follow(self) -> None:
        """Take steps until rank 0 ends."""
        group, before, after = self.group, self.mesh.before(self.group.rank), self.mesh.after(self.group.rank)
        for told in group.notes(before or 0):
            if "batch" not in told:
                if after is not None:
                    group.say(told, after)
                if "end" in told:
                    return
                self._answers.give(told, self.replayer.refused)
                continue
            found = self._step(told, before, after)
            if after is not None:
                group.send(found, after)
            elif group.rank in self.mesh.heads and not told["batch"]["silent"]:
                group.send(found, 0, ANSWERS if is_short(found) else ROWS)

    def _step(self, told: dict[str, Any], before: int | None, after: int | None) -> Tensor:
        """Make ready for a step, also those after this rank, wait for its rows, and take it."""
        device, ids, tokens = self.runner.device, told.pop("ids", None), sum(told["batch"]["counts"])
        coming = None if before is None else expected(self.group, tokens, self.runner.model, before)
        if after is not None:
            self.group.say(told, after)
        self.mirror.repeat(told["journal"])
        batch = self.mirror.batch(told["batch"])
        # the first stage is given tokens, the others rows
        given = sent(ids, device) if coming is None else coming.wait()
        given = given if given.device == device else given.to(device)
        return self.replayer.repeat(batch, given) if told["repeated"] else self.runner.repeated(given, batch)


def is_short(rows: Tensor) -> bool:
    """Whether rows that go back to rank 0 are what it has asked for room for."""
    return rows.nbytes <= ANSWER_NBYTES


def expected(group: Group, tokens: int, model: Any, source: int) -> Expected:
    """Rows that will come from the layers before a model's: [T, H]."""
    return group.expect(tokens, model.config.hidden, source=source, dtype=model.dtype)


class Passing:
    """Some layers of a model and those before and after them, all ranks in step: what a calibration runs."""

    def __init__(self, model: Any, group: Group, mesh: Mesh):
        self.config, self.layers, self.span = model.config, model.layers, model.span
        self._model, self._group = model, group
        self._before, self._after = mesh.before(group.rank), mesh.after(group.rank)

    def __call__(self, ids: Tensor, batch: Batch, cache: Cache) -> Tensor:
        """Run tokens through the layers that are here: [T, H], of no use to anybody."""
        group = self._group
        given = ids if self._before is None else expected(group, len(ids), self._model, self._before).wait().to(ids.device)
        found = self._model.part(given, batch, cache)
        if self._after is not None:
            group.send(found, self._after)
        return found
