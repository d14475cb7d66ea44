"""Hosts of ranks, given by address or by name, and the ranks of each."""

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Any

from auraflux.distributed.parallel import PORT, address_of
from auraflux.errors import RankError, SettingsError


@dataclass(frozen=True)
class Hosts:
    """Addresses of the host of each rank; empty for processes of this machine."""

    addresses: tuple[tuple[str, ...], ...]

    @classmethod
    def named(cls, names: Sequence[str]) -> "Hosts":
        """Resolve host names once."""
        found = cls(tuple(_resolved(address_of(name, PORT)[0]) for name in names))
        others = [each for addresses in found.addresses[1:] for each in addresses]
        if found.addresses and _is_loopback(found.addresses[0][0]) and not all(map(_is_loopback, others)):
            raise SettingsError(
                f"{names[0]} resolves to {found.addresses[0][0]}, which other machines cannot reach. Give its address on "
                "their network."
            )
        return found

    def ranks_of(self, address: str) -> list[int]:
        """Return the follower ranks of a host."""
        mine = _canonical(address)
        return [rank for rank, addresses in enumerate(self.addresses) if rank > 0 and mine in addresses]

    def claim(self, store: Any, key: str, address: str) -> int:
        """Claim the first rank of a host that no other process has claimed."""
        for rank in self.ranks_of(address):
            if store.add(f"{key}/{rank}", 1) == 1:
                return rank
        known = ", ".join(addresses[0] for addresses in self.addresses)
        raise RankError(
            f"this machine has the address {address}, and no rank is left for it among the hosts of the group: {known}."
        )


def _resolved(host: str) -> tuple[str, ...]:
    try:
        return (_canonical(host),)
    except ValueError:
        pass
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as err:
        raise SettingsError(
            f"{host!r:.80} cannot be resolved: {getattr(err, 'strerror', None) or 'invalid host name'}."
        ) from err
    return tuple(dict.fromkeys(_canonical(str(each[4][0])) for each in found))


def _canonical(address: str) -> str:
    """Return the canonical form of an IP address; raise ValueError for other strings."""
    found = ip_address(address)
    mapped = found.ipv4_mapped if isinstance(found, IPv6Address) else None
    return str(mapped or found)


def _is_loopback(address: str) -> bool:
    return ip_address(address).is_loopback
