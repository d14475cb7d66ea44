"""Figures from what clients saw: rates, and percentiles of waiting.

A chain is what one client sent, one request after another. A gap is the time between two arrivals of one stream. Where an
arrival holds several tokens, each of them took its share of the gap: that is how often a reader sees a new token.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from auraflux.bench.load.record import Record

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
Chains = Sequence[Sequence[Record]]
Window = tuple[float, float]
ALWAYS: Window = (-math.inf, math.inf)


def percentile(values: Iterable[tuple[float, float]], share: float) -> float | None:
    """The smallest of (value, weight) that at least such a share of the weight does not exceed; None where there is none."""
    ordered = sorted(values)
    wanted, below = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        below += weight
        # sums of many weights are a little off
        if below >= wanted * (1 - 1e-9):
            return value
    return None


def milliseconds(values: Iterable[tuple[float, float]]) -> dict[str, float] | None:
    """p50, p90 and p99 of (seconds, weight); None where there is nothing."""
    held = list(values)
    found = {name: percentile(held, share) for name, share in SHARES.items()}
    return {name: 1e3 * value for name, value in found.items() if value is not None} or None


def flat(chains: Chains) -> list[Record]:
    return [record for chain in chains for record in chain]


def good(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.failure is None]


def arrivals(record: Record) -> Iterator[tuple[float, float]]:
    """When tokens came, and how many; where events are not tokens, all events held as many."""
    if not record.streamed:
        yield record.ended, record.tokens
        return
    each = record.tokens / sum(record.events)
    for time, events in zip(record.times, record.events, strict=True):
        yield time, events * each


def gaps(records: Iterable[Record], window: Window = ALWAYS) -> list[tuple[float, float]]:
    """(Seconds, tokens) of all gaps that lie in a window."""
    found = []
    for record in records:
        came = list(arrivals(record))
        for (before, _), (time, tokens) in pairwise(came):
            if window[0] <= before and time <= window[1]:
                found.append(((time - before) / tokens, tokens))
    return found


def tokens_within(records: Iterable[Record], window: Window) -> float:
    """Tokens that came after the start of a window and not after its end."""
    return sum(tokens for record in records for time, tokens in arrivals(record) if window[0] < time <= window[1])


def whole_window(records: Sequence[Record]) -> Window:
    return min(record.sent for record in records), max(record.ended for record in records)


def full_load(chains: Chains) -> Window | None:
    """From when the last client began to when the first was through; None where some were through before that."""
    low, high = max(chain[0].sent for chain in chains), min(chain[-1].ended for chain in chains)
    return (low, high) if high > low else None


def all_writing(records: Sequence[Record]) -> Window | None:
    """From when the last of them got its first token to when the first got its last; None where there is no such time."""
    if not records or not all(record.streamed for record in records):
        return None
    low, high = max(record.times[0] for record in records), min(record.times[-1] for record in records)
    return (low, high) if high > low else None


def rate(amount: float, window: Window | None) -> float | None:
    return amount / (window[1] - window[0]) if window is not None and window[1] > window[0] else None


def decode_rate(records: Sequence[Record]) -> float | None:
    """Tokens per second while all of them are writing."""
    window = all_writing(records)
    return None if window is None else rate(tokens_within(records, window), window)


def decode_rate_by_difference(one: Sequence[Record], many: Sequence[Record]) -> float | None:
    """Tokens per second that writing many tokens takes beyond writing one, as vLLM's offline figures are made."""
    first, last = whole_window(one), whole_window(many)
    seconds = (last[1] - last[0]) - (first[1] - first[0])
    tokens = sum(record.tokens for record in many) - sum(record.tokens for record in one)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def found_share(records: Sequence[Record]) -> float | None:
    """Share of prompt tokens that a prefix cache had; None where the server does not say."""
    told = [record for record in records if record.cached is not None]
    prompt = sum(record.prompt for record in told)
    return sum(record.cached or 0 for record in told) / prompt if prompt else None


def tokens_per_event(records: Sequence[Record]) -> float | None:
    """How many tokens an event of a stream held; above 1 the times of single tokens are not seen."""
    streamed = [record for record in records if record.streamed]
    events = sum(sum(record.events) for record in streamed)
    return sum(record.tokens for record in streamed) / events if events else None


def waits(records: Sequence[Record], window: Window) -> dict[str, Any]:
    """How long those that were sent in a window waited."""
    sent = [record for record in records if window[0] <= record.sent <= window[1]]
    streamed = [record for record in sent if record.streamed]
    spaced = milliseconds(gaps(records, window))
    return {
        "time_to_first_token_ms": milliseconds((record.times[0] - record.sent, 1.0) for record in streamed),
        "inter_token_while_prompts_arrive_ms": spaced,
        "inter_token_p99_over_p50": spaced["p99"] / spaced["p50"] if spaced and spaced["p50"] else None,
        "end_to_end_ms": milliseconds((record.ended - record.sent, 1.0) for record in sent),
    }


def outcome(records: Sequence[Record], tokens: int) -> dict[str, Any]:
    """What became of all requests of a level."""
    through = good(records)
    reasons = Counter(record.failure for record in records if record.failure is not None)
    return {
        "requests": len(records),
        "failed": len(records) - len(through),
        "failures": {str(reason): count for reason, count in reasons.most_common()},
        "refused": sum(record.refused for record in records),
        "short": sum(record.tokens < tokens for record in through),
        "tokens_per_event": tokens_per_event(through),
        "found_share": found_share(through),
    }


def sustained(chains: Chains, window: Window) -> dict[str, Any]:
    """Rates and waits of requests that kept coming."""
    through = good(flat(chains))
    if not through:
        return {"requests_per_s": None, "output_tokens_per_s": None, **waits([], window)}
    ended = sum(window[0] < record.ended <= window[1] for record in through)
    return {
        "requests_per_s": rate(ended, window),
        "output_tokens_per_s": rate(tokens_within(through, window), window),
        **waits(through, window),
    }


def all_at_once(ones: Sequence[Sequence[Record]], rounds: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Rates of rounds in which all clients began together, the best of each; a round with a failure does not count."""
    ones, rounds = ([seen for seen in those if seen and good(seen) == list(seen)] for those in (ones, rounds))
    read = [rate(sum(record.prompt for record in one), whole_window(one)) for one in ones]
    first = min(ones, key=_seconds, default=None)
    last = min(rounds, key=_seconds, default=None)
    through = [record for seen in rounds for record in seen if record.streamed]
    windows = [(seen, window) for seen in rounds if (window := all_writing(seen)) is not None]
    return {
        "decode_tokens_per_s": _best(map(decode_rate, rounds)),
        "decode_tokens_per_s_by_difference": decode_rate_by_difference(first, last) if first and last else None,
        "all_writing_s": max((high - low for _, (low, high) in windows), default=None),
        "prompt_tokens_per_s": _best(read),
        "time_to_first_token_all_at_once_ms": milliseconds((record.times[0] - record.sent, 1.0) for record in through),
        "inter_token_ms": milliseconds(gap for seen, window in windows for gap in gaps(seen, window)),
    }


def _seconds(records: Sequence[Record]) -> float:
    low, high = whole_window(records)
    return high - low


def _best(rates: Iterable[float | None]) -> float | None:
    return max((found for found in rates if found), default=None)
