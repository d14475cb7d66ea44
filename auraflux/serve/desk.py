"""The model's end of the link: requests come in through a pipe, and after each step the news of all texts goes out."""

import threading
import time
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from auraflux.errors import AurafluxError
from auraflux.run.job import Job
from auraflux.run.language import LanguageModel
from auraflux.run.request import Event, Request
from auraflux.serve.link import Gauges, ModelFacts
from auraflux.serve.pipe import CANCEL, NEWS, READY, STOP, SUBMIT, News

IDLE_S = 1.0  # after which gauges are told although nothing happens
GAUGES_S = 0.2  # between two of them while texts are written


def facts_of(model: LanguageModel, name: str | None = None) -> ModelFacts:
    """What a server says of a model."""
    cache = model.engine.cache
    return ModelFacts(
        name=name or _name_of(model.path),
        model_type=model.model_type,
        context=model.context,
        vocab=model.engine.model.config.vocab,
        ends=model.scheduler.ends,
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

    def __init__(self, model: LanguageModel, connection: Connection, facts: ModelFacts):
        self.model, self.scheduler, self._connection = model, model.scheduler, connection
        self._jobs: dict[int, Job] = {}
        self._news: News = []
        self._gone, self._told_at = threading.Event(), 0.0
        connection.send((READY, facts, model.tokenizer))

    def run(self) -> None:
        """Take turns until the other end is gone."""
        threading.Thread(target=self._listen, name="auraflux-requests", daemon=True).start()
        while not self._gone.is_set():
            self.scheduler.wait_for_jobs(IDLE_S)
            if not self.scheduler.idle:
                with self.scheduler.claimed():
                    self.scheduler.turn()
            self._send()

    def stop(self) -> None:
        """Tell the other end to finish what was begun; `run` returns when it has."""
        self._connection.send((STOP,))

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):
            self._gone.set()

    def _take(self, message: tuple) -> None:
        match message:
            case (str(word), int(number), Request() as request) if word == SUBMIT:
                try:
                    self._jobs[number] = self.scheduler.submit(request, partial(self._note, number))
                except AurafluxError as err:
                    self._note(number, Event(finish="error", error=str(err)))
            case (str(word), int(number)) if word == CANCEL:
                job = self._jobs.get(number)
                if job is not None:
                    self.scheduler.cancel(job)

    def _note(self, number: int, event: Event) -> None:
        values = (event.text, event.tokens, event.scored, event.finish, event.stop, event.error, event.figures)
        self._news.append((number, values if event.finish is not None or event.scored else values[:2]))
        if event.finish is not None:
            self._jobs.pop(number, None)

    def _send(self) -> None:
        news, self._news = self._news, []
        now = time.monotonic()
        gauges = self._gauges() if now - self._told_at > GAUGES_S or self.scheduler.idle else None
        if gauges is not None:
            self._told_at = now
        try:
            self._connection.send((NEWS, news, gauges))
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
        traffic = None if self.model.experts is None else self.model.experts.traffic().total
        if traffic is None:
            return gauges
        reads = traffic.ahead + traffic.misses
        return replace(gauges, expert_hits=traffic.hits, expert_reads=reads, expert_nbytes=traffic.nbytes)
