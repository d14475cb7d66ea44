"""Facts about the machine, read from the system without importing torch or numba."""

import ctypes
import math
import os
import platform
import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePosixPath

from auraflux.errors import SettingsError

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
USUAL_CACHE_NBYTES = 32 << 20  # if the system reports none


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
        """File name for results: the processor's name and the number of cores."""
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


def return_free_memory() -> None:
    """Return memory that was freed to the system; glibc keeps what other blocks surround."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compute_cores(root: Path = Path("/")) -> int:
    """Return the number of threads that compute without sharing a core: physical cores of this process, within its CPU quota.

    root  folder that holds the system's `proc` and `sys`
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = root / "sys/devices/system/cpu"
    # hardware threads of one core list the same siblings; without a list each counts as a core
    cores = {"".join(_lines(topology / f"cpu{cpu}/topology/thread_siblings_list")) or cpu for cpu in cpus}
    quota = min(_cpu_quotas(root), default=math.inf)
    return len(cores) if quota >= len(cores) else max(1, math.ceil(quota))


def _cpu_quotas(root: Path) -> Iterator[float]:
    """Yield the CPU quotas, in cores, of the control groups that hold this process."""
    groups = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.strip().split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mounts = (groups / controllers, groups / "cpu") if controllers else (groups, groups / "unified")
        # a container may see its own group as the root, under the path that it has outside
        parts = PurePosixPath(path).parts[1:]
        for mount in mounts:
            for n in range(len(parts) + 1):
                yield from _quota_of(mount.joinpath(*parts[:n]))


def _quota_of(group: Path) -> Iterator[float]:
    """Yield the CPU quota of one control group, if it has one: of version 2 or 1."""
    words = " ".join(_lines(group / "cpu.max")).split()
    words = words or [*_lines(group / "cpu.cfs_quota_us"), *_lines(group / "cpu.cfs_period_us")]
    if len(words) == 2 and words[0].isdecimal():
        yield int(words[0]) / int(words[1])


def free_nbytes() -> int:
    """Return the memory that can be allocated without swapping or evicting anything."""
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return this_machine().memory_nbytes // 2


def is_out_of_memory(err: BaseException) -> bool:
    """Return whether an error means that main memory is exhausted; torch has no class for it."""
    return isinstance(err, MemoryError) or (isinstance(err, RuntimeError) and "can't allocate memory" in str(err))


def cache_home() -> Path:
    """Return the user's cache folder by the XDG base directory specification, which ignores relative paths."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):
        return Path(named)
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        raise SettingsError("there is no home folder, and XDG_CACHE_HOME names no cache folder.")
    return Path(home) / ".cache"


def cache_folder() -> Path:
    """Return the folder for data that this package can rebuild."""
    named = os.environ.get("AURAFLUX_CACHE")
    if named and not os.path.isabs(named):
        raise SettingsError(f"AURAFLUX_CACHE={named!r} is not an absolute path.")
    return Path(named) if named else cache_home() / "auraflux"


def load() -> float:
    """Return the load average of the last minute."""
    return os.getloadavg()[0]


def last_cache_nbytes(folder: Path = CACHES) -> int:
    """Return the size of the largest cache of the first core."""
    sizes = [_parse_size(text) for path in folder.glob("index*/size") for text in _lines(path)]
    return max(sizes, default=USUAL_CACHE_NBYTES)


def versions(*packages: str) -> dict[str, str | None]:
    """Return installed versions; None for a missing package."""
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
        # ARM's /proc/cpuinfo has part numbers only; LLVM maps them to names
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
