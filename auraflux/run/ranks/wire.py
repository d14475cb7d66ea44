"""A network that is slower than the one there is, for measuring what a slower one would cost."""

import time
from dataclasses import dataclass

from auraflux.errors import SettingsError


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

    def arrive(self, nbytes: int) -> None:
        """Let a message come as late as it would."""
        if wait_s := self.seconds(nbytes):
            time.sleep(wait_s)


# latencies of a switch and two stacks, and what a stream of large messages reaches
WIRES = {
    "here": Wire(),
    "10gbe": Wire(50e-6, 1.1e9),
    "1gbe": Wire(150e-6, 117e6),
    "wifi": Wire(2e-3, 40e6),
}


def find_wire(name: str) -> Wire:
    """The wire of a name."""
    if name not in WIRES:
        raise SettingsError(f"there is no wire {name!r}. Those there are: {', '.join(WIRES)}.")
    return WIRES[name]
