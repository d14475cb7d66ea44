"""Machines among which a model could be divided: as users describe them, or there, and measured."""

from dataclasses import dataclass, replace

import torch

from auraflux.bench.forecast import USUAL_DISK, Host, is_figure
from auraflux.errors import SettingsError
from auraflux.run.progress import on_terminal
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.measure import Measured, slowest_link
from auraflux.run.ranks.parallel import PIPELINE, Parallel, is_address
from auraflux.run.ranks.wire import Wire
from auraflux.weights.stored import Checkpoint


@dataclass(frozen=True)
class Machines:
    """What a forecast is made from.

    network   between them; of several links the slowest
    measured  what was found of each; none of those that were described
    """

    hosts: list[Host]
    network: Wire
    measured: tuple[Measured, ...] = ()

    def taken(self, network: Wire | None, memory_rate: float | None) -> "Machines":
        """The same with figures that were given, rather than measured."""
        hosts = self.hosts if memory_rate is None else [replace(host, memory_rate=memory_rate) for host in self.hosts]
        return replace(self, hosts=hosts, network=network or self.network)


def addresses_in(text: str) -> tuple[str, ...]:
    """Machines by their addresses or names; none where they are described by figures."""
    named = tuple(each.strip() for each in text.split(","))
    figures = [each for each in named if is_figure(each)]
    # what is neither is refused with the figures
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
    """Call machines together that follow this one, and measure them and their links."""
    with Lead(Parallel(PIPELINE, len(addresses), addresses), checkpoint, torch.device("cpu")) as lead, on_terminal() as report:
        return as_measured(lead.measure(report))


def as_measured(found: list[Measured]) -> Machines:
    """Machines as they were found to be."""
    hosts = [Host(each.free_nbytes, each.speeds.disk_rate or USUAL_DISK, memory_rate=each.speeds.memory_rate) for each in found]
    return Machines(hosts, slowest_link(found), tuple(found))
