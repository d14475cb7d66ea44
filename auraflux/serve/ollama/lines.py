"""Answers in Ollama's format: lines of JSON, or one object."""

import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, ClassVar

from pydantic_core import from_json

from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.failures import Failure, check_finish
from auraflux.serve.openai.logprobs import chat_logprob
from auraflux.serve.transport.sse import EventStream
from auraflux.serve.usage import stats_of
from auraflux.tokenizer.tokenizer import Tokenizer

Json = dict[str, Any]
NDJSON = "application/x-ndjson"


class LineStream(EventStream):
    """Response that streams lines of JSON. Clients parse every line, so an idle stream stays silent."""

    media_headers: ClassVar[dict[str, str]] = {"content-type": NDJSON, "cache-control": "no-cache", "x-accel-buffering": "no"}
    keep_alive: ClassVar[bytes | None] = None


@dataclass
class Part:
    """New text, reasoning, complete tool calls and log probabilities of an answer."""

    content: str = ""
    thinking: str = ""
    calls: list[Json] = field(default_factory=list)
    logprobs: list[Json] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.content or self.thinking or self.calls or self.logprobs)

    @property
    def extra(self) -> Json:
        """The fields that are left out where they are empty."""
        found = {"thinking": self.thinking, "tool_calls": self.calls}
        return {name: value for name, value in found.items() if value}


def chat_fields(part: Part) -> Json:
    """Return the fields of a part in /api/chat."""
    return {"message": {"role": "assistant", "content": part.content, **part.extra}}


def generate_fields(part: Part) -> Json:
    """Return the fields of a part in /api/generate."""
    return {"response": part.content, **part.extra}


class AnswerLines:
    """Encoder of one answer.

    fields  places a part's text in an object: `chat_fields` or `generate_fields`
    """

    def __init__(self, model: str, output: ChatOutput, fields: Callable[[Part], Json], tokenizer: Tokenizer | None):
        self._model, self._output, self._fields, self._tokenizer = model, output, fields, tokenizer
        self._call: ToolCallBegin | None = None
        self._arguments = ""

    async def stream(self) -> AsyncIterator[bytes]:
        """Yield a line for each part, then one with the counters."""
        async for deltas in self._output.batches():
            part = self._part(deltas)
            lines = b"" if part.empty else line(self._object(part))
            if type(deltas[-1]) is Finish:
                check_finish(deltas[-1])
                lines += line(self._object(Part()) | self._counters(deltas[-1]))
            if lines:
                yield lines

    async def full_response(self) -> Json:
        """Return the complete answer."""
        whole, end = Part(), None
        async for deltas in self._output.batches():
            part = self._part(deltas)
            whole.content += part.content
            whole.thinking += part.thinking
            whole.calls += part.calls
            whole.logprobs += part.logprobs
            if type(deltas[-1]) is Finish:
                end = deltas[-1]
        assert end is not None, "an output ends with a Finish"
        check_finish(end)
        return self._object(whole) | self._counters(end)

    def _object(self, part: Part) -> Json:
        logprobs = {"logprobs": part.logprobs} if part.logprobs else {}
        return {"model": self._model, "created_at": timestamp(), **self._fields(part), **logprobs, "done": False}

    def _part(self, deltas: list[Delta]) -> Part:
        part = Part()
        for delta in deltas:
            if type(delta) is Content:
                part.content += delta.text
            elif type(delta) is Reasoning:
                part.thinking += delta.text
            elif type(delta) is Logprobs and self._tokenizer is not None:
                part.logprobs += [chat_logprob(self._tokenizer, each) for each in delta.tokens]
            elif type(delta) is ToolCallArguments:
                self._arguments += delta.text
            elif type(delta) in (ToolCallBegin, Finish):
                part.calls += self._ended_call()
                self._call = delta if type(delta) is ToolCallBegin else None
        return part

    def _ended_call(self) -> list[Json]:
        """Return the call whose arguments are complete; none if the answer's end cut it short."""
        call, arguments, self._arguments = self._call, self._arguments, ""
        if call is None:
            return []
        try:
            parsed = from_json(arguments or "{}", allow_inf_nan=False)
        except ValueError:
            return []
        return [{"id": call.id, "function": {"index": call.index, "name": call.name, "arguments": parsed}}]

    def _counters(self, end: Finish) -> Json:
        stats = stats_of(self._output)
        return {
            "done": True,
            "done_reason": "length" if end.reason == "length" else "stop",
            "total_duration": _ns(stats.total_s),
            "load_duration": 0,
            "prompt_eval_count": stats.prompt_tokens,
            "prompt_eval_duration": _ns(stats.ttft_s - stats.queue_s),
            "eval_count": stats.tokens,
            "eval_duration": _ns(stats.total_s - stats.ttft_s),
        }


def line(content: Json) -> bytes:
    """Return an object as a line of JSON."""
    return (json.dumps(content, ensure_ascii=False, separators=(",", ":")) + "\n").encode(errors="replace")


def error_line(failure: Failure) -> bytes:
    """Return the line for an error after the first byte."""
    return line({"error": failure.message})


def without_answer(model: str, fields: Callable[[Part], Json], reason: str) -> Json:
    """Return the response to a request without a prompt, which asks to load or unload the model."""
    return {"model": model, "created_at": timestamp(), **fields(Part()), "done": True, "done_reason": reason}


def timestamp(seconds: float | None = None) -> str:
    """Return a time in the format of RFC 3339; None for now."""
    at = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return at.isoformat().replace("+00:00", "Z")


def _ns(seconds: float) -> int:
    return max(0, round(seconds * 1e9))
