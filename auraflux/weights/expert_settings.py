"""What the user may choose of how experts are kept, and what it means for a model."""

import re
from dataclasses import dataclass

from auraflux.errors import SettingsError
from auraflux.weights.expert_files import ExpertFiles

IO = ("auto", "mapped", "direct")
BALANCE = ("auto", "on", "off")
MAPPED_SHARE = 0.75  # of the budget that all experts together may take to be mapped
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "KI": 1 << 10, "MI": 1 << 20, "GI": 1 << 30, "TI": 1 << 40}


def parse_nbytes(text: str | int) -> int:
    """Bytes that a text such as "4GB", "512MiB" or "1.5G" stands for."""
    if isinstance(text, int):
        return text
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?\s*", text.upper())
    if found is None or found[2] not in UNITS:
        raise SettingsError(f"{text!r} is not a size. Write it like 4GB, 512MiB or 1.5G.")
    return int(float(found[1]) * UNITS[found[2]])


def size(nbytes: int) -> str:
    """Bytes for people, never less than they are."""
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= factor:
            return f"{-(-nbytes * 100 // factor) / 100:.2f} {unit}"
    return f"{nbytes} B"


@dataclass(frozen=True)
class ExpertSettings:
    """How the experts of a packed model are kept.

    memory       that they may take where they are computed, such as "4GB"; by default half of what is free
    io           "mapped": files are mapped; "direct": experts are read as they are chosen; "auto" maps what fits well
    main_memory  for a GPU, that they may take in main memory on their way there; by default half of what is free
    hits_first   run experts that are there before those that are not have come
    ahead        read what the next layer asked for last time, where it no longer has it
    guess        run the next layer's router early, on what this layer was given, and read what it chooses
    verify       hold each expert's first read against its checksum
    balance      where ranks divide experts, deal out those that none holds evenly: "on", "off", or "auto" where they are read
                 from disk as they are chosen
    disk         pretend one that gives so many bytes a second, such as "50MB"; for measuring
    """

    memory: str | int | None = None
    io: str = "auto"
    main_memory: str | int | None = None
    hits_first: bool = True
    ahead: bool = True
    guess: bool = False
    verify: bool = True
    balance: str = "auto"
    disk: str | int | None = None

    def __post_init__(self) -> None:
        if self.io not in IO:
            raise SettingsError(f"expert_io={self.io!r} is not a way to read experts. Those there are: {', '.join(IO)}.")
        if self.balance not in BALANCE:
            known = ", ".join(BALANCE)
            raise SettingsError(f"expert_balance={self.balance!r} is no way to deal experts out. Those there are: {known}.")
        for given in (self.memory, self.main_memory, self.disk):
            if given is not None:
                parse_nbytes(given)

    def nbytes(self, free: int) -> int:
        """The budget, where so much is free."""
        return free // 2 if self.memory is None else parse_nbytes(self.memory)

    @property
    def disk_rate(self) -> int | None:
        """Bytes a second of the disk that is pretended."""
        return None if self.disk is None else max(1, parse_nbytes(self.disk))

    def main_nbytes(self, free: int) -> int:
        return free // 2 if self.main_memory is None else parse_nbytes(self.main_memory)


@dataclass(frozen=True)
class Share:
    """What a budget means for a model.

    mapped        all experts fit well: their files are mapped
    slots         experts of each layer that are held otherwise
    nbytes        that the slots take; of the files where they are mapped
    least_nbytes  the smallest budget that works: slots for one token's experts
    reason        why files are mapped, or why not
    """

    mapped: bool
    slots: int
    nbytes: int
    least_nbytes: int
    reason: str


def share_out(files: ExpertFiles, k: int, budget: int, io: str = "auto") -> Share:
    """Decide how the experts of a model are kept, of which a token uses k in each layer."""
    each, whole = sum(file.stride for file in files.files), files.nbytes
    share = f"{size(whole)} of experts, {whole / max(budget, 1):.0%} of the {size(budget)} granted"
    if io == "mapped" or (io == "auto" and whole <= MAPPED_SHARE * budget):
        why = "as was asked" if io == "mapped" else f"as up to {MAPPED_SHARE:.0%} are"
        return Share(True, files.count, whole, k * each, f"{share}: files are mapped, {why}")
    slots = min(budget // each, files.count)
    if slots < k:
        raise SettingsError(
            f"{size(budget)} for experts is too little: a layer gets {slots} of {files.count}, and a token uses {k}. "
            f"The least that works is {k * each} bytes ({size(k * each)})."
        )
    why = f"{slots} of {files.count} a layer are held, the others read as they are chosen"
    return Share(False, slots, slots * each, k * each, f"{share}: {why}{', as was asked' if io == 'direct' else ''}")
