"""The record of one request, made from its response."""

import json
from dataclasses import dataclass, field
from typing import Any

from auraflux.bench.load.response import Response

LAST_EVENTS = 4  # of a stream: they may hold usage, an error and [DONE]
MAX_REASON = 120  # characters of a server's message


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds of the machine's monotonic clock, which all its processes share.

    sent     when it was due
    ended    when its response ended, or when it failed
    times    of arrivals that held tokens
    events   in each of these: one token each, unless `tokens` says otherwise
    prompt   prompt tokens, by the server's count
    tokens   output tokens
    cached   prompt tokens from the prefix cache; None where the server does not report them
    refused  how often it was sent again because the server was busy
    failure  why there is no complete response; None where there is one
    """

    client: int
    sent: float
    ended: float
    times: list[float] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    prompt: int = 0
    tokens: int = 0
    cached: int | None = None
    refused: int = 0
    failure: str | None = None

    @property
    def streamed(self) -> bool:
        return bool(self.times)


def judge(response: Response, client: int, sent: float, refused: int) -> Record:
    """Turn a response that ended, well or not, into a record."""
    if response.status != 200:
        message = _error(response.json())
        failed = f"HTTP {response.status}" + (f": {message}" if message else "")
        return Record(client, sent, response.last, refused=refused, failure=failed)
    return _judge_stream(response, client, sent, refused) if response.streamed else _judge_body(response, client, sent, refused)


def _judge_body(response: Response, client: int, sent: float, refused: int) -> Record:
    found = response.json() if response.complete else None
    if message := _error(found):
        return Record(client, sent, response.last, refused=refused, failure=f"error in the answer: {message}")
    usage = found.get("usage") if isinstance(found, dict) else None
    if not isinstance(usage, dict):
        failed = "an answer without usage" if response.complete else "an answer broke off"
        return Record(client, sent, response.last, refused=refused, failure=failed)
    prompt, tokens, cached = _usage(usage)
    return Record(client, sent, response.last, [], [], prompt, tokens, cached, refused)


def _judge_stream(response: Response, client: int, sent: float, refused: int) -> Record:
    """Check the end of a stream: an error or a missing [DONE] is a failure; events without tokens do not count."""
    data = response.last_events(LAST_EVENTS)
    last = [_parsed(each) for each in data]
    errors = [message for message in map(_error, last) if message]
    usage = next((event["usage"] for event in reversed(last) if isinstance(event, dict) and event.get("usage")), None)
    bare = data.count(b"[DONE]") + sum(isinstance(event, dict) and not event.get("choices") for event in last)
    times, events = _drop(response.times, response.events, bare)
    prompt, tokens, cached = _usage(usage) if isinstance(usage, dict) else (0, sum(events), None)
    if sum(events) == tokens + 1:
        # the last event holds only the finish reason
        times, events = _drop(times, events, 1)
    failed = None
    if errors:
        failed = f"error in the stream: {errors[0]}"
    elif b"[DONE]" not in data:
        failed = "a stream broke off before its end"
    elif not tokens or not times:
        failed = "a stream without tokens"
    return Record(client, sent, response.last, times, events, prompt, tokens, cached, refused, failed)


def _drop(times: list[float], events: list[int], count: int) -> tuple[list[float], list[int]]:
    """Remove `count` events from the end."""
    times, events = list(times), list(events)
    while count and events:
        taken = min(count, events[-1])
        count -= taken
        events[-1] -= taken
        if not events[-1]:
            events.pop()
            times.pop()
    return times, events


def _usage(usage: dict[str, Any]) -> tuple[int, int, int | None]:
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(usage.get("prompt_tokens")) or 0, _count(usage.get("completion_tokens")) or 0, _count(cached)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


def _error(found: Any) -> str | None:
    """Return the error message of a body or an event, in the formats that servers use."""
    if not isinstance(found, dict) or not found.get("error"):
        message = found.get("message") if isinstance(found, dict) and found.get("object") == "error" else None
    else:
        message = found["error"].get("message") if isinstance(found["error"], dict) else found["error"]
        message = message or "of no kind"
    return " ".join(str(message).split())[:MAX_REASON] if message else None
