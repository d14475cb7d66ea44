"""Measurement of memory, disk and network bandwidth by the ranks of a group, directed by rank 0.

Ranks are measured one at a time, so that two on one machine do not slow each other down. Links are measured with the transfers
of inference, so that a figure includes the full cost of a message.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from auraflux.distributed.comm.collectives import Collectives
from auraflux.distributed.comm.slow_link import SimulatedLink
from auraflux.progress import Report
from auraflux.weights.experts.read_speed import disk_speed
from auraflux.weights.formats.stored import Checkpoint

SMALL_NBYTES = 64
SMALL_TRIPS = 50
LARGE_NBYTES = 1 << 20  # initial size
LARGEST_NBYTES = 16 << 20
LARGE_TRIPS = 3
LONG_S = 0.1  # a round trip whose latency is negligible
DISK_S = 0.5


@dataclass(frozen=True)
class HostSpeeds:
    """Read bandwidths of a machine, in bytes per second.

    disk_rate  None where no file of the model is large enough to measure it
    """

    memory_rate: float
    disk_rate: float | None


@dataclass(frozen=True)
class RankMeasurement:
    """Measurement of one rank.

    free_nbytes  memory available to a model
    link         between rank 0 and this rank; None for rank 0
    """

    address: str
    free_nbytes: int
    speeds: HostSpeeds
    link: SimulatedLink | None


def measure(
    group: Collectives, checkpoint: Checkpoint, addresses: list[str], memory: list[int], report: Report
) -> list[RankMeasurement]:
    """Measure all ranks of a group, from rank 0."""
    found, steps = [], 2 * group.size - 1
    for rank in range(group.size):
        report(f"measuring: memory and disk of {addresses[rank]}", max(0, 2 * rank - 1), steps)
        speeds = measure_host(checkpoint) if rank == 0 else _remote_speeds(group, rank)
        link = None
        if rank > 0:
            report(f"measuring: the link to {addresses[rank]}", 2 * rank, steps)
            link = measure_link(group, rank)
        found.append(RankMeasurement(addresses[rank], memory[rank], speeds, link))
    report("measuring: done", steps, steps)
    return found


def slowest_link(found: list[RankMeasurement]) -> SimulatedLink:
    """Return the highest latency and the lowest rate of all links."""
    links = [each.link for each in found if each.link is not None]
    rates = [link.rate for link in links if link.rate is not None]
    return SimulatedLink(max((link.latency_s for link in links), default=0.0), min(rates, default=None))


def measure_host(checkpoint: Checkpoint) -> HostSpeeds:
    """Measure this machine."""
    # imported here: it needs Numba, which GPU installations lack
    from auraflux.ops.simd.peak_bandwidth import peak_read_bandwidth

    return HostSpeeds(peak_read_bandwidth()["all_threads"], disk_speed(checkpoint, DISK_S))


def _remote_speeds(group: Collectives, rank: int) -> HostSpeeds:
    group.send_message({"measure": "speeds"}, rank)
    reply = group.receive_message(rank)
    return HostSpeeds(reply["memory_rate"], reply["disk_rate"])


def measure_link(group: Collectives, rank: int) -> SimulatedLink:
    """Measure latency and rate of the link to a rank by round trips."""
    latency_s = median(_round_trips(group, rank, SMALL_NBYTES, SMALL_TRIPS)) / 2
    nbytes = LARGE_NBYTES
    while _round_trips(group, rank, nbytes, 1)[0] < LONG_S and nbytes < LARGEST_NBYTES:
        nbytes *= 4
    took = min(_round_trips(group, rank, nbytes, LARGE_TRIPS)) / 2
    # where latency dominates, the rate is only a lower bound
    return SimulatedLink(latency_s, nbytes / max(took - latency_s, took / 2))


def _round_trips(group: Collectives, rank: int, nbytes: int, times: int) -> list[float]:
    """Time round trips of `nbytes` to a rank; return the seconds of each."""
    group.send_message({"measure": "link", "nbytes": nbytes, "times": times}, rank)
    sent, found = torch.zeros(nbytes, dtype=torch.uint8), []
    for _ in range(times):
        pending, began = group.post_receive(nbytes, source=rank, dtype=torch.uint8), time.perf_counter()
        group.send(sent, rank)
        pending.wait()
        found.append(time.perf_counter() - began)
    # the first includes the wait for the other side to parse the message
    return found[1:] or found


def run_measurement(group: Collectives, checkpoint: Checkpoint, message: dict[str, Any]) -> None:
    """Run the follower's side of a measurement."""
    MEASUREMENTS[message["measure"]](group, checkpoint, message)


def _send_speeds(group: Collectives, checkpoint: Checkpoint, message: dict[str, Any]) -> None:
    found = measure_host(checkpoint)
    group.send_message({"memory_rate": found.memory_rate, "disk_rate": found.disk_rate}, 0)


def _echo(group: Collectives, checkpoint: Checkpoint, message: dict[str, Any]) -> None:
    for _ in range(message["times"]):
        group.send(group.receive(message["nbytes"], source=0, dtype=torch.uint8), 0)


MEASUREMENTS: dict[str, Callable[[Collectives, Checkpoint, dict[str, Any]], None]] = {"speeds": _send_speeds, "link": _echo}
