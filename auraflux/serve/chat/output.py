"""One answer while it is generated: outputs of the scheduler become deltas."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from auraflux.engine.request import Output, RequestStats, TokenLogprob
from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs, ParsedDelta, Reasoning, ToolCallBegin
from auraflux.serve.metrics import Tally
from auraflux.serve.transport.link import OutputStream


class OutputParser(Protocol):
    """Streaming parser of generated text."""

    def feed(self, text: str) -> list[ParsedDelta]: ...
    def finish(self) -> list[ParsedDelta]: ...


class PlainTextParser:
    """Parser of text without markup."""

    def feed(self, text: str) -> list[ParsedDelta]:
        return [Content(text)] if text else []

    def finish(self) -> list[ParsedDelta]:
        return []


class ChatOutput:
    """One answer that is generated for a client.

    prompt_tokens     in the prompt
    reasoning_tokens  generated so far as reasoning, to about one token
    finish            None while it runs
    scored_prompt     the prompt's tokens, if their log probabilities are requested
    embedding         the prompt's, in float32, once a request for one has ended
    prompt_logprobs   of these tokens from the second on, once the first output has arrived
    """

    def __init__(
        self,
        stream: OutputStream,
        parser: OutputParser,
        *,
        prompt_tokens: int,
        tally: Tally,
        stop_token_ids: frozenset[int] = frozenset(),
        parallel_tool_calls: bool = True,
        scored_prompt: tuple[int, ...] | None = None,
        on_end: Callable[["ChatOutput"], None] = lambda output: None,
    ):
        self.prompt_tokens, self.reasoning_tokens = prompt_tokens, 0
        self.scored_prompt = scored_prompt
        self.embedding = b""
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.finish: Finish | None = None
        self._stream, self._parser, self._stop_token_ids = stream, parser, stop_token_ids
        self._parallel_tool_calls, self._tally, self._on_end = parallel_tool_calls, tally, on_end
        self._started_at = self._last_at = time.perf_counter()
        self._tokens, self._thinking, self._has_call, self._truncated = 0, False, False, False
        self._cancelled = False
        self._stop_error: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    async def __aiter__(self) -> AsyncIterator[Delta]:
        async for deltas in self.batches():
            for delta in deltas:
                yield delta

    async def batches(self) -> AsyncIterator[list[Delta]]:
        """Yield the deltas of each output as one list; the last list ends with the only Finish."""
        async for output in self._stream:
            deltas = self._deltas(output)
            if deltas:
                yield deltas
            if self.finish is not None:
                return
        yield self._deltas(Output(finish_reason="error", error="The model process has ended."))

    def cancel(self) -> None:
        """Cancel the generation; do nothing if it has ended."""
        if self.finish is None and not self._cancelled:
            self._cancelled = True
            self._stream.cancel()
            self._end("cancelled")

    def expire_in(self, seconds: float) -> None:
        """Stop the generation with an error after `seconds`."""
        error = f"The answer took longer than the {seconds:g} seconds this server allows."
        self._timer = asyncio.get_running_loop().call_later(seconds, self.stop, error)

    def stop(self, error: str | None = None) -> None:
        """Stop the generation while its client waits; the client receives `error`."""
        if self.finish is None and not self._cancelled:
            self._stop_error = error
            self._stream.cancel()

    def _deltas(self, output: Output) -> list[Delta]:
        self.prompt_logprobs = self.prompt_logprobs or output.prompt_logprobs
        self.embedding = output.embedding
        parsed = self._parser.feed(output.text) if output.text else []
        if output.finish_reason is not None:
            parsed = parsed + self._parser.finish()
        self._observe(output)
        deltas: list[Delta] = list(self._track(parsed))
        if self._thinking:
            self.reasoning_tokens += len(output.tokens)
        if output.logprobs and not self._truncated and (logprobs := self._visible_logprobs(output)):
            deltas.append(Logprobs(logprobs))
        if output.finish_reason is not None:
            deltas.append(self._finished(output))
        return deltas

    def _track(self, parsed: list[ParsedDelta]) -> list[ParsedDelta]:
        """Track calls and reasoning; drop everything after the first call where only one is allowed."""
        for number, each in enumerate(parsed):
            self._thinking = type(each) is Reasoning
            if type(each) is ToolCallBegin:
                self._has_call = True
                if each.index > 0 and not self._parallel_tool_calls and not self._truncated:
                    self._truncated = True
                    self._stream.cancel()
                    return parsed[:number]
        return [] if self._truncated else parsed

    def _visible_logprobs(self, output: Output) -> tuple[TokenLogprob, ...]:
        """Return the logprobs without the stop token's; clients that score prompts count on one for every token."""
        stopped = output.finish_reason == "stop" and output.logprobs[-1].token in self._stop_token_ids
        return output.logprobs[:-1] if stopped and self.scored_prompt is None else output.logprobs

    def _finished(self, output: Output) -> Finish:
        stats = output.stats or RequestStats(prompt_tokens=self.prompt_tokens, tokens=self._tokens)
        reason, error = output.finish_reason or "error", output.error
        if self._stop_error is not None and reason == "cancelled":
            reason, error = "error", self._stop_error
        elif self._truncated or (reason == "stop" and self._has_call):
            reason = "tool_calls"
        self.finish = Finish(reason, stats, output.stop_string, error)
        if not self._cancelled:
            self._end(reason)
        return self.finish

    def _observe(self, output: Output) -> None:
        if not output.tokens:
            return
        now, count = time.perf_counter(), len(output.tokens)
        if self._tokens:
            self._tally.inter_token.observe((now - self._last_at) / count, count)
        else:
            self._tally.ttft.observe(now - self._started_at)
        self._tally.generation_tokens += count
        self._tokens += count
        self._last_at = now

    def _end(self, reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        stats = self.finish.stats if self.finish is not None else None
        self._tally.ended(reason, time.perf_counter() - self._started_at, stats)
        self._on_end(self)
