"""What machines and the links between them give, measured by the ranks that are there: rank 0 asks, the others answer.

One rank is measured at a time, so that two on one machine do not slow each other down. Links are measured by what ranks send
when they run a model, so that a figure has all that a message costs.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from auraflux.run.progress import Report
from auraflux.run.ranks.members import Members
from auraflux.run.ranks.wire import Wire
from auraflux.weights.read_speed import disk_speed
from auraflux.weights.stored import Checkpoint

SMALL_NBYTES = 64
SMALL_TRIPS = 50
LARGE_NBYTES = 1 << 20  # at first
LARGEST_NBYTES = 16 << 20
LARGE_TRIPS = 3
LONG_S = 0.1  # a round trip in which latency no longer counts
DISK_S = 0.5


@dataclass(frozen=True)
class Speeds:
    """What a machine reads a second: bytes.

    disk_rate  None where no file of the model is large enough to tell
    """

    memory_rate: float
    disk_rate: float | None


@dataclass(frozen=True)
class Measured:
    """What was measured of a rank.

    free_nbytes  memory that a model may take
    link         between rank 0 and this one; None for rank 0
    """

    address: str
    free_nbytes: int
    speeds: Speeds
    link: Wire | None


def measure(group: Members, checkpoint: Checkpoint, addresses: list[str], memory: list[int], report: Report) -> list[Measured]:
    """Measure all ranks of a group whose others wait for what to do."""
    found, steps = [], 2 * group.size - 1
    for rank in range(group.size):
        report(f"measuring: memory and disk of {addresses[rank]}", max(0, 2 * rank - 1), steps)
        speeds = speeds_here(checkpoint) if rank == 0 else _ask_speeds(group, rank)
        link = None
        if rank > 0:
            report(f"measuring: the link to {addresses[rank]}", 2 * rank, steps)
            link = measure_link(group, rank)
        found.append(Measured(addresses[rank], memory[rank], speeds, link))
    report("measuring: done", steps, steps)
    return found


def slowest_link(found: list[Measured]) -> Wire:
    """The longest latency and the lowest rate of all links."""
    links = [each.link for each in found if each.link is not None]
    rates = [link.rate for link in links if link.rate is not None]
    return Wire(max((link.latency_s for link in links), default=0.0), min(rates, default=None))


def speeds_here(checkpoint: Checkpoint) -> Speeds:
    """Measure this machine."""
    # it needs Numba, which a GPU does without
    from auraflux.ops.simd.ceiling import read_ceiling

    return Speeds(read_ceiling()["all_threads"], disk_speed(checkpoint, DISK_S))


def _ask_speeds(group: Members, rank: int) -> Speeds:
    group.say({"measure": "speeds"}, rank)
    told = group.hear(rank)
    return Speeds(told["memory_rate"], told["disk_rate"])


def measure_link(group: Members, rank: int) -> Wire:
    """The latency and the rate of what goes to a rank and comes back."""
    latency_s = median(_round_trips(group, rank, SMALL_NBYTES, SMALL_TRIPS)) / 2
    nbytes = LARGE_NBYTES
    while _round_trips(group, rank, nbytes, 1)[0] < LONG_S and nbytes < LARGEST_NBYTES:
        nbytes *= 4
    took = min(_round_trips(group, rank, nbytes, LARGE_TRIPS)) / 2
    # where the latency is most of it, the rate is not known any better
    return Wire(latency_s, nbytes / max(took - latency_s, took / 2))


def _round_trips(group: Members, rank: int, nbytes: int, times: int) -> list[float]:
    """Send so many bytes to a rank and back, so many times: seconds of each."""
    group.say({"measure": "link", "nbytes": nbytes, "times": times}, rank)
    sent, found = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(times):
        coming, began = group.expect(nbytes, source=rank, dtype=torch.uint8), time.perf_counter()
        group.send(sent, rank)
        coming.wait()
        found.append(time.perf_counter() - began)
    # the first waits until the other side has read what it is to do
    return found[1:] or found


def answer(group: Members, checkpoint: Checkpoint, told: dict[str, Any]) -> None:
    """Do what rank 0 measures this rank by."""
    WHATS[told["measure"]](group, checkpoint, told)


def _tell_speeds(group: Members, checkpoint: Checkpoint, told: dict[str, Any]) -> None:
    found = speeds_here(checkpoint)
    group.say({"memory_rate": found.memory_rate, "disk_rate": found.disk_rate}, 0)


def _send_back(group: Members, checkpoint: Checkpoint, told: dict[str, Any]) -> None:
    for _ in range(told["times"]):
        group.send(group.receive(told["nbytes"], source=0, dtype=torch.uint8), 0)


WHATS: dict[str, Callable[[Members, Checkpoint, dict[str, Any]], None]] = {"speeds": _tell_speeds, "link": _send_back}
