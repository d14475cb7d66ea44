"""Texts that grow by a token a step: their batch, their scores, and the step that a GPU begins before its tokens are known."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from auraflux.cache import Batch
from auraflux.errors import CacheFull
from auraflux.run.device import Arriving, sent
from auraflux.run.engine import Engine
from auraflux.run.job import Job
from auraflux.run.request import Scored
from auraflux.run.sampler import Sampler

Chosen = list[tuple[Job, int, Scored | None]]


class Writer:
    """Takes steps of writing.

    live   jobs whose next scores are known, or on their way; in the order of the batch. Some may have ended since
    ready  whether there are any
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.live: list[Job] = []
        self._scores: Tensor | None = None
        self._batch: tuple[list[Job], Batch, Sampler] | None = None

    @property
    def ready(self) -> bool:
        return self._scores is not None

    def forget(self) -> None:
        """Give up a step whose tokens are not known, and the batch."""
        self.live, self._scores, self._batch = [], None, None

    def step(self, jobs: list[Job]) -> None:
        """Give jobs whose last token is known here that token."""
        if jobs:
            self.live = self._in_places(jobs)
            self._scores = self.engine.decode(self._batch_of(self.live), [job.ids[-1] for job in self.live])

    def choose(self, running: Iterable[Job], meanwhile: Callable[[], None]) -> Chosen:
        """Choose a token for every live job. A GPU meanwhile begins the next step, with jobs that have become ready.

        meanwhile  gives it something else to do where all of them end with this token
        """
        assert self._batch is not None
        assert self._scores is not None
        live, sampler = self.live, self._batch[2]
        chosen = sampler(self._scores)
        arriving, likelihoods = Arriving(chosen), sampler.likelihoods
        self._scores = None
        if self.engine.replayer.ahead:
            self._go_on(chosen, [job for job in running if job.unread == 0 and job not in live])
            if not self.ready:
                meanwhile()
        tokens = arriving.wait()
        scored = {} if likelihoods is None else likelihoods.read(tokens)
        return [(job, token, scored.get(number)) for number, (job, token) in enumerate(zip(live, tokens, strict=True))]

    def _go_on(self, chosen: Tensor, joining: list[Job]) -> None:
        """Begin the step after tokens that only the device knows, where they are not the last of their texts.

        A text that then ends has given its sequence one token more than it need have: the one it ended with.
        """
        live = self.live
        jobs = self._in_places([*(job for job in live if job.finish is None and not job.stream.last), *joining])
        if not jobs:
            return
        tokens = chosen
        if joining:
            tokens = torch.cat([chosen, sent([job.ids[-1] for job in joining], chosen.device)])
        numbers = {job: number for number, job in enumerate([*live, *joining])}
        if (lines := [numbers[job] for job in jobs]) != list(range(len(tokens))):
            tokens = tokens[sent(lines, chosen.device)]
        try:
            scores = self.engine.decode(self._batch_of(jobs), tokens)
        except CacheFull:
            # the tokens are given out first; then it is met again, unless some text ended and made room
            return
        self.live, self._scores = jobs, scores

    def _in_places(self, jobs: list[Job]) -> list[Job]:
        """The same jobs, each where it was in the last batch if it can be: states are then not moved about."""
        if self._batch is None or not self.engine.cache.moves:
            return jobs
        wanted, places = set(jobs), self._batch[0]
        staying = [job if job in wanted else None for job in places[: len(jobs)]]
        others = iter([job for job in jobs if job not in staying])
        return [job if job is not None else next(others) for job in staying] + list(others)

    def _batch_of(self, jobs: list[Job]) -> Batch:
        if self._batch is None or self._batch[0] != jobs:
            batch = self.engine.writing([job.held for job in jobs])
            self._batch = list(jobs), batch, Sampler([job.stream.row for job in jobs])
        return self._batch[1]
