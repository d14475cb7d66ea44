"""Many texts at once on one engine: prompts are read in pieces between the steps in which all texts grow by a token.

A turn admits what there is room for, reads a piece of the prompts that are not read yet, and takes a step of those that are.
Turns are taken by one thread at a time: a server has one for it, and otherwise whoever waits for a text takes them, for all.

A job needs no more state than its tokens and its sequence: all tokens but the last are to be read, the last is what the next
step is given. So a job whose pages were taken away, or whose step was interrupted, is simply read again as far as need be.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from auraflux.cache.pages import LayerGroup
from auraflux.cache.prefix import PrefixStore
from auraflux.cache.prefix_disk import PrefixDisk
from auraflux.cache.radix import common_length
from auraflux.errors import AurafluxError, CacheFull
from auraflux.run.engine import Engine
from auraflux.run.fair_queue import FairQueue
from auraflux.run.intake import Intake
from auraflux.run.job import Job
from auraflux.run.reader import Piece, Reader
from auraflux.run.request import Event, Request, Scored
from auraflux.run.speculate import Speculation
from auraflux.run.turns import Turns
from auraflux.run.writer import Writer
from auraflux.weights.watch import Watch

log = logging.getLogger("auraflux")

LOOKED_AT = 64  # jobs of the queue that are considered in a turn


@dataclass
class Counts:
    """What happened so far.

    looked_up    tokens of prompts that the prefix store was asked for
    found        of them that it had
    preemptions  jobs that were taken off and made to wait
    """

    looked_up: int = 0
    found: int = 0
    preemptions: int = 0


class Scheduler:
    """Carries out requests.

    tokenizer  None for a model that reads and writes tokens as numbers
    ends       tokens that end a text
    parallel   most texts at once
    waiting    most that wait; None for any number
    disk       for prefixes that memory has no room for
    speculation  makes guesses at what texts go on with; None for none
    watch      of the files that the weights are mapped from
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any | None,
        ends: frozenset[int],
        *,
        parallel: int,
        waiting: int | None = None,
        disk: PrefixDisk | None = None,
        watch: Watch | None = None,
        speculation: Speculation | None = None,
    ):
        self.engine, self.parallel = engine, parallel
        self.intake = Intake(engine, tokenizer, ends)
        self._check_files = (lambda: None) if watch is None else watch.check
        self.prefixes = PrefixStore(engine.cache, disk)
        self.counts = Counts()
        self._queue = FairQueue(waiting)
        self._running: list[Job] = []
        self._reader = Reader(engine, self.prefixes)
        self._writer = Writer(engine, self._reader.note)
        # whether what the next turn would read has been read already
        self._is_ahead = False
        self.speculate(speculation)
        self._turns = Turns()

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._running and not len(self._queue)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages that running jobs hold, and all there are."""
        groups = self.engine.cache.page_groups
        return sum(len(self._held(group)) for group in groups), sum(group.pool.count for group in groups)

    def submit(self, request: Request, tell: Callable[[Event], None] = lambda event: None) -> Job:
        """Take a request on. `tell` is called with its events by whichever thread takes turns, and must be quick."""
        self.check(request)
        job = self.intake.job(request, tell)
        if self.speculation is not None and request.sampling.apart:
            job.guesses = self.speculation.begin()
        with self._turns.changed:
            self._queue.add(job)
            self._turns.changed.notify_all()
        return job

    def speculate(self, speculation: Speculation | None) -> None:
        """Let this make guesses at texts from now on; None for no guesses."""
        self.speculation = self._reader.speculation = self._writer.speculation = speculation

    def cancel(self, job: Job) -> None:
        """Stop a job before the next step."""
        job.cancelled = True

    def wait(self, until: Callable[[], bool]) -> None:
        """Take turns, or wait while another thread takes them, until something is so."""
        self._turns.wait(until, self.turn)

    def claimed(self) -> AbstractContextManager[None]:
        """Be the only thread that uses the engine, inside the block."""
        return self._turns.claimed()

    def wait_for_jobs(self, timeout_s: float) -> None:
        """Wait until there is something to do, or for so long."""
        with self._turns.changed:
            self._turns.changed.wait_for(lambda: not self.idle, timeout_s)

    def check(self, request: Request) -> None:
        """Refuse what cannot be carried out."""
        self._check_files()
        self.engine.check()
        self.intake.check(request)

    def turn(self, write: bool = True) -> bool:
        """Admit, read and, if wanted, write; False if there is nothing left to do."""
        try:
            self._dismiss()
            self._admit()
            if write:
                # first: a GPU would choose tokens after all that is read; whatever is wrong is met again when they are taken
                with suppress(Exception):
                    self._draw()
            # whoever is taken off must not come back before the others went on, or none ever would
            while not self._read(beside_writing=write):
                pass
            while write and not self._write():
                pass
        except BaseException:
            self._rewind()
            raise
        return bool(self._running)

    def _dismiss(self) -> None:
        """Let go of what was cancelled."""
        with self._turns.changed:
            gone = [job for job in self._queue.in_turn() if job.cancelled]
            for job in gone:
                self._queue.take(job)
        for job in [*gone, *(job for job in self._running if job.cancelled)]:
            job.end("cancelled")
            self._leave(job)

    def _admit(self) -> None:
        with self._turns.changed:
            waiting = list(islice(self._queue.in_turn(), LOOKED_AT)) if len(self._running) < self.parallel else []
        for job in waiting:
            if len(self._running) == self.parallel:
                return
            kept, saved, _ = self.prefixes.look(job.ids)
            if self._comes(job, saved) or self._fetches(job):
                continue
            if self._running and not self._fits(job, saved if kept is not None and kept.live else 0):
                return
            with self._turns.changed:
                self._queue.take(job)
            self._begin(job)

    def _comes(self, job: Job, saved: int) -> bool:
        """Whether more of a prompt than is kept is being read for another job: then it is worth waiting for."""
        page = self.engine.cache.page
        return any(
            other.unread > 0 and min(common_length(other.ids, job.ids), len(job.ids) - 1) >= saved + page
            for other in self._running
        )

    def _fetches(self, job: Job) -> bool:
        """Whether what the disk has of a prompt is still being read; what has been read is kept."""
        if not job.looked:
            job.looked, job.fetching = True, self.prefixes.fetch(job.ids)
        if job.fetching is None:
            return False
        if not job.fetching.done():
            return True
        fetched, job.fetching = job.fetching, None
        self.prefixes.take_in(job.ids, fetched.result())
        return False

    def _fits(self, job: Job, saved: int) -> bool:
        """Whether there are pages for a job that others running do not hold, and one more for each of those."""
        for group in self.engine.cache.page_groups:
            if not group.grows:
                continue
            needed = len(job.ids) // group.size + 1 - saved // group.size + len(self._running)
            if needed > group.pool.count - len(self._held(group)):
                return False
        return True

    def _held(self, group: LayerGroup) -> set[int]:
        rows: list[Any] = [job.held.rows[group] for job in self._running]
        return {page for row in rows for page in row.pages}

    def _begin(self, job: Job) -> None:
        start = self.prefixes.open(job.ids)
        job.sequence = start.sequence
        if job.guesses is not None and start.held:
            job.guesses.draft.found(job.ids, start.sequence)
        if job.cached is None:
            job.cached = start.sequence.length
            self.counts.looked_up += len(job.ids) - 1
            self.counts.found += job.cached
        if start.held < start.shared < len(job.ids) - 1 and self.engine.cache.forgets:
            # two texts part here, so more may
            job.marks = sorted({*job.marks, start.shared})
        job.begun_at = job.begun_at or time.perf_counter()
        self._running.append(job)
        if job.unread == 0:
            job.kept = self.prefixes.note(job.ids[:-1], job.held)

    def _read(self, beside_writing: bool) -> bool:
        """Read the next pieces of prompts; False where a job was taken off meanwhile."""
        self._writer.beside = None
        if self._is_ahead:
            # those texts come first: beside them prompts would be read in small pieces
            self._is_ahead = False
            return True
        pieces = self._reader.next(self._running, beside_writing)
        if pieces and beside_writing and self._reader.goes_beside(pieces[-1], self._running):
            [self._writer.beside] = pieces.pop()
        return all(self._read_piece(chosen, beside_writing) for chosen in pieces)

    def _read_piece(self, chosen: list[Piece], ends: bool) -> bool:
        """Read pieces of prompts together; False where a job was taken off for them."""
        try:
            self._check_files()
            self._take_in(chosen, ends)
        except CacheFull as err:
            self._make_room(err)
            return False
        except Exception as err:
            self._fail([job for job, _ in chosen], err)
        return True

    def _read_ahead(self) -> None:
        """Read before the tokens of texts that end are known; whatever is wrong is met again in the next turn."""
        with suppress(Exception):
            for chosen in self._reader.next(self._running, beside_writing=False):
                self._take_in(chosen)
                self._is_ahead = True

    def _take_in(self, chosen: list[Piece], ends: bool = True) -> None:
        """Read pieces of prompts; unless `ends` is False, and where it can be, with what follows them."""
        if ends and not self._writer.ready and self._reader.comes_to_ends(chosen, self._running):
            jobs = [job for job, _ in chosen]
            self._writer.begin(jobs, self._reader.read_to_ends(jobs))
        else:
            self._reader.read(chosen)

    def _write(self) -> bool:
        """Choose the next token of every text whose prompt is read; False where a job was taken off first."""
        try:
            self._check_files()
            if not self._writer.ready:
                self._writer.step([job for job in self._running if job.unread == 0])
            if not self._draw():
                return True
            chosen = self._writer.choose(self._running, self._read_ahead)
        except CacheFull as err:
            self._make_room(err)
            return False
        except Exception as err:
            # it may have been the prompt's fault that went along
            beside = [] if self._writer.beside is None else [self._writer.beside[0]]
            self._fail([*(job for job in self._running if job.unread <= 0), *beside], err)
            return True
        for job, token, scored in chosen:
            if job.finish is None:
                self._take(job, token, scored)
        left, self._writer.beside = self._writer.beside, None
        if left is not None and not self._is_ahead:
            # no step was taken, or there was no room for it there
            self._read_piece([left], ends=False)
        return True

    def _draw(self) -> bool:
        """Begin to choose tokens, unless that is done; False where there are no scores, or a grammar ended a text."""
        if self._writer.drawn:
            return True
        if not self._writer.ready or self._misled():
            return False
        self._writer.draw()
        return True

    def _misled(self) -> bool:
        """End texts whose grammar cannot be followed further; tell whether there were any."""
        for job in (job for job in self._writer.live if job.finish is None):
            try:
                job.stream.row.allowed()
            except AurafluxError as err:
                self._fail([job], err)
                return True
        return False

    def _take(self, job: Job, token: int, scored: Scored | None) -> None:
        try:
            job.take(token, scored)
        except AurafluxError as err:
            self._fail([job], err)
            return
        if job.finish is not None:
            self._leave(job)

    def _leave(self, job: Job) -> None:
        """Take a job that has ended off; what it wrote is kept for texts that begin like it."""
        if self._writer.beside is not None and self._writer.beside[0] is job:
            self._writer.beside = None
        if job.kept is not None:
            self.prefixes.forget(job.kept)
            job.kept = None
        if job in self._running:
            self._running.remove(job)
        if job.guesses is not None and job.finish is not None:
            job.guesses.draft.close(job.ids if job.failure is None else None)
        if job.sequence is not None:
            sequence, job.sequence, job.fallback = job.sequence, None, None
            if sequence.length > len(job.ids):
                # a text may end before guesses that were right
                sequence.truncate(len(job.ids))
            if job.failure is None:
                self.prefixes.keep(job.ids[: sequence.length], sequence)
            else:
                sequence.close()

    def _fail(self, jobs: list[Job], err: Exception) -> None:
        if not isinstance(err, AurafluxError):
            log.exception("a step of %d texts failed", len(jobs))
        for job in jobs:
            job.failure = err
            job.end("error")
            self._leave(job)
        self._rewind()

    def lose(self, err: AurafluxError) -> None:
        """End all texts, also those that wait, and forget those that are kept: ranks that held them are gone."""
        with self._turns.changed:
            waiting = list(self._queue.in_turn())
            for job in waiting:
                self._queue.take(job)
        self._fail([*self._running, *waiting], err)
        self.prefixes.clear()

    def _make_room(self, err: CacheFull) -> None:
        """Take the job that came last off and let it wait until there are pages for it."""
        if len(self._running) == 1:
            self._fail(list(self._running), err)
            return
        job = self._running[-1]
        if job in self._writer.live:
            self._rewind()
        self.counts.preemptions += 1
        self._leave(job)
        with self._turns.changed:
            self._queue.put_back(job)

    def _rewind(self) -> None:
        """Forget steps whose tokens are not known."""
        self._writer.forget()
        for job in self._running:
            job.stream.row.renew()
            if job.unread < 0:
                job.held.truncate(len(job.ids) - 1)
