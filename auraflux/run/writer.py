"""Texts that grow by a step: their batch, their scores, guesses that are checked, and the step that a GPU begins before its
tokens are known."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.cache import Batch
from auraflux.cache.radix import common_length
from auraflux.errors import CacheFull
from auraflux.run.device import Arriving, sent
from auraflux.run.engine import Engine
from auraflux.run.job import Job
from auraflux.run.reader import Piece
from auraflux.run.request import Scored
from auraflux.run.sampler import Likelihoods, Sampler
from auraflux.run.speculate import Speculation
from auraflux.weights.traffic import guessing

Chosen = list[tuple[Job, int, Scored | None]]


class Drawn(NamedTuple):
    """Tokens on their way from the device, which knows them already, and how likely they were if somebody asks."""

    tokens: Tensor
    arriving: Arriving
    likelihoods: Likelihoods | None


@dataclass
class Together:
    """Jobs that take steps together.

    batch    for steps of one token each
    checked  for those with guesses; None until there is one
    """

    jobs: list[Job]
    batch: Batch
    sampler: Sampler
    checked: Batch | None = None


class Writer:
    """Takes steps of writing.

    speculation  makes guesses; None for none
    live         jobs whose next scores are known, or on their way; in the order of the batch. Some may have ended since
    ready        whether there are any, or tokens `drawn` by them that are on their way
    beside       a job whose prompt's next tokens the next step takes along, and how many at most, where there is room for
                 them; `heard` is then called with it
    """

    def __init__(self, engine: Engine, heard: Callable[[Job], None]):
        self.engine, self._heard = engine, heard
        self.speculation: Speculation | None = None
        self.beside: Piece | None = None
        self.live: list[Job] = []
        # guesses that the step checks, for each live job
        self._drafts: list[list[int]] = []
        self._scores: Tensor | None = None
        self._drawn: Drawn | None = None
        # what they were made of; None where that is not kept
        self._hidden: Tensor | None = None
        self._together: Together | None = None
        self._began = self._ended = 0.0

    @property
    def ready(self) -> bool:
        return self._scores is not None or self.drawn

    @property
    def drawn(self) -> bool:
        return self._drawn is not None

    def forget(self) -> None:
        """Give up a step whose tokens are not known, and the batch."""
        self.live, self._scores, self._drawn, self._hidden, self._together, self.beside = [], None, None, None, None, None

    def step(self, jobs: list[Job]) -> None:
        """Give jobs whose last token is known here that token, and guesses at those after it where they promise to pay."""
        if not jobs:
            return
        self._began = time.perf_counter()
        self.live = self._in_places(jobs)
        together = self._with(self.live)
        if self.speculation is not None and any(drafts := self._fall_backs(self._plan(self.speculation, together))):
            try:
                self._scored(self._check(together, drafts), drafts)
            except CacheFull:
                # there may be room for the texts alone
                pass
            else:
                return
        self._scored(self._decode(together.batch, [job.ids[-1] for job in self.live]), [[] for _ in self.live])

    def _decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        """The scores after one token of each text; a piece of a prompt goes along if one is to."""
        if self.beside is not None:
            job, count = self.beside
            count = self.engine.fit_beside(len(batch.sequences), count, count < job.piece)
            piece = job.ids[job.held.length : job.held.length + count]
            if piece and (found := self.engine.decode_beside(batch, ids, job.held, piece)) is not None:
                self.beside = None
                self._heard(job)
                return found
        return self.engine.decode(batch, ids)

    def begin(self, jobs: list[Job], scores: Tensor) -> None:
        """Go on from scores that were found with the last tokens of prompts."""
        self._began = time.perf_counter()
        self.live = jobs
        self._with(jobs)
        self._scored(scores, [[] for _ in jobs])

    def _scored(self, scores: Tensor, drafts: list[list[int]]) -> None:
        self._scores, self._drafts, self._hidden = scores, drafts, self.engine.hidden

    def _plan(self, speculation: Speculation, together: Together) -> list[list[int]]:
        """The guesses at each job's next tokens."""
        if together.checked is None:
            together.checked = self.engine.cache.batch([job.held for job in together.jobs])
        batch = together.checked
        return speculation.plan(together.jobs, lambda more: self.engine.replayer.is_known(batch, 1 + more))

    def _check(self, together: Together, drafts: list[list[int]]) -> Tensor:
        """The scores after each job's last token and each of its guesses, [T, V]."""
        assert together.checked is not None
        pieces = [[job.ids[-1], *draft] for job, draft in zip(together.jobs, drafts, strict=True)]
        firsts = {0, *accumulate(map(len, pieces))}
        with guessing(row for row in range(max(firsts)) if row not in firsts):
            return self.engine.verify(together.checked, pieces)

    def _fall_backs(self, drafts: list[list[int]]) -> list[list[int]]:
        """Let jobs whose states cannot be cut come back to where they are; guesses only where they can."""
        if not self.engine.cache.moves:
            return drafts
        return [draft if draft and _comes_back(job) else [] for job, draft in zip(self.live, drafts, strict=True)]

    def draw(self) -> None:
        """Begin to choose tokens by the scores there are: before a GPU is given anything else, which they would wait for."""
        assert self._scores is not None
        sampler = self._sampler(self._drafts)
        chosen = sampler(self._scores)
        self._drawn, self._scores = Drawn(chosen, Arriving(chosen), sampler.likelihoods), None

    def choose(self, running: Iterable[Job], meanwhile: Callable[[], None]) -> Chosen:
        """Give the token drawn for every live job, more where guesses were right. A GPU meanwhile begins the next step.

        meanwhile  gives it something else to do where all of them end with this token
        """
        assert self._drawn is not None
        live, drafts, hidden, began = self.live, self._drafts, self._hidden, max(self._began, self._ended)
        (chosen, arriving, likelihoods), self._drawn = self._drawn, None
        if self.engine.replayer.ahead and not any(drafts) and not self._promises(live):
            self._go_on(chosen, [job for job in running if job.unread == 0 and job not in live])
            if not self.ready:
                meanwhile()
        tokens = arriving.wait()
        scored = {} if likelihoods is None else likelihoods.read(tokens)
        found: Chosen = []
        kept: list[int] = []
        firsts: list[int] = []
        lines = iter(range(len(tokens)))
        for job, draft in zip(live, drafts, strict=True):
            mine = [next(lines), *islice(lines, len(draft))]
            kept.append(common_length(draft, [tokens[line] for line in mine[:-1]]))
            firsts.append(mine[0])
            found += [(job, tokens[line], scored.get(line)) for line in mine[: kept[-1] + 1]]
            job.steps += 1
            if draft:
                self._cut(job, draft[: kept[-1]])
        if self.speculation is not None and hidden is not None:
            rights = zip(live, firsts, kept, strict=True)
            going = [(job, len(job.ids) - 1, hidden[at : at + right + 1]) for job, at, right in rights if job.finish is None]
            self.speculation.hear(going)
        self._ended = time.perf_counter()
        if self.speculation is not None:
            self.speculation.note(live, drafts, kept, None if self.engine.replayer.settling else self._ended - began)
        return found

    def _promises(self, jobs: list[Job]) -> bool:
        return self.speculation is not None and self.speculation.promises(jobs)

    def _sampler(self, drafts: list[list[int]]) -> Sampler:
        """One that chooses after every token of the step."""
        assert self._together is not None
        if not any(drafts):
            return self._together.sampler
        lines = [(job.stream.row, at) for job, draft in zip(self.live, drafts, strict=True) for at in range(len(draft) + 1)]
        return Sampler([row for row, _ in lines], [at for _, at in lines])

    def _cut(self, job: Job, kept: list[int]) -> None:
        """Take back guesses that were wrong; a state that falls back further is given the others again."""
        length = len(job.ids) + len(kept)
        if job.held.truncate(length):
            self.engine.read([job.held], [[*job.ids, *kept][job.held.length : length]])

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
            scores = self._decode(self._with(jobs).batch, tokens)
        except CacheFull:
            # the tokens are given out first; then it is met again, unless some text ended and made room
            return
        self.live = jobs
        self._scored(scores, [[] for _ in jobs])

    def _in_places(self, jobs: list[Job]) -> list[Job]:
        """The same jobs, each where it was in the last batch if it can be: states are then not moved about."""
        if self._together is None or not self.engine.cache.moves:
            return jobs
        wanted, places = set(jobs), self._together.jobs
        staying = [job if job in wanted else None for job in places[: len(jobs)]]
        others = iter([job for job in jobs if job not in staying])
        return [job if job is not None else next(others) for job in staying] + list(others)

    def _with(self, jobs: list[Job]) -> Together:
        if self._together is None or self._together.jobs != jobs:
            batch = self.engine.writing([job.held for job in jobs])
            self._together = Together(list(jobs), batch, Sampler([job.stream.row for job in jobs]))
        return self._together


def _comes_back(job: Job) -> bool:
    """Make a checkpoint where a job is, instead of the last one made for guesses; tell whether there is one."""
    sequence = job.held
    if job.fallback is not None:
        sequence.drop_checkpoint(job.fallback)
        job.fallback = None
    sequence.pass_stride()
    if sequence.length not in sequence.checkpoints:
        sequence.checkpoint()
        job.fallback = sequence.length
    return sequence.length in sequence.checkpoints
