"""An answer as OpenAI's Responses spell it: a stream of numbered events, or the response they end with."""

import json
import time
import uuid
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from auraflux.run.request import Figures, Scored
from auraflux.serve.deltas import CallArguments, CallBegin, Content, Delta, Finish, Logprobs, Reasoning
from auraflux.serve.failures import Failure, check_finish
from auraflux.serve.stream import sse

Object = dict[str, Any]
# the prefix of an item's id, and the name of its events, by the item's type
ITEMS = {
    "reasoning": ("rs", "reasoning_text"),
    "message": ("msg", "output_text"),
    "function_call": ("fc", "function_call_arguments"),
}
ENDED = b"}\n\n"


def error_event(failure: Failure) -> bytes:
    """Spell an error of a stream whose events are not known here."""
    told = {"code": failure.code, "message": failure.message, "param": failure.param, "sequence_number": 0}
    return sse({"type": "error", **told}, "error")


class ResponseEvents:
    """The events of one answer, and the response they tell of. Items come one after another: a new one ends the one before.

    response  as of the last event
    spell     gives a token with its probability as JSON
    """

    def __init__(self, response: Object, spell: Callable[[Scored], Object]) -> None:
        self.response = response
        self._spell = spell
        self._sequence = 0
        self._item: Object = {}
        self._kind = ""
        self._texts: list[str] = []
        self._scored: list[Object] = []
        # probabilities may come before the text they belong to is sure
        self._unsent: list[Object] = []
        self._head = b""
        self._tail = ENDED
        self._reasoning_tokens = 0

    def begin(self) -> bytes:
        created = self._event("response.created", response=self.response)
        return created + self._event("response.in_progress", response=self.response)

    def take(self, deltas: Sequence[Delta], reasoning_tokens: int = 0) -> bytes:
        """Give the events that deltas make which came together; a Finish gives the last ones, or raises what went wrong."""
        for delta in deltas:
            if type(delta) is Logprobs:
                self._keep(delta, {type(each) for each in deltas})
        self._reasoning_tokens = reasoning_tokens
        return b"".join([self._one(delta) for delta in deltas])

    def fail(self, failure: Failure) -> bytes:
        """Give the event that ends a stream where the answer breaks off."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": failure.code or "server_error", "message": failure.message}
        return self._event("response.failed", response=self.response)

    def _one(self, delta: Delta) -> bytes:
        if type(delta) is Content:
            return self._more("message", delta.text)
        if type(delta) is Reasoning:
            return self._more("reasoning", delta.text)
        if type(delta) is CallArguments:
            return self._delta(delta.text)
        if type(delta) is CallBegin:
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

    def _keep(self, delta: Logprobs, beside: set[type]) -> None:
        """Keep probabilities until their text is told; only those of messages are."""
        if Content in beside or beside <= {Logprobs, Finish}:
            self._unsent += [self._spell(scored) for scored in delta.scored]
        else:
            self._unsent = []

    def _delta(self, text: str) -> bytes:
        self._texts.append(text)
        self._sequence += 1
        tail = self._tail
        if self._unsent and self._kind == "message":
            tail = f',"logprobs":{json.dumps(self._unsent)}'.encode() + ENDED
            self._scored += self._unsent
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
        kind, text, place = self._kind, "".join(self._texts), self._place()
        name = f"response.{ITEMS[kind][1]}.done"
        if kind == "function_call":
            done = self._event(name, **place, name=self._item["name"], arguments=text)
            self._item = {**self._item, "status": status, "arguments": text}
        else:
            part = _part(kind, text, self._scored)
            scored = {"logprobs": self._scored} if kind == "message" else {}
            done = self._event(name, **place, text=text, **scored)
            done += self._event("response.content_part.done", **place, part=part)
            self._item = {**self._item, "status": status, "content": [part]}
        done += self._event("response.output_item.done", output_index=place["output_index"], item=self._item)
        self.response["output"].append(self._item)
        self._kind, self._texts, self._scored = "", [], []
        return done

    def _last(self, finish: Finish) -> bytes:
        status = "incomplete" if finish.reason == "length" else "completed"
        self.response["status"] = status
        self.response["usage"] = usage(finish.figures, self._reasoning_tokens)
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            self.response["completed_at"] = int(time.time())
        return self._event(f"response.{status}", response=self.response)

    def _event(self, kind: str, **fields: Any) -> bytes:
        # escaped, for there are clients that break lines at more than line feeds
        told = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return sse(json.dumps(told, separators=(",", ":")), kind)


def usage(figures: Figures, reasoning_tokens: int) -> Object:
    """Count tokens as Responses do."""
    return {
        "input_tokens": figures.prompt_tokens,
        "input_tokens_details": {"cached_tokens": figures.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": figures.tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": figures.prompt_tokens + figures.tokens,
    }


def _part(kind: str, text: str, scored: list[Object]) -> Object:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": scored}
