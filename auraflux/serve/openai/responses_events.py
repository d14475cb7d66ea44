"""Answers in OpenAI's Responses format: a stream of numbered events, or the final response."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from auraflux.engine.request import RequestStats, TokenLogprob
from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.failures import Failure, check_finish
from auraflux.serve.transport.sse import sse

Object = dict[str, Any]
# prefix of an item's id and name of its events, by item type
ITEMS = {
    "reasoning": ("rs", "reasoning_text"),
    "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}
ENDED = b"}\n\n"


def error_event(failure: Failure) -> bytes:
    """Return the error event for a stream that another process began."""
    fields = {"code": failure.code, "message": failure.message, "param": failure.param, "sequence_number": 0}
    return sse({"type": "error", **fields}, "error")


class ResponseEvents:
    """Encoder of one answer's events, and the response they describe. Items are consecutive: a new one ends the last.

    response        as of the last event
    encode_logprob  returns a token's logprob as JSON
    """

    def __init__(self, response: Object, encode_logprob: Callable[[TokenLogprob], Object]) -> None:
        self.response = response
        self._encode_logprob = encode_logprob
        self._sequence = 0
        self._item: Object = {}
        self._kind = ""
        self._parts: list[str] = []
        self._logprobs: list[Object] = []
        # logprobs may arrive before their text is final
        self._unsent: list[Object] = []
        self._head = b""
        self._tail = ENDED
        self._reasoning_tokens = 0

    def first(self) -> bytes:
        """Return the events that open the stream."""
        created = self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def encode(self, deltas: Sequence[Delta], reasoning_tokens: int = 0) -> bytes:
        """Return the events of deltas that arrived together; a Finish ends the response, or raises its failure."""
        for delta in deltas:
            if type(delta) is Logprobs:
                self._hold_logprobs(delta, {type(each) for each in deltas})
        self._reasoning_tokens = reasoning_tokens
        return b"".join([self._encode_delta(delta) for delta in deltas])

    def fail(self, failure: Failure) -> bytes:
        """Return the event that ends the stream of an interrupted answer."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": failure.code or "server_error", "message": failure.message}
        return self._event("response.failed", response=self.response)

    def _encode_delta(self, delta: Delta) -> bytes:
        if type(delta) is Content:
            return self._more("message", delta.text)
        if type(delta) is Reasoning:
            return self._more("reasoning", delta.text)
        if type(delta) is ToolCallArguments:
            return self._delta(delta.text)
        if type(delta) is ToolCallBegin:
            return self._begin_item("function_call", call_id=delta.id, name=delta.name, arguments="")
        if type(delta) is Finish:
            check_finish(delta)
            return self._end_item("incomplete" if delta.reason == "length" else "completed") + self._last(delta)
        return b""

    def _more(self, kind: str, text: str) -> bytes:
        if self._kind == kind:
            return self._delta(text)
        fields: Object = {"role": "assistant"} if kind == "message" else {"summary": []}
        before = self._begin_item(kind, **fields, content=[])
        added = self._event("response.content_part.added", **self._place(), part=_part(kind, "", []))
        return before + added + self._delta(text)

    def _hold_logprobs(self, delta: Logprobs, kinds: set[type]) -> None:
        """Hold logprobs until their text is sent; only messages have them."""
        if Content in kinds or kinds <= {Logprobs, Finish}:
            self._unsent += [self._encode_logprob(token) for token in delta.tokens]
        else:
            self._unsent = []

    def _delta(self, text: str) -> bytes:
        self._parts.append(text)
        self._sequence += 1
        tail = self._tail
        if self._unsent and self._kind == "message":
            tail = f',"logprobs":{json.dumps(self._unsent)}'.encode() + ENDED
            self._logprobs += self._unsent
            self._unsent = []
        return b'%s%d,"delta":%s%s' % (self._head, self._sequence - 1, quoted(text).encode(), tail)

    def _place(self) -> Object:
        place = {"item_id": self._item["id"], "output_index": len(self.response["output"])}
        return place if self._kind == "function_call" else {**place, "content_index": 0}

    def _begin_item(self, kind: str, **fields: Any) -> bytes:
        before = self._end_item("completed")
        prefix, name = ITEMS[kind]
        self._kind = kind
        self._item = {"id": f"{prefix}_{uuid.uuid4().hex}", "type": kind, "status": "in_progress", **fields}
        event = f"response.{name}.delta"
        place = json.dumps({"type": event, **self._place()}, separators=(",", ":"))
        self._head = f'event: {event}\ndata: {place[:-1]},"sequence_number":'.encode()
        self._tail = b',"logprobs":[]' + ENDED if kind == "message" else ENDED
        return before + self._event("response.output_item.added", output_index=len(self.response["output"]), item=self._item)

    def _end_item(self, status: str) -> bytes:
        if not self._kind:
            return b""
        kind, text, place = self._kind, "".join(self._parts), self._place()
        name = f"response.{ITEMS[kind][1]}.done"
        if kind == "function_call":
            done = self._event(name, **place, name=self._item["name"], arguments=text)
            self._item = {**self._item, "status": status, "arguments": text}
        else:
            part = _part(kind, text, self._logprobs)
            logprobs = {"logprobs": self._logprobs} if kind == "message" else {}
            done = self._event(name, **place, text=text, **logprobs)
            done += self._event("response.content_part.done", **place, part=part)
            self._item = {**self._item, "status": status, "content": [part]}
        done += self._event("response.output_item.done", output_index=place["output_index"], item=self._item)
        self.response["output"].append(self._item)
        self._kind, self._parts, self._logprobs = "", [], []
        return done

    def _last(self, finish: Finish) -> bytes:
        status = "incomplete" if finish.reason == "length" else "completed"
        self.response["status"] = status
        self.response["usage"] = usage(finish.stats, self._reasoning_tokens)
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return self._event(f"response.{status}", response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        # escaped: some clients split lines at other characters than line feeds
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(json.dumps(event, separators=(",", ":")), kind)


def usage(stats: RequestStats, reasoning_tokens: int) -> Object:
    """Return token usage in Responses format."""
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": stats.prompt_tokens + stats.tokens,
    }


def _part(kind: str, text: str, logprobs: list[Object]) -> Object:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
