"""What a client saw of one request, and how an answer is judged."""

import json
from dataclasses import dataclass, field
from typing import Any

from auraflux.bench.load.answer import Answer

LAST_EVENTS = 4  # that may hold usage, an error and the end
LONGEST_REASON = 120  # characters of a server's own words


@dataclass(frozen=True)
class Record:
    """One request. Times are seconds of the machine's monotonic clock, which all its processes share.

    sent     when it was due
    ended    when the last of its answer came, or when it failed
    times    of arrivals that held tokens
    events   in each of these: one token each, unless `tokens` says otherwise
    prompt   tokens of its prompt, by the server's count
    tokens   that were written
    cached   tokens of the prompt that were found in a prefix cache; None where the server does not say
    refused  how often it was sent again because the server was busy
    failure  why there is no whole answer; None where there is one
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


def judge(answer: Answer, client: int, sent: float, refused: int) -> Record:
    """Turn an answer that ended, well or not, into a record."""
    if not answer.status:
        return Record(client, sent, answer.last, refused=refused, failure="an answer broke off")
    if answer.status != 200:
        said = _error(answer.json())
        failed = f"HTTP {answer.status}" + (f": {said}" if said else "")
        return Record(client, sent, answer.last, refused=refused, failure=failed)
    return _judge_stream(answer, client, sent, refused) if answer.streamed else _judge_body(answer, client, sent, refused)


def _judge_body(answer: Answer, client: int, sent: float, refused: int) -> Record:
    found = answer.json() if answer.whole else None
    if said := _error(found):
        return Record(client, sent, answer.last, refused=refused, failure=f"error in the answer: {said}")
    usage = found.get("usage") if isinstance(found, dict) else None
    if not isinstance(usage, dict):
        failed = "an answer without usage" if answer.whole else "an answer broke off"
        return Record(client, sent, answer.last, refused=refused, failure=failed)
    prompt, tokens, cached = _usage(usage)
    return Record(client, sent, answer.last, [], [], prompt, tokens, cached, refused)


def _judge_stream(answer: Answer, client: int, sent: float, refused: int) -> Record:
    """Hold a stream to its end: an error or the lack of [DONE] is a failure, and events without tokens do not count."""
    texts = answer.last_events(LAST_EVENTS)
    last = [_parsed(text) for text in texts]
    errors = [said for said in map(_error, last) if said]
    usage = next((event["usage"] for event in reversed(last) if isinstance(event, dict) and event.get("usage")), None)
    bare = texts.count(b"[DONE]") + sum(isinstance(event, dict) and not event.get("choices") for event in last)
    times, events = _drop(answer.times, answer.events, bare)
    prompt, tokens, cached = _usage(usage) if isinstance(usage, dict) else (0, sum(events), None)
    if sum(events) == tokens + 1:
        # its last event only says why the text ended
        times, events = _drop(times, events, 1)
    failed = None
    if errors:
        failed = f"error in the stream: {errors[0]}"
    elif b"[DONE]" not in texts:
        failed = "a stream broke off before its end"
    elif not tokens or not times:
        failed = "a stream without tokens"
    return Record(client, sent, answer.last, times, events, prompt, tokens, cached, refused, failed)


def _drop(times: list[float], events: list[int], count: int) -> tuple[list[float], list[int]]:
    """Take so many events from the end."""
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


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _error(found: Any) -> str | None:
    """What a body or an event says went wrong, in the shapes servers use."""
    if not isinstance(found, dict) or not found.get("error"):
        said = found.get("message") if isinstance(found, dict) and found.get("object") == "error" else None
    else:
        said = found["error"].get("message") if isinstance(found["error"], dict) else found["error"]
        said = said or "of no kind"
    return " ".join(str(said).split())[:LONGEST_REASON] if said else None
