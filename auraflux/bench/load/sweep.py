"""Load levels, measured one after another: numbers of concurrent clients, or request rates."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from auraflux.bench.load.metrics import all_at_once, flat, full_load, outcome, sustained, whole_window
from auraflux.bench.load.pool import WorkerPool
from auraflux.bench.load.record import Record
from auraflux.bench.load.workload import Chain, Target, Work, poisson, staggered, together

MIN_REQUESTS = 8  # of a level
REQUESTS_PER_CLIENT = 3  # with two, the first client may end before the last starts
# of levels with a request rate: seconds, warm-up requests, and clients that the pool is sized for
POISSON_S = 30
MAX_WARMUP = 32
POISSON_CLIENTS = 128

Progress = Callable[[str], None]
Run = Callable[[Work, list[Chain]], list[list[Record]]]


@dataclass(frozen=True)
class Amounts:
    """The number of requests at each level; None for a default that depends on the level.

    requests  that keep arriving
    warmup    requests before the measurement
    rounds    in which all clients start together
    """

    requests: int | None = None
    warmup: int | None = None
    rounds: int = 1


def measure(
    target: Target, work: Work, clients: list[int], rates: list[float], amounts: Amounts, progress: Progress
) -> Iterator[dict[str, Any]]:
    """Measure every level; yield a row for each."""
    for count in clients:
        with WorkerPool(target, count) as pool:
            yield closed_level(pool.run, work, count, amounts, progress)
    for rate in rates:
        with WorkerPool(target, POISSON_CLIENTS) as pool:
            yield poisson_level(pool.run, work, rate, amounts, progress)


def closed_level(run: Run, work: Work, clients: int, amounts: Amounts, progress: Progress) -> dict[str, Any]:
    """Measure a number of clients: all at once for one token, all at once for all tokens, then each in a closed loop."""
    name = f"{clients} client{'s' if clients > 1 else ''}"
    warmup = clients if amounts.warmup is None else amounts.warmup
    requests = max(REQUESTS_PER_CLIENT * clients, MIN_REQUESTS) if amounts.requests is None else amounts.requests
    if warmup:
        progress(f"{name}: warming up")
        run(work, together(f"{name} warmup", clients, warmup, work.tokens))
    ones, rounds = [], []
    for i in range(amounts.rounds):
        progress(f"{name}: prefill")
        ones.append(flat(run(work, together(f"{name} one {i}", clients, clients, 1))))
        progress(f"{name}: all at once")
        rounds.append(flat(run(work, together(f"{name} round {i}", clients, clients, work.tokens))))
    progress(f"{name}: one request after another")
    # starts are spread over the time of a request, so that prompts arrive while others decode
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


def poisson_level(run: Run, work: Work, rate: float, amounts: Amounts, progress: Progress) -> dict[str, Any]:
    """Measure a request rate: a Poisson process, however many requests are running."""
    name = f"{rate:g} requests/s"
    requests = max(math.ceil(rate * POISSON_S), MIN_REQUESTS) if amounts.requests is None else amounts.requests
    warmup = min(math.ceil(rate), MAX_WARMUP) if amounts.warmup is None else amounts.warmup
    if warmup:
        progress(f"{name}: warming up")
        run(work, together(f"{name} warmup", warmup, warmup, work.tokens))
    progress(f"{name}: {requests} requests")
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
