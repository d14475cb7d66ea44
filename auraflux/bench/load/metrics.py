"""Throughput, TTFT, ITL and end-to-end latency from the records of requests.

A chain is the requests of one client, one after another. A gap is the time between two arrivals of one stream. Where an arrival
holds several tokens, the gap is divided among them.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from auraflux.bench.load.record import Record

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
Chains = Sequence[Sequence[Record]]
Window = tuple[float, float]
ALWAYS: Window = (-math.inf, math.inf)


def percentile(values: Iterable[tuple[float, float]], share: float) -> float | None:
    """Return the smallest of (value, weight) that at least `share` of the weight does not exceed; None without values."""
    ordered = sorted(values)
    wanted, below = share * sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        below += weight
        # sums of many weights have rounding errors
        if below >= wanted * (1 - 1e-9):
            return value
    return None


def milliseconds(values: Iterable[tuple[float, float]]) -> dict[str, float] | None:
    """Return p50, p90 and p99 of (seconds, weight) in ms; None without values."""
    held = list(values)
    found = {name: percentile(held, share) for name, share in QUANTILES.items()}
    return {name: 1e3 * value for name, value in found.items() if value is not None} or None


def flat(chains: Chains) -> list[Record]:
    return [record for chain in chains for record in chain]


def good(records: Iterable[Record]) -> list[Record]:
    return [record for record in records if record.failure is None]


def arrivals(record: Record) -> Iterator[tuple[float, float]]:
    """Yield (time, tokens) of arrivals; where events are not tokens, all events count the same."""
    if not record.streamed:
        yield record.ended, record.tokens
        return
    each = record.tokens / sum(record.events)
    for time, events in zip(record.times, record.events, strict=True):
        yield time, events * each


def gaps(records: Iterable[Record], window: Window = ALWAYS) -> list[tuple[float, float]]:
    """Return (seconds, tokens) of all gaps within a window: the ITL samples."""
    found = []
    for record in records:
        came = list(arrivals(record))
        for (before, _), (time, tokens) in pairwise(came):
            if window[0] <= before and time <= window[1]:
                found.append(((time - before) / tokens, tokens))
    return found


def tokens_within(records: Iterable[Record], window: Window) -> float:
    """Count the tokens that arrived within a window."""
    return sum(tokens for record in records for time, tokens in arrivals(record) if window[0] < time <= window[1])


def whole_window(records: Sequence[Record]) -> Window:
    return min(record.sent for record in records), max(record.ended for record in records)


def full_load(chains: Chains) -> Window | None:
    """Return the window from the last client's start to the first client's end; None if they do not overlap."""
    low, high = max(chain[0].sent for chain in chains), min(chain[-1].ended for chain in chains)
    return (low, high) if high > low else None


def all_decoding(records: Sequence[Record]) -> Window | None:
    """Return the window in which all requests decode, from the last first token to the first last token; None without one."""
    if not records or not all(record.streamed for record in records):
        return None
    low, high = max(record.times[0] for record in records), min(record.times[-1] for record in records)
    return (low, high) if high > low else None


def rate(amount: float, window: Window | None) -> float | None:
    return amount / (window[1] - window[0]) if window is not None and window[1] > window[0] else None


def decode_rate(records: Sequence[Record]) -> float | None:
    """Return output tokens per second while all requests decode."""
    window = all_decoding(records)
    return None if window is None else rate(tokens_within(records, window), window)


def decode_rate_by_difference(one: Sequence[Record], many: Sequence[Record]) -> float | None:
    """Return decode throughput from the time that many tokens take beyond one, as vLLM's offline benchmark does."""
    first, last = whole_window(one), whole_window(many)
    seconds = (last[1] - last[0]) - (first[1] - first[0])
    tokens = sum(record.tokens for record in many) - sum(record.tokens for record in one)
    return tokens / seconds if seconds > 0 and tokens > 0 else None


def hit_rate(records: Sequence[Record]) -> float | None:
    """Return the share of prompt tokens that were prefix cache hits; None where the server does not report them."""
    known = [record for record in records if record.cached is not None]
    prompt = sum(record.prompt for record in known)
    return sum(record.cached or 0 for record in known) / prompt if prompt else None


def tokens_per_event(records: Sequence[Record]) -> float | None:
    """Return the mean number of tokens in a stream event; above 1 single tokens have no times of their own."""
    streamed = [record for record in records if record.streamed]
    events = sum(sum(record.events) for record in streamed)
    return sum(record.tokens for record in streamed) / events if events else None


def latencies(records: Sequence[Record], window: Window) -> dict[str, Any]:
    """Return TTFT, ITL and end-to-end latency of the requests that were sent in a window."""
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
    """Count the successes and failures of all requests of a level."""
    through = good(records)
    reasons = Counter(record.failure for record in records if record.failure is not None)
    return {
        "requests": len(records),
        "failed": len(records) - len(through),
        "failures": {str(reason): count for reason, count in reasons.most_common()},
        "refused": sum(record.refused for record in records),
        "short": sum(record.tokens < tokens for record in through),
        "tokens_per_event": tokens_per_event(through),
        "found_share": hit_rate(through),
    }


def sustained(chains: Chains, window: Window) -> dict[str, Any]:
    """Return throughput and latency of requests that keep arriving."""
    through = good(flat(chains))
    if not through:
        return {"requests_per_s": None, "output_tokens_per_s": None, **latencies([], window)}
    ended = sum(window[0] < record.ended <= window[1] for record in through)
    return {
        "requests_per_s": rate(ended, window),
        "output_tokens_per_s": rate(tokens_within(through, window), window),
        **latencies(through, window),
    }


def all_at_once(ones: Sequence[Sequence[Record]], rounds: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Return the best throughput of rounds in which all clients start together; a round with a failure does not count."""
    ones, rounds = ([seen for seen in those if seen and good(seen) == list(seen)] for those in (ones, rounds))
    prefill = [rate(sum(record.prompt for record in one), whole_window(one)) for one in ones]
    first = min(ones, key=_seconds, default=None)
    last = min(rounds, key=_seconds, default=None)
    through = [record for seen in rounds for record in seen if record.streamed]
    windows = [(seen, window) for seen in rounds if (window := all_decoding(seen)) is not None]
    return {
        "decode_tokens_per_s": _best(map(decode_rate, rounds)),
        "decode_tokens_per_s_by_difference": decode_rate_by_difference(first, last) if first and last else None,
        "all_writing_s": max((high - low for _, (low, high) in windows), default=None),
        "prompt_tokens_per_s": _best(prefill),
        "time_to_first_token_all_at_once_ms": milliseconds((record.times[0] - record.sent, 1.0) for record in through),
        "inter_token_ms": milliseconds(gap for seen, window in windows for gap in gaps(seen, window)),
    }


def _seconds(records: Sequence[Record]) -> float:
    low, high = whole_window(records)
    return high - low


def _best(rates: Iterable[float | None]) -> float | None:
    return max((found for found in rates if found), default=None)
