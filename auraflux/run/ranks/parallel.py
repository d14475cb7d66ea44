"""How a model is divided among ranks, as users ask for it: a way, a number, and where the ranks are."""

from dataclasses import dataclass

from auraflux.errors import SettingsError
from auraflux.run.ranks.wire import HERE, find_wire

PIPELINE, EXPERTS, CONTEXT, TENSOR = MODES = "pipeline", "experts", "context", "tensor"
PORT = 29400
LOCAL = "127.0.0.1"
TIMEOUT_S = 15.0
MOST = 256  # ranks


@dataclass(frozen=True)
class Parallel:
    """A model on several ranks.

    mode       "pipeline": each has some of the layers; "experts": each has some of every layer's experts; "context": each has
               some pages of every text; "tensor": each has some heads and columns of every layer
    size       of the group
    hosts      addresses of the machines, this one first, its own port after a colon; none for processes of this machine
    timeout_s  after which a rank that does not answer counts as gone
    restart    bring the group back when a rank is gone
    wire       the network that is pretended between processes of this machine, see `WIRES`
    """

    mode: str
    size: int
    hosts: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S
    restart: bool = False
    wire: str = HERE

    def __post_init__(self) -> None:
        find_wire(self.wire)
        if self.mode not in MODES:
            raise SettingsError(f"{self.mode!r} is no way to divide a model. Those there are: {', '.join(MODES)}.")
        if not 2 <= self.size <= MOST:
            raise SettingsError(f"{self.mode}={self.size} must have from 2 to {MOST} ranks.")
        if self.hosts and len(self.hosts) != self.size:
            raise SettingsError(f"{self.mode}={self.size} wants as many hosts, this one first; {len(self.hosts)} were given.")
        if self.timeout_s < 1:
            raise SettingsError(f"a rank must have a second at least to answer in, not {self.timeout_s:g}.")

    @property
    def meeting(self) -> tuple[str, int]:
        """The address and port at which ranks meet; port 0 is any that is free."""
        return address_of(self.hosts[0], PORT) if self.hosts else (LOCAL, 0)


def parse_parallel(text: str, hosts: str | None = None, timeout_s: float = TIMEOUT_S, restart: bool = False) -> Parallel:
    """What "pipeline=2" asks for."""
    mode, _, count = text.partition("=")
    if not count.isdecimal() or len(count) > 4:
        raise SettingsError(
            f"{text!r:.80} does not say how a model is divided. Write it like pipeline=2, experts=2, context=2 or tensor=2."
        )
    named = tuple(host.strip() for host in hosts.split(",") if host.strip()) if hosts else ()
    return Parallel(mode, int(count), named, timeout_s, restart)


def address_of(text: str, port: int | None = None) -> tuple[str, int]:
    """The host and port of "10.0.0.1:29400" or "[::1]:29400"; a port may be left out where there is a usual one."""
    host, colon, number = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, number = text, "" if port is None else str(port)
    if not number.isdecimal() or int(number) > 65535 or not host:
        raise SettingsError(f"{text!r:.80} is no address. Write it like 10.0.0.1:{PORT}.")
    return host.strip("[]"), int(number)
