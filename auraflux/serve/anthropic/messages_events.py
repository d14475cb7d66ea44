"""Answers in Anthropic's format: a stream of events, or one message."""

import json
import uuid
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import pydantic_core

from auraflux.engine.request import RequestStats
from auraflux.serve.chat.deltas import Content, Delta, Finish, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.failures import Failure, check_finish
from auraflux.serve.transport.sse import sse

REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":{"type":"%s","%s":'
# delta type and key, by block type
DELTA_KEYS = {
    "text": (b"text_delta", b"text"),
    "thinking": (b"thinking_delta", b"thinking"),
    "tool_use": (b"input_json_delta", b"partial_json"),
}
ENDED = b"}}\n\n"
EMPTY = {"text": {"type": "text", "text": ""}, "thinking": {"type": "thinking", "thinking": "", "signature": ""}}
# Anthropic's error types by status
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
    """Encoder of one answer's events. Blocks are consecutive: a new one ends the last."""

    def __init__(self, model: str, prompt_tokens: int) -> None:
        self._model = model
        self._prompt_tokens = prompt_tokens
        self._index = -1
        self._open = ""
        self._head = b""

    def first(self) -> bytes:
        """Return the event that opens the stream."""
        message = envelope(self._model, [], RequestStats(prompt_tokens=self._prompt_tokens))
        return _event("message_start", message=message)

    def encode(self, delta: Delta) -> bytes:
        """Return the events of a delta; a Finish ends the message, or raises its failure."""
        if type(delta) is Content:
            return self._more("text", delta.text)
        if type(delta) is Reasoning:
            return self._more("thinking", delta.text)
        if type(delta) is ToolCallArguments:
            return self._head + quoted(delta.text).encode() + ENDED
        if type(delta) is ToolCallBegin:
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
        self._head = DELTA % (self._index, *DELTA_KEYS[self._open])
        started = _event("content_block_start", index=self._index, content_block=block)
        return before + started + (PING if self._index == 0 else b"")

    def _end_block(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = DELTA % (self._index, b"signature_delta", b"signature") + b'""' + ENDED
        self._open = ""
        return signature + _event("content_block_stop", index=self._index)


async def stream(batches: AsyncIterable[Sequence[Delta]], model: str, prompt_tokens: int) -> AsyncIterator[bytes]:
    """Yield the events of an answer as deltas arrive."""
    events = MessageEvents(model, prompt_tokens)
    yield events.first()
    async for deltas in batches:
        yield b"".join([events.encode(delta) for delta in deltas])


async def message(batches: AsyncIterable[Sequence[Delta]], model: str) -> dict[str, Any]:
    """Return the complete message; raise Failure if the answer was interrupted."""
    blocks: list[tuple[dict[str, Any], list[str]]] = []
    finish: Finish | None = None
    async for deltas in batches:
        for delta in deltas:
            if type(delta) is ToolCallBegin:
                blocks.append(({"type": "tool_use", "id": delta.id, "name": delta.name}, []))
            elif type(delta) is ToolCallArguments:
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
    return envelope(model, [_filled(block, "".join(parts)) for block, parts in blocks], finish.stats, reason, stop)


def envelope(
    model: str, content: list[dict[str, Any]], stats: RequestStats, reason: str | None = None, stop: str | None = None
) -> dict[str, Any]:
    """Return a message with its content blocks."""
    return {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": stop,
        "usage": usage(stats),
    }


def usage(stats: RequestStats) -> dict[str, int]:
    """Return token usage in Anthropic's format: input_tokens excludes cached tokens."""
    return {
        "input_tokens": stats.prompt_tokens - stats.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": stats.cached_tokens,
        "output_tokens": stats.tokens,
    }


def ending(finish: Finish) -> tuple[str, str | None]:
    """Return stop_reason and stop_sequence; raise the failure of an interrupted answer."""
    check_finish(finish)
    if finish.reason == "stop" and finish.stop_string is not None:
        return "stop_sequence", finish.stop_string
    return REASONS[finish.reason], None


def error(failure: Failure) -> dict[str, Any]:
    """Return a failure in Anthropic's format."""
    kind = KINDS.get(failure.status, "invalid_request_error" if failure.status < 500 else "api_error")
    # clients detect this prefix and compact the conversation
    prefix = "prompt is too long: " if failure.code == "context_length_exceeded" else ""
    return {"type": "error", "error": {"type": kind, "message": prefix + failure.message}}


def error_event(failure: Failure) -> bytes:
    """Return the event for a failure after the first byte."""
    return sse(error(failure), "error")


def _last(finish: Finish) -> bytes:
    reason, stop = ending(finish)
    delta = {"stop_reason": reason, "stop_sequence": stop}
    return _event("message_delta", delta=delta, usage=usage(finish.stats)) + STOP


def _event(kind: str, **fields: Any) -> bytes:
    # escaped: some clients split lines at other characters than line feeds
    return sse(json.dumps({"type": kind, **fields}, separators=(",", ":")), kind)


def _filled(block: dict[str, Any], text: str) -> dict[str, Any]:
    if block["type"] == "tool_use":
        return {**block, "input": _arguments(text)}
    if block["type"] == "thinking":
        return {**block, "thinking": text, "signature": ""}
    return {**block, "text": text}


def _arguments(text: str) -> dict[str, Any]:
    """Parse a call's arguments, also truncated ones."""
    try:
        parsed = pydantic_core.from_json(text, allow_partial=True, allow_inf_nan=False)
    except ValueError:
        return {}
    return parsed if isinstance(parsed, dict) else {}
