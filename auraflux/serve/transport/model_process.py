"""The model process's end of the link: requests arrive through a pipe, outputs are sent after each engine step."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from auraflux.engine.request import Output, Request
from auraflux.errors import AurafluxError, BackendError, RankError
from auraflux.loading.background_warmup import BackgroundWarmup
from auraflux.loading.language_model import LanguageModel
from auraflux.scheduler.sequence import Sequence
from auraflux.serve.transport.link import Gauges, ModelFacts
from auraflux.serve.transport.pipe import (
    CANCEL,
    EXPERTS_PLACED,
    OUTPUTS,
    PLACE_EXPERTS,
    READY,
    STOP,
    SUBMIT,
    UNAVAILABLE,
    OutputBatch,
)
from auraflux.weights.formats.headers import read_headers
from auraflux.weights.parallel.expert_placement import PlacementResult

log = logging.getLogger("auraflux.serve")

T = TypeVar("T")
IDLE_S = 1.0  # between gauges while no request runs
RETRY_S = 1.0  # between attempts to restart ranks
GAUGES_S = 0.2  # between gauges while requests run


def facts_of(model: LanguageModel, name: str | None = None) -> ModelFacts:
    """Return the facts about a model that the server publishes."""
    cache = model.engine.cache
    return ModelFacts(
        name=name or _name_of(model.path),
        model_type=model.model_type,
        context=model.context,
        vocab=model.engine.model.config.vocab,
        eos_token_ids=model.scheduler.builder.stop_token_ids,
        kv=cache.settings.kv,
        device=str(model.engine.device),
        max_sequences=model.scheduler.max_sequences,
        default_sampling=model.default_sampling,
        headers=_facts(read_headers, model.path),
        path=model.path,
        generates=model.generates,
        embedding=model.embedding,
        images=None if model.vision is None else model.vision.processor,
        no_images=model.no_images,
        adapters=() if model.engine.adapters is None else tuple(model.engine.adapters.names),
    )


def _facts(read: Callable[[Path], T], path: Path) -> T | None:
    """Return facts from a model's files; None for random weights."""
    try:
        return read(path)
    except (AurafluxError, OSError):
        return None


def _name_of(path: Path) -> str:
    """Return the served name of a model path: in a Hugging Face cache, the repository."""
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.stem if path.suffix == ".gguf" else path.name


class ModelProcess:
    """Forwards requests to a model's scheduler, and its outputs to the HTTP process.

    warmup  of the model, which goes on while there are no requests; None if it is complete
    """

    def __init__(
        self,
        model: LanguageModel,
        connection: Connection,
        facts: ModelFacts,
        restart: bool = False,
        warmup: BackgroundWarmup | None = None,
    ):
        self.model, self.scheduler, self._connection = model, model.scheduler, connection
        self.facts, self._restart, self._warmup = facts, restart, warmup
        self._sequences: dict[int, Sequence] = {}
        self._outputs: OutputBatch = []
        self._placements: SimpleQueue[None] = SimpleQueue()
        self._disconnected, self._gauges_sent_at = threading.Event(), 0.0
        # two threads send; messages must not interleave
        self._send_lock = threading.Lock()
        try:
            connection.send((READY, facts, model.tokenizer))
        except OSError as err:
            raise BackendError("the HTTP process ended while the model was loaded; the log above says why.") from err

    def run(self) -> None:
        """Run engine steps until the HTTP process has ended."""
        threading.Thread(target=self._listen, name="auraflux-requests", daemon=True).start()
        while not self._disconnected.is_set():
            self.scheduler.wait_for_work(IDLE_S if self._warmup is None else 0)
            if not self.scheduler.idle:
                with self.scheduler.exclusive():
                    self.scheduler.step()
            self._send_outputs()
            self._warm_up()
            self._place_experts()
            try:
                self.model.engine.check()
            except RankError as err:
                self._recover(err)

    def _warm_up(self) -> None:
        """Go on with the warm-up while there are no requests; without it steps are only slower when they come first."""
        if self._warmup is None:
            return
        try:
            self._warmup.advance(idle=not self._sequences)
        except Exception as err:
            log.warning("the rest of the warm-up is left out: %s", err)
            self._warmup = None
        if self._warmup is not None and not self._warmup.active:
            self._warmup = None

    def _place_experts(self) -> None:
        """Redistribute experts between two engine steps, once per request for it."""
        while not self._placements.empty():
            self._placements.get()
            try:
                placed: PlacementResult | AurafluxError = self.model.place_experts()
            except AurafluxError as err:
                placed = err
            self._send((EXPERTS_PLACED, placed))

    def _recover(self, err: RankError) -> None:
        """Fail all requests after a rank was lost, and refuse new ones until it is back."""
        log.error("not ready: %s", err)
        self._send((UNAVAILABLE, f"{err} The model is unavailable."))
        self._fail_all(err)
        while not self._disconnected.wait(RETRY_S):
            # requests may have been submitted before the HTTP process knew
            self._fail_all(err)
            self._place_experts()
            if self._restart and self._restart_ranks():
                log.info("ready again")
                self._send((READY, self.facts, self.model.tokenizer))
                return

    def _fail_all(self, err: RankError) -> None:
        with self.scheduler.exclusive():
            self.scheduler.fail_all(err)
        self._send_outputs()

    def _restart_ranks(self) -> bool:
        try:
            self.model.engine.restart(self._disconnected.is_set)
        except AurafluxError as err:
            log.error("restarting the ranks failed: %s", err)
            return False
        return True

    def stop(self) -> None:
        """Ask the HTTP process to drain and end; `run` returns when it has. Safe to call from a signal handler."""
        # a handler may interrupt its thread while it holds the send lock
        threading.Thread(target=self._send, args=((STOP,),), name="auraflux-stop", daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self._handle(self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._disconnected.set()

    def _handle(self, message: tuple) -> None:
        match message:
            case (str(kind), int(number), Request() as request) if kind == SUBMIT:
                self._submit(number, request)
            case (str(kind),) if kind == PLACE_EXPERTS:
                self._placements.put(None)
            case (str(kind), int(number)) if kind == CANCEL:
                sequence = self._sequences.get(number)
                if sequence is not None:
                    self.scheduler.cancel(sequence)

    def _submit(self, number: int, request: Request) -> None:
        if (warmup := self._warmup) is not None:
            warmup.interrupt()
        try:
            sequence = self._sequences[number] = self.scheduler.submit(request, partial(self._on_output, number))
        except Exception as err:
            known = isinstance(err, AurafluxError)
            if not known:
                log.exception("a request could not be submitted")
            failed = Output(finish_reason="error", error=str(err) if known else None)
            self._send((OUTPUTS, [(number, _fields(failed))], None))
            return
        # it may have ended before it was stored here
        if sequence.finish_reason is not None:
            self._sequences.pop(number, None)

    def _on_output(self, number: int, output: Output) -> None:
        self._outputs.append((number, _fields(output)))
        if output.finish_reason is not None:
            self._sequences.pop(number, None)

    def _send_outputs(self) -> None:
        outputs, self._outputs = self._outputs, []
        now = time.monotonic()
        gauges = self._gauges() if now - self._gauges_sent_at > GAUGES_S or self.scheduler.idle else None
        if gauges is not None:
            self._gauges_sent_at = now
        self._send((OUTPUTS, outputs, gauges))

    def _send(self, message: tuple) -> None:
        try:
            with self._send_lock:
                self._connection.send(message)
        except OSError:
            self._disconnected.set()

    def _gauges(self) -> Gauges:
        scheduler, (used, pages) = self.scheduler, self.scheduler.pages
        gauges = Gauges(
            scheduler.running,
            scheduler.queued,
            used,
            pages,
            scheduler.counts.queried_tokens,
            scheduler.counts.hit_tokens,
            scheduler.counts.preemptions,
        )
        if (speculation := scheduler.speculation) is not None:
            gauges = replace(gauges, drafted=speculation.drafted, accepted=speculation.accepted)
        traffic = None if self.model.experts is None else self.model.experts.cache_stats().total
        if traffic is None:
            return gauges
        reads = traffic.prefetched + traffic.misses
        return replace(gauges, expert_hits=traffic.hits, expert_reads=reads, expert_nbytes=traffic.nbytes)


def _fields(output: Output) -> tuple:
    """Return the fields of an output, without those that most outputs leave empty."""
    logprobs, finish_reason = output.logprobs, output.finish_reason
    scored, text, tokens = output.prompt_logprobs, output.text, output.tokens
    end = finish_reason, output.stop_string, output.error, output.stats
    fields = (text, tokens, logprobs, *end, scored, output.embedding)
    return fields if finish_reason is not None or logprobs or scored else fields[:2]
