"""The model's end of the link: requests come in through a pipe, and after each step the news of all texts goes out."""

import logging
import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

from auraflux.errors import AurafluxError, BackendError, RankError
from auraflux.run.job import Job
from auraflux.run.language import LanguageModel
from auraflux.run.request import Event, Request
from auraflux.serve.link import Gauges, ModelFacts
from auraflux.serve.pipe import CANCEL, DEAL, DEALT, DOWN, NEWS, READY, STOP, SUBMIT, News
from auraflux.weights.placement import Dealt

log = logging.getLogger("auraflux.serve")

IDLE_S = 1.0  # after which gauges are told although nothing happens
AGAIN_S = 1.0  # between two tries to bring ranks back
GAUGES_S = 0.2  # between two of them while texts are written


def facts_of(model: LanguageModel, name: str | None = None) -> ModelFacts:
    """What a server says of a model."""
    cache = model.engine.cache
    return ModelFacts(
        name=name or _name_of(model.path),
        model_type=model.model_type,
        context=model.context,
        vocab=model.engine.model.config.vocab,
        ends=model.scheduler.intake.ends,
        kv=cache.settings.kv,
        device=str(model.engine.device),
        parallel=model.scheduler.parallel,
    )


def _name_of(path: Path) -> str:
    """How people call what lies there: for a hub's cache, the repository."""
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix == ".gguf" else path.name


class Desk:
    """Carries requests to a model's scheduler, and its news back."""

    def __init__(self, model: LanguageModel, connection: Connection, facts: ModelFacts, restart: bool = False):
        self.model, self.scheduler, self._connection = model, model.scheduler, connection
        self.facts, self._restart = facts, restart
        self._jobs: dict[int, Job] = {}
        self._news: News = []
        self._deals: SimpleQueue[None] = SimpleQueue()
        self._gone, self._told_at = threading.Event(), 0.0
        # a message must be whole before the next begins
        self._speaking = threading.Lock()
        try:
            connection.send((READY, facts, model.tokenizer))
        except OSError as err:
            raise BackendError("the HTTP process ended while the model was loaded; the log above says why.") from err

    def run(self) -> None:
        """Take turns until the other end is gone."""
        threading.Thread(target=self._listen, name="auraflux-requests", daemon=True).start()
        while not self._gone.is_set():
            self.scheduler.wait_for_jobs(IDLE_S)
            if not self.scheduler.idle:
                with self.scheduler.claimed():
                    self.scheduler.turn()
            self._send()
            self._deal_experts()
            try:
                self.model.engine.check()
            except RankError as err:
                self._go_down(err)

    def _deal_experts(self) -> None:
        """Deal experts out, between two turns, as often as it was asked for."""
        while not self._deals.empty():
            self._deals.get()
            try:
                found: Dealt | AurafluxError = self.model.deal_experts()
            except AurafluxError as err:
                found = err
            self._say((DEALT, found))

    def _go_down(self, err: RankError) -> None:
        """End all texts when a rank is gone, and take none on until it is back."""
        log.error("not ready: %s", err)
        self._say((DOWN, f"{err} The model cannot answer for now."))
        self._lose(err)
        while not self._gone.wait(AGAIN_S):
            # what was asked for in the same moment
            self._lose(err)
            self._deal_experts()
            if self._restart and self._comes_back():
                log.info("ready again")
                self._say((READY, self.facts, self.model.tokenizer))
                return

    def _lose(self, err: RankError) -> None:
        with self.scheduler.claimed():
            self.scheduler.lose(err)
        self._send()

    def _comes_back(self) -> bool:
        try:
            self.model.engine.restart(self._gone.is_set)
        except AurafluxError as err:
            log.error("the ranks did not come back: %s", err)
            return False
        return True

    def stop(self) -> None:
        """Tell the other end to finish what was begun; `run` returns when it has. A signal's handler may call it."""
        # a handler runs in the middle of whatever its thread does, which may be sending
        threading.Thread(target=self._say, args=((STOP,),), name="auraflux-stop", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._gone.set()

    def _take(self, message: tuple) -> None:
        match message:
            case (str(word), int(number), Request() as request) if word == SUBMIT:
                self._submit(number, request)
            case (str(word),) if word == DEAL:
                self._deals.put(None)
            case (str(word), int(number)) if word == CANCEL:
                job = self._jobs.get(number)
                if job is not None:
                    self.scheduler.cancel(job)

    def _submit(self, number: int, request: Request) -> None:
        try:
            job = self._jobs[number] = self.scheduler.submit(request, partial(self._note, number))
        except Exception as err:
            known = isinstance(err, AurafluxError)
            if not known:
                log.exception("a request could not be taken on")
            self._say((NEWS, [(number, _values(Event(finish="error", error=str(err) if known else None)))], None))
            return
        # it may have ended before it was noted here
        if job.finish is not None:
            self._jobs.pop(number, None)

    def _note(self, number: int, event: Event) -> None:
        self._news.append((number, _values(event)))
        if event.finish is not None:
            self._jobs.pop(number, None)

    def _send(self) -> None:
        news, self._news = self._news, []
        now = time.monotonic()
        gauges = self._gauges() if now - self._told_at > GAUGES_S or self.scheduler.idle else None
        if gauges is not None:
            self._told_at = now
        self._say((NEWS, news, gauges))

    def _say(self, message: tuple) -> None:
        try:
            with self._speaking:
                self._connection.send(message)
        except OSError:
            self._gone.set()

    def _gauges(self) -> Gauges:
        scheduler, (used, pages) = self.scheduler, self.scheduler.pages
        gauges = Gauges(
            scheduler.running,
            scheduler.waiting,
            used,
            pages,
            scheduler.counts.looked_up,
            scheduler.counts.found,
            scheduler.counts.preemptions,
        )
        if (guessing := scheduler.speculation) is not None:
            gauges = replace(gauges, drafted=guessing.drafted, accepted=guessing.accepted)
        traffic = None if self.model.experts is None else self.model.experts.traffic().total
        if traffic is None:
            return gauges
        reads = traffic.ahead + traffic.misses
        return replace(gauges, expert_hits=traffic.hits, expert_reads=reads, expert_nbytes=traffic.nbytes)


def _values(event: Event) -> tuple:
    """The fields of an event; what most have none of is left out."""
    values = (event.text, event.tokens, event.scored, event.finish, event.stop, event.error, event.figures)
    return values if event.finish is not None or event.scored else values[:2]
