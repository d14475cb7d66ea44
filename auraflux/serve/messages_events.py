"""An answer as Anthropic spells it: a stream of events, or one message."""

import json
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import pydantic_core

from auraflux.run.request import Figures
from auraflux.serve.deltas import CallArguments, CallBegin, Content, Delta, Finish, Reasoning
from auraflux.serve.failures import Failure, check_finish
from auraflux.serve.stream import sse

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
# the delta's type and its key, by the block's type
SPELLED = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
ENDED = b"}}\n\n"
EMPTY = {"text": {"type": "text", "text": ""}, "thinking": {"type": "thinking", "thinking": "", "signature": ""}}
# what Anthropic calls an error, by its status; 529 is its own for a server that has too much to do
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class MessageEvents:
    """The events of one answer. Blocks come one after another: a new one ends the one before."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open = ""
        self._head = b""

    def begin(self) -> bytes:
        message = envelope(self._model, [], Figures(prompt_tokens=self._prompt_tokens))
        return _event("message_start", message=message)

    def take(self, delta: Delta) -> bytes:
        """Give the events that a delta makes; a Finish gives the last ones, or raises what went wrong."""
        if type(delta) is Content:
            return self._more("text", delta.text)
        if type(delta) is Reasoning:
            return self._more("thinking", delta.text)
        if type(delta) is CallArguments:
            return self._head + quoted(delta.text).encode() + ENDED
        if type(delta) is CallBegin:
            return self._begin_block({"type": "tool_use", "id": delta.id, "name": delta.name, "input": {}})
        if type(delta) is Finish:
            return self._end_block() + _last(delta)
        return b""

    def _more(self, kind: str, text: str) -> bytes:
        before = b"" if self._open == kind else self._begin_block(EMPTY[kind])
        return before + self._head + quoted(text).encode() + ENDED

    def _begin_block(self, block: dict[str, Any]) -> bytes:
        before = self._end_block()
        self._index += 1
        self._open = block["type"]
        self._head = DELTA % (self._index, *SPELLED[self._open])
        begun = _event("content_block_start", index=self._index, content_block=block)
        return before + begun + (PING if self._index == 0 else b"")

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = DELTA % (self._index, b"signature_delta", b"signature") + b'""' + ENDED
        self._open = ""
        return signature + _event("content_block_stop", index=self._index)


async def stream(batches: AsyncIterable[Sequence[Delta]], model: str, prompt_tokens: int) -> AsyncIterator[bytes]:
    """Give the events of an answer as they come."""
    events = MessageEvents(model, prompt_tokens)
    yield events.begin()
    async for deltas in batches:
        yield b"".join([events.take(delta) for delta in deltas])


async def message(batches: AsyncIterable[Sequence[Delta]], model: str) -> dict[str, Any]:
    """Give an answer whole. Failure where it breaks off."""
    blocks: list[tuple[dict[str, Any], list[str]]] = []
    finish: Finish | None = None
    async for deltas in batches:
        for delta in deltas:
            if type(delta) is CallBegin:
                blocks.append(({"type": "tool_use", "id": delta.id, "name": delta.name}, []))
            elif type(delta) is CallArguments:
                blocks[-1][1].append(delta.text)
            elif type(delta) is Content or type(delta) is Reasoning:
                kind = "text" if type(delta) is Content else "thinking"
                if not blocks or blocks[-1][0]["type"] != kind:
                    blocks.append(({"type": kind}, []))
                blocks[-1][1].append(delta.text)
            elif type(delta) is Finish:
                finish = delta
    assert finish is not None, "an answer ends with a Finish"
    reason, stop = ending(finish)
    return envelope(model, [_filled(block, "".join(texts)) for block, texts in blocks], finish.figures, reason, stop)


def envelope(
    model: str, content: list[dict[str, Any]], figures: Figures, reason: str | None = None, stop: str | None = None
) -> dict[str, Any]:
    """Give a message around its blocks."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage(figures),
    }


def usage(figures: Figures) -> dict[str, int]:
    """Count tokens as Anthropic does: those that were cached are not among the input's."""
    return {
        "input_tokens": figures.prompt_tokens - figures.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": figures.cached_tokens,
        "output_tokens": figures.tokens,
    }


def ending(finish: Finish) -> tuple[str, str | None]:
    """Give stop_reason and stop_sequence, or raise what went wrong."""
    check_finish(finish)
    if finish.reason == "stop" and finish.stop is not None:
        return "stop_sequence", finish.stop
    return REASONS[finish.reason], None


def error(failure: Failure) -> dict[str, Any]:
    """Spell a failure as Anthropic does."""
    kind = KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    # by these words clients know that they must shorten the conversation
    long = "prompt is too long: " if failure.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": long + failure.message}}


def error_event(failure: Failure) -> bytes:
    """Spell a failure that comes after the first byte."""
    return sse(error(failure), "error")


def _last(finish: Finish) -> bytes:
    reason, stop = ending(finish)
    delta = {"stop_reason": reason, "stop_sequence": stop}
    return _event("message_delta", delta=delta, usage=usage(finish.figures)) + STOP


def _event(kind: str, **fields: Any) -> bytes:
    # escaped, for there are clients that break lines at more than line feeds
    return sse(json.dumps({"type": kind, **fields}, separators=(",", ":")), kind)


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {**block, "input": _arguments(text)}
    if block["type"] == "thinking":
        return {**block, "thinking": text, "signature": ""}
    return {**block, "text": text}


def _arguments(text: str) -> dict[str, Any]:
    """Read a call's arguments; of those that were cut off, what is there."""
    try:
        read = pydantic_core.from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return read if isinstance(read, dict) else {}
