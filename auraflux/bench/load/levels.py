"""Levels of load, measured one after another: so many clients, or so many requests a second."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from auraflux.bench.load.crew import Crew
from auraflux.bench.load.figures import all_at_once, flat, full_load, outcome, sustained, whole_window
from auraflux.bench.load.plan import Chain, Target, Work, poisson, staggered, together
from auraflux.bench.load.record import Record

FEWEST = 8  # requests of a level
EACH = 3  # of every client: with two the first may be through before the last begins
POISSON_S = 30  # of requests that come at random times
MOST_WARMUP = 32  # for these
AT_ONCE = 128  # clients that the processes for these are made for

Tell = Callable[[str], None]
Run = Callable[[Work, list[Chain]], list[list[Record]]]


@dataclass(frozen=True)
class Amounts:
    """How much is asked at each level; None for what fits the level.

    requests  that keep coming
    warmup    before anything counts
    rounds    in which all clients begin together
    """

    requests: int | None = None
    warmup: int | None = None
    rounds: int = 1


def measure(
    target: Target, work: Work, clients: list[int], rates: list[float], amounts: Amounts, tell: Tell
) -> Iterator[dict[str, Any]]:
    """Measure every level; a row for each."""
    for count in clients:
        with Crew(target, count) as crew:
            yield closed_level(crew.run, work, count, amounts, tell)
    for rate in rates:
        with Crew(target, AT_ONCE) as crew:
            yield poisson_level(crew.run, work, rate, amounts, tell)


def closed_level(run: Run, work: Work, clients: int, amounts: Amounts, tell: Tell) -> dict[str, Any]:
    """So many clients: all at once for one token, all at once for all tokens, then each whenever its last answer ended."""
    name = f"{clients} client{'s' if clients > 1 else ''}"
    warmup = clients if amounts.warmup is None else amounts.warmup
    requests = max(EACH * clients, FEWEST) if amounts.requests is None else amounts.requests
    if warmup:
        tell(f"{name}: warming up")
        run(work, together(f"{name} warmup", clients, warmup, work.tokens))
    ones, rounds = [], []
    for i in range(amounts.rounds):
        tell(f"{name}: reading prompts")
        ones.append(flat(run(work, together(f"{name} one {i}", clients, clients, 1))))
        tell(f"{name}: all at once")
        rounds.append(flat(run(work, together(f"{name} round {i}", clients, clients, work.tokens))))
    tell(f"{name}: one request after another")
    # over the time of a request, so that from then on prompts arrive while others write
    low, high = whole_window(rounds[-1])
    chains = run(work, staggered(f"{name} steady", clients, requests, work.tokens, high - low))
    full = full_load(chains)
    everything = [record for record in flat(ones) if record.failure is not None] + flat(rounds) + flat(chains)
    return {
        "mode": "closed",
        "clients": clients,
        "rate": None,
        **all_at_once(ones, rounds),
        "full_load_s": None if full is None else full[1] - full[0],
        **sustained(chains, full or whole_window(flat(chains))),
        **outcome(everything, work.tokens),
    }


def poisson_level(run: Run, work: Work, rate: float, amounts: Amounts, tell: Tell) -> dict[str, Any]:
    """Requests at random times, so many a second, however many are under way."""
    name = f"{rate:g} requests/s"
    requests = max(math.ceil(rate * POISSON_S), FEWEST) if amounts.requests is None else amounts.requests
    warmup = min(math.ceil(rate), MOST_WARMUP) if amounts.warmup is None else amounts.warmup
    if warmup:
        tell(f"{name}: warming up")
        run(work, together(f"{name} warmup", warmup, warmup, work.tokens))
    tell(f"{name}: {requests} requests")
    chains = run(work, poisson(name, rate, requests, work.tokens, work.seed))
    return {
        "mode": "poisson",
        "clients": None,
        "rate": rate,
        "full_load_s": None,
        **all_at_once([], []),
        **sustained(chains, whole_window(flat(chains))),
        **outcome(flat(chains), work.tokens),
    }
