"""What the machine is: read from the system, without importing torch or numba."""

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from auraflux.errors import SettingsError

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
USUAL_CACHE_NBYTES = 32 << 20  # where the system does not say


@dataclass(frozen=True)
class Machine:
    cpu: str
    architecture: str
    system: str
    cores: int
    memory_nbytes: int
    last_cache_nbytes: int

    @property
    def slug(self) -> str:
        """A file name for results: what the processor calls itself, and how many cores."""
        words = re.sub(r"\(.*?\)|processor|cpu|@.*", " ", self.cpu.lower())
        return "-".join([*re.findall(r"[a-z0-9]+", words), self.architecture, f"{self.cores}-cores"])


def this_machine() -> Machine:
    return Machine(
        cpu=_cpu_name(),
        architecture=platform.machine(),
        system=f"{platform.system()} {platform.release()}",
        cores=usable_cores(),
        memory_nbytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        last_cache_nbytes=last_cache_nbytes(),
    )


def usable_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_nbytes() -> int:
    """Memory that can be taken without pushing anything out."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return this_machine().memory_nbytes // 2


def is_out_of_memory(err: BaseException) -> bool:
    """Whether an error says that main memory ended; torch has no class for that."""
    return isinstance(err, MemoryError) or (isinstance(err, RuntimeError) and "can't allocate memory" in str(err))


def cache_home() -> Path:
    """The user's cache folder, as the XDG base directory specification has it: a value that is no absolute path is ignored."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise SettingsError("there is no home folder, and XDG_CACHE_HOME names no cache folder.")
    return Path(home) / ".cache"


def cache_folder() -> Path:
    """Where this package keeps what it can make again."""
    named = os.environ.get("AURAFLUX_CACHE")
    if named and not os.path.isabs(named):
        raise SettingsError(f"AURAFLUX_CACHE={named!r} is not an absolute path.")
    return Path(named) if named else cache_home() / "auraflux"


def load() -> float:
    """How many processes wanted a core, on the average of the last minute."""
    return os.getloadavg()[0]


def last_cache_nbytes(folder: Path = CACHES) -> int:
    """Size of the largest cache the first core sees."""
    sizes = [_parse_size(text) for path in folder.glob("index*/size") for text in _lines(path)]
    return max(sizes, default=USUAL_CACHE_NBYTES)


def versions(*packages: str) -> dict[str, str | None]:
    """Installed versions; None for a package that is not there."""
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpu_name() -> str:
    for line in _lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    try:
        # ARM's /proc/cpuinfo holds numbers only; llvm knows what they mean
        from llvmlite import binding

        return binding.get_host_cpu_name()
    except ImportError:
        return platform.processor() or platform.machine()


def _parse_size(text: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([KMG]?)", text.strip()).groups()  # type: ignore[union-attr]
    return int(number) * UNITS.get(unit, 1)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
