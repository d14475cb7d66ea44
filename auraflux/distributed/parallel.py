"""`Parallel`: the requested parallel layout, its ranks and their hosts."""

from dataclasses import dataclass
from ipaddress import ip_address

from auraflux.distributed.comm.mesh import Mesh
from auraflux.distributed.comm.slow_link import HERE, find_link
from auraflux.distributed.expert_usage import AUTO, OFF
from auraflux.errors import SettingsError

PIPELINE, EXPERTS, CONTEXT, TENSOR = MODES = "pipeline", "experts", "context", "tensor"
PORT = 29400
LOCAL = "127.0.0.1"
TIMEOUT_S = 15.0
MAX_RANKS = 256


@dataclass(frozen=True)
class Parallel:
    """Parallel layout of a model.

    mode           "pipeline", "experts", "context" or "tensor" parallelism
    size           ranks of this mode; `mesh` has those of all modes
    hosts          addresses or names of the machines in rank order, this one first, optionally with the rendezvous port; empty
                   for processes of this machine
    timeout_s      after which a rank that does not answer is lost
    restart        restart the group when a rank is lost
    network        simulated between processes of this machine, see `LINKS`
    also           further modes with their sizes: each stage of a pipeline may be expert or context parallel, or both
    expert_counts  usage file for the placement of experts; "auto" for the saved one, if any; "off" for placement by number
    """

    mode: str
    size: int
    hosts: tuple[str, ...] = ()
    timeout_s: float = TIMEOUT_S
    restart: bool = False
    network: str = HERE
    also: tuple[tuple[str, int], ...] = ()
    expert_counts: str = AUTO

    def __post_init__(self) -> None:
        find_link(self.network)
        for mode, size in self.layouts:
            if mode not in MODES:
                raise SettingsError(f"{mode!r} is not a parallel mode. Known: {', '.join(MODES)}.")
            if not 2 <= size <= MAX_RANKS:
                raise SettingsError(f"{mode}={size} is not supported; it must be from 2 to {MAX_RANKS} ranks.")
        self._check_combination()
        count = self.mesh.size
        if count > MAX_RANKS:
            raise SettingsError(f"{self} needs {count} ranks; the limit is {MAX_RANKS}.")
        if self.hosts and len(self.hosts) != count:
            raise SettingsError(f"{self} needs {count} hosts, one per rank and this one first; {len(self.hosts)} were given.")
        if self.expert_counts not in (AUTO, OFF) and EXPERTS not in self.mesh.modes:
            raise SettingsError(f"--expert-counts {self.expert_counts!r:.80} needs expert parallelism, which {self} lacks.")
        if self.timeout_s < 1:
            raise SettingsError(f"the rank timeout must be at least 1 s, not {self.timeout_s:g} s.")

    def _check_combination(self) -> None:
        names = [mode for mode, _ in self.layouts]
        if len(set(names)) < len(names):
            raise SettingsError(f"{self} names a mode twice.")
        if TENSOR in names and len(names) > 1:
            raise SettingsError(f"{self}: {TENSOR} parallelism shards experts and the KV cache itself and cannot be combined.")
        inner = {size for mode, size in self.layouts if mode != PIPELINE}
        if len(inner) > 1:
            raise SettingsError(f"{self}: experts and context use the same ranks, so their sizes must be equal.")

    def __str__(self) -> str:
        return ",".join(f"{mode}={size}" for mode, size in self.layouts)

    @property
    def layouts(self) -> list[tuple[str, int]]:
        """Modes with their sizes."""
        return [(self.mode, self.size), *self.also]

    @property
    def mesh(self) -> Mesh:
        """Mesh of all ranks."""
        sizes = dict(self.layouts)
        stages = sizes.pop(PIPELINE, 1)
        return Mesh(stages, max(sizes.values(), default=1), tuple(sizes))

    @property
    def rendezvous(self) -> tuple[str, int]:
        """Address and port of the rendezvous; port 0 for any free one."""
        return address_of(self.hosts[0], PORT) if self.hosts else (LOCAL, 0)


def parse_parallel(
    text: str, hosts: str | None = None, timeout_s: float = TIMEOUT_S, restart: bool = False, expert_counts: str = AUTO
) -> Parallel:
    """Parse "pipeline=2" or "pipeline=2,experts=2"."""
    layouts = [each.strip().partition("=") for each in text.split(",")]
    if any(not count.isdecimal() or len(count) > 4 for _, _, count in layouts):
        raise SettingsError(
            f"{text!r:.80} is not a parallel layout. Write it like pipeline=2, experts=2, context=2 or tensor=2, or "
            "pipeline=2,experts=2 for both."
        )
    named = tuple(host.strip() for host in hosts.split(",") if host.strip()) if hosts else ()
    (mode, size), *also = ((mode, int(count)) for mode, _, count in layouts)
    return Parallel(mode, size, named, timeout_s, restart, also=tuple(also), expert_counts=expert_counts)


def address_of(text: str, port: int | None = None) -> tuple[str, int]:
    """Parse host and port of "10.0.0.1:29400" or "[::1]:29400"; `port` is the default."""
    host, colon, number = text.rpartition(":")
    if not colon or (":" in host and not host.endswith("]")):
        host, number = text, "" if port is None else str(port)
    if not number.isdecimal() or int(number) > 65535 or not host:
        raise SettingsError(f"{text!r:.80} is not an address. Write it like 10.0.0.1:{PORT}.")
    return host.strip("[]"), int(number)


def is_address(text: str) -> bool:
    """Return whether a string is an IP address, with or without a port."""
    try:
        ip_address(address_of(text, PORT)[0])
    except ValueError:
        return False
    return True
