"""How a model is divided among ranks, as users ask for it: a way, a number, and where the ranks are."""

from dataclasses import dataclass
from ipaddress import ip_address

from auraflux.errors import SettingsError
from auraflux.run.ranks.mesh import Mesh
from auraflux.run.ranks.use import AUTO, OFF
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
    size       how many ranks it takes, see `mesh` for those of all ways
    hosts      addresses or names of the machines in the order of their ranks, this one first, its own port after a colon; none
               for processes of this machine
    timeout_s  after which a rank that does not answer counts as gone
    restart    bring the group back when a rank is gone
    wire       the network that is pretended between processes of this machine, see `WIRES`
    expert_use how often experts are chosen, by which ranks get theirs: a file; "auto" for what a deal here has kept, if any;
               "off" to divide them by number
    also       further ways and their numbers: each stage of a pipeline is divided by experts or context, or both
    """

    mode: str
    size: int
    hosts: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S
    restart: bool = False
    wire: str = HERE
    also: tuple[tuple[str, int], ...] = ()
    expert_use: str = AUTO

    def __post_init__(self) -> None:
        find_wire(self.wire)
        for mode, size in self.ways:
            if mode not in MODES:
                raise SettingsError(f"{mode!r} is no way to divide a model. Those there are: {', '.join(MODES)}.")
            if not 2 <= size <= MOST:
                raise SettingsError(f"{mode}={size} must have from 2 to {MOST} ranks.")
        self._check_together()
        count = self.mesh.size
        if count > MOST:
            raise SettingsError(f"{self} are {count} ranks; there can be {MOST}.")
        if self.hosts and len(self.hosts) != count:
            raise SettingsError(
                f"{self} wants as many hosts as ranks, this one first: {count}, and {len(self.hosts)} were given."
            )
        if self.expert_use not in (AUTO, OFF) and EXPERTS not in self.mesh.modes:
            raise SettingsError(f"--expert-use {self.expert_use!r:.80} is for ranks that divide experts, and {self} do not.")
        if self.timeout_s < 1:
            raise SettingsError(f"a rank must have a second at least to answer in, not {self.timeout_s:g}.")

    def _check_together(self) -> None:
        names = [mode for mode, _ in self.ways]
        if len(set(names)) < len(names):
            raise SettingsError(f"{self} names a way twice.")
        if TENSOR in names and len(names) > 1:
            raise SettingsError(
                f"{self}: {TENSOR} divides experts and caches by itself, among GPUs of one machine, and is not combined."
            )
        inner = {size for mode, size in self.ways if mode != PIPELINE}
        if len(inner) > 1:
            raise SettingsError(f"{self}: the same ranks divide experts and context, so that both must have the same number.")

    def __str__(self) -> str:
        return ",".join(f"{mode}={size}" for mode, size in self.ways)

    @property
    def ways(self) -> list[tuple[str, int]]:
        return [(self.mode, self.size), *self.also]

    @property
    def mesh(self) -> Mesh:
        """Where the ranks stand."""
        asked = dict(self.ways)
        stages = asked.pop(PIPELINE, 1)
        return Mesh(stages, max(asked.values(), default=1), tuple(asked))

    @property
    def meeting(self) -> tuple[str, int]:
        """The address and port at which ranks meet; port 0 is any that is free."""
        return address_of(self.hosts[0], PORT) if self.hosts else (LOCAL, 0)


def parse_parallel(
    text: str, hosts: str | None = None, timeout_s: float = TIMEOUT_S, restart: bool = False, expert_use: str = AUTO
) -> Parallel:
    """What "pipeline=2" or "pipeline=2,experts=2" asks for."""
    ways = [each.strip().partition("=") for each in text.split(",")]
    if any(not count.isdecimal() or len(count) > 4 for _, _, count in ways):
        raise SettingsError(
            f"{text!r:.80} does not say how a model is divided. Write it like pipeline=2, experts=2, context=2 or tensor=2, or "
            "pipeline=2,experts=2 for both."
        )
    named = tuple(host.strip() for host in hosts.split(",") if host.strip()) if hosts else ()
    (mode, size), *also = ((mode, int(count)) for mode, _, count in ways)
    return Parallel(mode, size, named, timeout_s, restart, also=tuple(also), expert_use=expert_use)


def address_of(text: str, port: int | None = None) -> tuple[str, int]:
    """The host and port of "10.0.0.1:29400" or "[::1]:29400"; a port may be left out where there is a usual one."""
    host, colon, number = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, number = text, "" if port is None else str(port)
    if not number.isdecimal() or int(number) > 65535 or not host:
        raise SettingsError(f"{text!r:.80} is no address. Write it like 10.0.0.1:{PORT}.")
    return host.strip("[]"), int(number)


def is_address(text: str) -> bool:
    """Whether a text is an IP address, by which other ranks are known, with a port after it or without."""
    try:
        ip_address(address_of(text, PORT)[0])
    except ValueError:
        return False
    return True
