"""Settings of the expert cache, and the plan they give for a model: mapped files or a number of cache slots."""

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from auraflux.errors import SettingsError
from auraflux.renamed import renamed_fields

if TYPE_CHECKING:
    from auraflux.weights.experts.packed_files import ExpertFiles

IO = ("auto", "mapped", "direct")
BALANCE = ("auto", "on", "off")
COMPUTE = ("auto", "gpu")
MAPPED_SHARE = 0.75  # of the budget: files are mapped if all experts together take no more
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def parse_nbytes(text: str | int) -> int:
    """Parse a size such as "4GB", "512MiB" or "1.5G" into bytes."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if found is None or found[2] not in UNITS:
        raise SettingsError(f"{text!r} is not a size. Write it like 4GB, 512MiB or 1.5G.")
    return int(float(found[1]) * UNITS[found[2]])


def format_nbytes(nbytes: int) -> str:
    """Format bytes with a unit, rounded up."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{-(-nbytes * 100 // factor) / 100:.2f} {unit}"
    return f"{nbytes} B"


@renamed_fields({"main_memory": "host_memory", "guess": "prefetch"})
@dataclass(frozen=True)
class ExpertSettings:
    """Settings of the expert cache of a packed model.

    memory       for experts on the device that computes, such as "4GB"; by default half of the free memory
    io           "mapped": expert files are memory-mapped; "direct": experts are read when the router chooses them; "auto" maps
                 files that fit well
    host_memory  for a GPU: pinned host memory for experts on their way to it; by default half of the free memory
    hits_first   run cached experts while the others are read
    ahead        prefetch the experts that the next layer used for the previous token, where they are no longer cached
    prefetch     run the next layer's router early, on this layer's input, and prefetch the experts it chooses
    verify       check each expert's checksum when it is first read
    balance      with expert parallelism, assign uncached experts evenly to ranks: "on", "off", or "auto" where they are read
                 from disk
    disk         simulate a disk of this bandwidth per second, such as "50MB"; for benchmarks
    compute      on a GPU: "auto" lets CPU threads compute missing experts where that is faster than to fetch them; their sums
                 round differently, so output may depend on what is cached. "gpu" computes all experts on the GPU
    """

    memory: str | int | None = None
    io: str = "auto"
    host_memory: str | int | None = None
    hits_first: bool = True
    ahead: bool = True
    prefetch: bool = False
    verify: bool = True
    balance: str = "auto"
    disk: str | int | None = None
    compute: str = "auto"

    def __post_init__(self) -> None:
        if self.io not in IO:
            raise SettingsError(f"expert_io={self.io!r} is unknown. Choose one of: {', '.join(IO)}.")
        if self.balance not in BALANCE:
            known = ", ".join(BALANCE)
            raise SettingsError(f"expert_balance={self.balance!r} is unknown. Choose one of: {known}.")
        if self.compute not in COMPUTE:
            raise SettingsError(f"experts={self.compute!r} is unknown. Choose one of: {', '.join(COMPUTE)}.")
        for given in (self.memory, self.host_memory, self.disk):
            if given is not None:
                parse_nbytes(given)

    def nbytes(self, free: int) -> int:
        """Return the budget for experts, given the free memory."""
        return free // 2 if self.memory is None else parse_nbytes(self.memory)

    @property
    def disk_bandwidth(self) -> int | None:
        """Bytes per second of the simulated disk."""
        return None if self.disk is None else max(1, parse_nbytes(self.disk))

    def host_nbytes(self, free: int) -> int:
        """Return the budget for pinned host memory, given the free memory."""
        return free // 2 if self.host_memory is None else parse_nbytes(self.host_memory)


@dataclass(frozen=True)
class ExpertCachePlan:
    """Plan for the experts of a model within a budget.

    mapped      all experts fit: their files are memory-mapped
    slots       cache slots per layer, otherwise
    nbytes      bytes of the slots, or of the mapped files
    min_nbytes  smallest budget that works: slots for the experts of one token
    reason      why files are mapped or cached
    """

    mapped: bool
    slots: int
    nbytes: int
    min_nbytes: int
    reason: str


def plan_expert_cache(files: "ExpertFiles", k: int, budget: int, io: str = "auto") -> ExpertCachePlan:
    """Plan mapped files or cache slots for a model whose tokens use k experts per layer."""
    slot_nbytes, total = sum(file.stride for file in files.files), files.nbytes
    sizes = f"{format_nbytes(total)} of experts, {total / max(budget, 1):.0%} of the {format_nbytes(budget)} budget"
    if io == "mapped" or (io == "auto" and total <= MAPPED_SHARE * budget):
        why = "as requested" if io == "mapped" else f"as up to {MAPPED_SHARE:.0%} are"
        return ExpertCachePlan(True, files.count, total, k * slot_nbytes, f"{sizes}: files are mapped, {why}")
    slots = min(budget // slot_nbytes, files.count)
    if slots < k:
        raise SettingsError(
            f"{format_nbytes(budget)} for experts is too little: a layer gets {slots} of {files.count}, and a token uses {k}. "
            f"The minimum is {k * slot_nbytes} bytes ({format_nbytes(k * slot_nbytes)})."
        )
    why = f"{slots} of {files.count} per layer are cached, the others are read on demand"
    requested = ", as requested" if io == "direct" else ""
    return ExpertCachePlan(False, slots, slots * slot_nbytes, k * slot_nbytes, f"{sizes}: {why}{requested}")
