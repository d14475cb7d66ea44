"""The machines of a forecast: described by the user, or reached and measured."""

from dataclasses import dataclass, replace

import torch

from auraflux.bench.distributed.forecast import DEFAULT_DISK, Host, is_figure
from auraflux.distributed.comm.slow_link import SimulatedLink
from auraflux.distributed.leader import Leader
from auraflux.distributed.measure import RankMeasurement, slowest_link
from auraflux.distributed.parallel import PIPELINE, Parallel, is_address
from auraflux.errors import SettingsError
from auraflux.progress import on_terminal
from auraflux.weights.formats.stored import Checkpoint


@dataclass(frozen=True)
class Machines:
    """The machines and their network.

    network   between them; of several links the slowest
    measured  measurements of each; empty where the user described them
    """

    hosts: list[Host]
    network: SimulatedLink
    measured: tuple[RankMeasurement, ...] = ()

    def override(self, network: SimulatedLink | None, memory_rate: float | None) -> "Machines":
        """Replace measurements by given values."""
        hosts = self.hosts if memory_rate is None else [replace(host, memory_rate=memory_rate) for host in self.hosts]
        return replace(self, hosts=hosts, network=network or self.network)


def addresses_in(text: str) -> tuple[str, ...]:
    """Return the addresses or names of machines; none where they are described by sizes."""
    named = tuple(each.strip() for each in text.split(","))
    figures = [each for each in named if is_figure(each)]
    # an entry that is neither is refused by `parse_hosts`
    if len(figures) == len(named) or (not any(map(is_address, named)) and (figures or len(named) == 1)):
        return ()
    if figures:
        raise SettingsError(
            f"{figures[0]!r:.80} is no address, as others of --hosts are. Give the addresses of all machines to have them "
            "measured, or describe all by figures: 16GB,32GB/3GB."
        )
    if len(named) == 1:
        raise SettingsError(f"{named[0]} is one machine. Name this one first, then the others: 10.0.0.1,10.0.0.2.")
    return named


def measured(addresses: tuple[str, ...], checkpoint: Checkpoint) -> Machines:
    """Connect the machines that run `auraflux follow`, and measure them and their links."""
    parallel = Parallel(PIPELINE, len(addresses), addresses)
    with Leader(parallel, checkpoint, torch.device("cpu")) as leader, on_terminal() as report:
        return as_measured(leader.measure(report))


def as_measured(found: list[RankMeasurement]) -> Machines:
    """Make hosts of measurements."""
    hosts = [
        Host(each.free_nbytes, each.speeds.disk_rate or DEFAULT_DISK, memory_rate=each.speeds.memory_rate) for each in found
    ]
    return Machines(hosts, slowest_link(found), tuple(found))
