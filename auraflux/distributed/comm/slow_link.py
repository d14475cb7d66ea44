"""Simulation of a slower network, to measure its cost."""

import time
from dataclasses import dataclass

from auraflux.errors import SettingsError
from auraflux.weights.experts.settings import parse_nbytes


@dataclass(frozen=True)
class SimulatedLink:
    """Delay of every message.

    latency_s  between two machines
    rate       bytes per second; None for no limit
    """

    latency_s: float = 0.0
    rate: float | None = None

    def seconds(self, nbytes: int) -> float:
        """Return the transfer time of a message."""
        return self.latency_s + (0.0 if self.rate is None else nbytes / self.rate)

    @property
    def simulated(self) -> bool:
        """True if it delays messages."""
        return self.latency_s > 0 or self.rate is not None

    def due(self, nbytes: int, latent: bool) -> float:
        """Return when a message sent now arrives, by the monotonic clock of this machine; `latent` includes the latency."""
        return time.perf_counter() + self.seconds(nbytes) - (0.0 if latent else self.latency_s)

    def arrive(self, nbytes: int, due: float) -> None:
        """Wait until a message would have arrived."""
        ends = min(due, time.perf_counter() + self.seconds(nbytes))
        # a sleep overshoots by half of the shortest latency
        while (left := ends - time.perf_counter()) > 0:
            time.sleep(left - OVERSHOOT_S if left > 2 * OVERSHOOT_S else 0)


OVERSHOOT_S = 1e-4
HERE = "here"
# latency of a switch and two network stacks, and throughput of large messages
LINKS = {
    HERE: SimulatedLink(),
    "10gbe": SimulatedLink(50e-6, 1.1e9),
    "1gbe": SimulatedLink(150e-6, 117e6),
    "wifi": SimulatedLink(2e-3, 40e6),
}


def find_link(name: str) -> SimulatedLink:
    """Return the link of a name, or of a latency and a rate in bytes per second: "20us/45GB"."""
    if name in LINKS:
        return LINKS[name]
    latency, slash, rate = name.partition("us/")
    if not slash or not latency.isdecimal() or len(latency) > 9:
        known = ", ".join(LINKS)
        raise SettingsError(f"unknown network {name!r:.80}. Known: {known}; or a latency and a rate, such as 20us/45GB.")
    nbytes = parse_nbytes(rate)
    if nbytes <= 0:
        raise SettingsError(f"the rate {rate!r:.80} must be positive. Write a network as 20us/45GB.")
    return SimulatedLink(int(latency) / 1e6, float(nbytes))
