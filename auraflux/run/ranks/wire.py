"""A network that is slower than the one there is, for measuring what a slower one would cost."""

import time
from dataclasses import dataclass

from auraflux.errors import SettingsError
from auraflux.weights.expert_settings import parse_nbytes


@dataclass(frozen=True)
class Wire:
    """What every message is held back by.

    latency_s   from one machine to another
    rate        bytes a second; None for as fast as it goes
    """

    latency_s: float = 0.0
    rate: float | None = None

    def seconds(self, nbytes: int) -> float:
        """How long a message takes."""
        return self.latency_s + (0.0 if self.rate is None else nbytes / self.rate)

    @property
    def pretended(self) -> bool:
        """Whether it holds anything back."""
        return self.latency_s > 0 or self.rate is not None

    def due(self, nbytes: int, latent: bool) -> float:
        """When what is sent now arrives, by the clock that processes of a machine share; `latent` with the latency."""
        return time.perf_counter() + self.seconds(nbytes) - (0.0 if latent else self.latency_s)

    def arrive(self, nbytes: int, due: float) -> None:
        """Let a message come as late as it would."""
        ends = min(due, time.perf_counter() + self.seconds(nbytes))
        # a sleep takes longer than it is asked to by half of the shortest latency
        while (left := ends - time.perf_counter()) > 0:
            time.sleep(left - LATE_S if left > 2 * LATE_S else 0)


LATE_S = 1e-4
HERE = "here"
# latencies of a switch and two stacks, and what a stream of large messages reaches
WIRES = {
    HERE: Wire(),
    "10gbe": Wire(50e-6, 1.1e9),
    "1gbe": Wire(150e-6, 117e6),
    "wifi": Wire(2e-3, 40e6),
}


def find_wire(name: str) -> Wire:
    """The wire of a name, or of a latency in microseconds and bytes a second: "20us/45GB"."""
    if name in WIRES:
        return WIRES[name]
    latency, slash, rate = name.partition("us/")
    if not slash or not latency.isdecimal() or len(latency) > 9:
        known = ", ".join(WIRES)
        raise SettingsError(
            f"there is no wire {name!r:.80}. Those there are: {known}; or a latency and a rate, like 20us/45GB."
        )
    nbytes = parse_nbytes(rate)
    if nbytes <= 0:
        raise SettingsError(f"a wire that gives {rate!r:.80} a second is none. Write it like 20us/45GB.")
    return Wire(int(latency) / 1e6, float(nbytes))
