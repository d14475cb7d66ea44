"""`LanguageModel`: what `auraflux.load` gives. Text or tokens in, text or tokens or scores out."""

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from auraflux.errors import InputError, SettingsError
from auraflux.run.job import Job
from auraflux.run.request import Event, Figures, Request
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler
from auraflux.run.stats import Stats
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.placement import Dealt
from auraflux.weights.traffic import ExpertTraffic

Prompt = str | Sequence[int]
Message = dict[str, Any]


class LanguageModel:
    """A loaded model with its tokenizer and cache. Threads may share it: each gets its own text, all are written together.

    path        where it came from
    model_type  the name of its family
    tokenizer   None for a folder without one: such a model reads and writes tokens as numbers
    scheduler   of everything that is written
    stats       of the last generation
    notes       what a user should know about how the weights were taken
    experts     of a packed model; its `traffic()` says what was read so far
    """

    def __init__(
        self, scheduler: Scheduler, path: Path, notes: list[str], experts: ExpertStore | None = None, *, model_type: str = ""
    ):
        self.scheduler, self.engine, self.tokenizer = scheduler, scheduler.engine, scheduler.intake.tokenizer
        self.path, self.notes, self.experts, self.model_type = path, notes, experts, model_type
        self.stats = Stats()

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self.engine.cache.context

    def logits(self, ids: Prompt) -> Tensor:
        """Score the token after each token of a text, reading the text through the cache: [T, V] float32."""
        tokens = self._ids(ids)
        self.scheduler.check(Request(tuple(tokens)))
        with self.scheduler.claimed():
            sequence = self.engine.cache.open()
            try:
                return self.engine.all_scores(sequence, tokens)
            finally:
                sequence.close()

    def generate(self, prompt: Prompt, **sampling: Any) -> Iterator[str]:
        """Continue a prompt: pieces of text as they come. Settings are those of `Sampling`: max_tokens, temperature, ..."""
        written = self._write(self._ids(prompt), sampling)
        return (event.text for _, event in written if event.text)

    def tokens(self, prompt: Prompt, **sampling: Any) -> Iterator[int]:
        """Continue a prompt: tokens as they come."""
        return _tokens_of(self._write(self._ids(prompt), sampling))

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Iterator[str]:
        """Answer the last of some messages ({"role": ..., "content": ...}): pieces of text as they come.

        What the cache still holds of the conversation is not computed again.
        """
        written = self._written(self._chat_request(messages, sampling))
        return (event.text for _, event in written if event.text)

    def generate_batch(self, prompts: Sequence[Prompt], **sampling: Any) -> list[str]:
        """Continue several prompts together, each as if it were alone."""
        return self._write_all([self._request(self._ids(prompt), sampling) for prompt in prompts])

    def chat_batch(self, conversations: Sequence[Sequence[Message]], **sampling: Any) -> list[str]:
        """Answer the last message of each conversation, each as if it were alone."""
        return self._write_all([self._chat_request(messages, sampling) for messages in conversations])

    def _write_all(self, requests: list[Request]) -> list[str]:
        self.stats, before = Stats(), self._traffic()
        texts: list[list[Event]] = [[] for _ in requests]
        jobs = [self.scheduler.submit(request, text.append) for request, text in zip(requests, texts, strict=True)]
        try:
            for job in jobs:
                self.scheduler.wait(lambda job=job: job.finish is not None)  # type: ignore[misc]
                _raise_failure(job)
        finally:
            for job in jobs:
                self.scheduler.cancel(job)
        if jobs:
            self._measure(self.stats, [_figures(text[-1]) for text in texts], before)
        return ["".join(event.text for event in text) for text in texts]

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the answer begins."""
        tokenizer = self._need_tokenizer("a conversation")
        return tokenizer.encode(tokenizer.apply_template(list(messages)), special=False)

    def reset(self) -> None:
        """Forget what earlier calls left in the cache."""
        with self.scheduler.claimed():
            self.scheduler.prefixes.clear()

    def deal_experts(self) -> Dealt:
        """Deal experts out to ranks by how often each was chosen, between two steps: texts that are being written go on."""
        if self.engine.ranks is None:
            raise SettingsError("one process has all experts: there are no ranks to deal them out to.")
        with self.scheduler.claimed():
            return self.engine.ranks.deal_experts()

    def _write(self, prompt: list[int], sampling: dict[str, Any]) -> Iterator[tuple[Job, Event]]:
        return self._written(self._request(prompt, sampling))

    def _written(self, request: Request) -> Iterator[tuple[Job, Event]]:
        stats, before, events = Stats(), self._traffic(), deque[Event]()
        self.stats = stats
        job = self.scheduler.submit(request, events.append)
        try:
            while job.finish is None or events:
                self.scheduler.wait(lambda: bool(events))
                event = events.popleft()
                if event.figures is not None:
                    self._measure(stats, [event.figures], before)
                    _raise_failure(job)
                yield job, event
        finally:
            self.scheduler.cancel(job)

    def _request(self, prompt: list[int], sampling: dict[str, Any], ends: frozenset[int] | None = None) -> Request:
        """A request that is sure to be taken on."""
        request = Request(tuple(prompt), _sampling(sampling), ends=ends)
        self.scheduler.check(request)
        return request

    def _chat_request(self, messages: Sequence[Message], sampling: dict[str, Any]) -> Request:
        """A request that also ends where the template ends a reply."""
        prompt = self.chat_ids(messages)
        return self._request(prompt, sampling, self.scheduler.intake.ends | self._need_tokenizer("a conversation").turn_ends)

    def _traffic(self) -> ExpertTraffic | None:
        return None if self.experts is None or self.experts.share.mapped else self.experts.traffic()

    def _measure(self, stats: Stats, figures: list[Figures], before: ExpertTraffic | None) -> None:
        stats.set(figures)
        stats.invariant = self.engine.runner.invariant
        after = self._traffic()
        if after is not None and before is not None:
            stats.experts = after - before

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer("text").encode(prompt)
        return _token_ids(prompt)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InputError(f"{self.path} has no tokenizer files, so {what} cannot be read. Give a list of token ids.")
        return self.tokenizer


def _token_ids(prompt: Any) -> list[int]:
    """A list of plain numbers, from whatever holds whole ones."""
    try:
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise TypeError
        tokens = list(prompt)
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError as err:
        raise InputError(f"a prompt is text or a list of token ids, not {prompt!r:.80}.") from err


def _tokens_of(written: Iterator[tuple[Job, Event]]) -> Iterator[int]:
    count = 0
    for job, _ in written:
        new = job.stream.tokens[count:]
        count += len(new)
        yield from new


def _figures(event: Event) -> Figures:
    assert event.figures is not None, "the last event has figures"
    return event.figures


def _raise_failure(job: Job) -> None:
    if job.failure is not None:
        raise job.failure


def _sampling(given: dict[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    strange = sorted(set(given) - set(known))
    if strange:
        raise InputError(f"there is no setting {', '.join(strange)}. Those there are: {', '.join(known)}.")
    return Sampling(**given)
