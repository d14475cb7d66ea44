"""An answer as it comes: a text's events become what is thought, said and called."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from auraflux.run.request import Event, Figures, Scored
from auraflux.serve.deltas import CallBegin, Content, Delta, Finish, Logprobs, Reasoning, Said
from auraflux.serve.link import Writing
from auraflux.serve.metrics import Tally


class Reader(Protocol):
    """What takes a text apart."""

    def feed(self, text: str) -> list[Said]: ...
    def finish(self) -> list[Said]: ...


class Plain:
    """Reads a text that has no parts."""

    def feed(self, text: str) -> list[Said]:
        return [Content(text)] if text else []

    def finish(self) -> list[Said]:
        return []


class Answer:
    """One text that is being written for a client.

    prompt_tokens     of the whole prompt
    reasoning_tokens  that were thinking so far, to about a token
    finish            how it ended; None until then
    """

    def __init__(
        self,
        writing: Writing,
        reader: Reader,
        *,
        prompt_tokens: int,
        tally: Tally,
        ends: frozenset[int] = frozenset(),
        parallel: bool = True,
        over: Callable[["Answer"], None] = lambda answer: None,
    ):
        self.prompt_tokens, self.reasoning_tokens = prompt_tokens, 0
        self.finish: Finish | None = None
        self._writing, self._reader, self._ends, self._parallel = writing, reader, ends, parallel
        self._tally, self._over = tally, over
        self._begun = self._last = time.perf_counter()
        self._tokens, self._thinking, self._called, self._enough = 0, False, False, False
        self._cancelled = False
        self._why: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for deltas in self.batches():
            for delta in deltas:
                yield delta

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Give what comes together as one list; the last one ends with the only Finish."""
        async for event in self._writing:
            deltas = self._read(event)
            if deltas:
                yield deltas
            if self.finish is not None:
                return
        yield self._read(Event(finish="error", error="The model is no longer there."))

    def cancel(self) -> None:
        """Stop it; nothing happens if it has ended."""
        if self.finish is None and not self._cancelled:
            self._cancelled = True
            self._writing.cancel()
            self._end("cancelled")

    def expire_in(self, seconds: float) -> None:
        """Stop it with an error when it takes longer than that."""
        why = f"The answer took longer than the {seconds:g} seconds this server allows."
        self._timer = asyncio.get_running_loop().call_later(seconds, self.stop, why)

    def stop(self, why: str | None = None) -> None:
        """Stop it although a client waits for it, who is told why."""
        if self.finish is None and not self._cancelled:
            self._why = why
            self._writing.cancel()

    def _read(self, event: Event) -> list[Delta]:
        said = self._reader.feed(event.text) if event.text else []
        if event.finish is not None:
            said = said + self._reader.finish()
        self._observe(event)
        deltas: list[Delta] = list(self._followed(said))
        if self._thinking:
            self.reasoning_tokens += len(event.tokens)
        if event.scored and not self._enough and (shown := self._shown(event)):
            deltas.append(Logprobs(shown))
        if event.finish is not None:
            deltas.append(self._finished(event))
        return deltas

    def _followed(self, said: list[Said]) -> list[Said]:
        """Notice calls and thinking; drop what comes after the only call there may be."""
        for number, each in enumerate(said):
            self._thinking = type(each) is Reasoning
            if type(each) is CallBegin:
                self._called = True
                if each.index > 0 and not self._parallel and not self._enough:
                    self._enough = True
                    self._writing.cancel()
                    return said[:number]
        return [] if self._enough else said

    def _shown(self, event: Event) -> tuple[Scored, ...]:
        """Leave out the token that only ended the text."""
        ended = event.finish == "stop" and event.scored[-1].token in self._ends
        return event.scored[:-1] if ended else event.scored

    def _finished(self, event: Event) -> Finish:
        figures = event.figures or Figures(prompt_tokens=self.prompt_tokens, tokens=self._tokens)
        reason, error = event.finish or "error", event.error
        if self._why is not None and reason == "cancelled":
            reason, error = "error", self._why
        elif self._enough or (reason == "stop" and self._called):
            reason = "tool_calls"
        self.finish = Finish(reason, figures, event.stop, error)
        if not self._cancelled:
            self._end(reason)
        return self.finish

    def _observe(self, event: Event) -> None:
        if not event.tokens:
            return
        now, count = time.perf_counter(), len(event.tokens)
        if self._tokens:
            self._tally.between.observe((now - self._last) / count, count)
        else:
            self._tally.first.observe(now - self._begun)
        self._tally.generation_tokens += count
        self._tokens += count
        self._last = now

    def _end(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        figures = self.finish.figures if self.finish is not None else None
        self._tally.ended(reason, time.perf_counter() - self._begun, figures)
        self._over(self)
