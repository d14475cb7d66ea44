"""Where ranks are: machines as users name them, by address or by name, and the places of their ranks."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from auraflux.errors import RankError, SettingsError
from auraflux.run.ranks.parallel import PORT, address_of


@dataclass(frozen=True)
class Hosts:
    """Machines in the order of their ranks, each with all its addresses; none for processes of this machine."""

    addresses: tuple[tuple[str, ...], ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> "Hosts":
        """Look names up, once; addresses stay what they are."""
        found = cls(tuple(_looked_up(address_of(name, PORT)[0]) for name in names))
        others = [each for addresses in found.addresses[1:] for each in addresses]
        if found.addresses and _is_loopback(found.addresses[0][0]) and not all(map(_is_loopback, others)):
            raise SettingsError(
                f"{names[0]} is {found.addresses[0][0]} here, where other machines cannot reach it. Give its address on their "
                "network."
            )
        return found

    def ranks_of(self, address: str) -> list[int]:
        """The ranks that a machine may be, apart from that which calls the others."""
        mine = _plain(address)
        return [rank for rank, addresses in enumerate(self.addresses) if rank > 0 and mine in addresses]

    def claim(self, store: Any, key: str, address: str) -> int:
        """Take the first of a machine's ranks that no other process of it has taken."""
        for rank in self.ranks_of(address):
            if store.add(f"{key}/{rank}", 1) == 1:
                return rank
        known = ", ".join(addresses[0] for addresses in self.addresses)
        raise RankError(f"this machine is at {address}, and no rank is left for it among the hosts of the group: {known}.")


def _looked_up(host: str) -> tuple[str, ...]:
    try:
        return (_plain(host),)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise SettingsError(f"{host!r:.80} has no address here: {getattr(err, 'strerror', None) or 'it is no name'}.") from err
    return tuple(dict.fromkeys(_plain(str(each[4][0])) for each in found))


def _plain(address: str) -> str:
    """One way to write an address; ValueError if it is none."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
