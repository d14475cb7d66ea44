"""How fast experts come from a disk: read directly, and through mapped files. Decides nothing, but says why to choose."""

import mmap
import os
import random
import time
from pathlib import Path

import numpy as np

from auraflux.errors import ExpertError
from auraflux.weights.bank import MainSlots
from auraflux.weights.disk import forget
from auraflux.weights.expert_files import ALIGNMENT, ExpertFile
from auraflux.weights.reader import DEPTH, PIECE, Read, Reader
from auraflux.weights.stored import Checkpoint
from auraflux.weights.traffic import Meter

SEED = 0


def disk_speed(checkpoint: Checkpoint, seconds: float) -> float | None:
    """Bytes per second of a model's experts, or of pieces of its largest file; None where that is smaller than a page."""
    if checkpoint.experts is not None:
        return direct_speed(checkpoint.experts.files[0], seconds)
    largest = max(checkpoint.files(), key=lambda path: path.stat().st_size)
    pieces = Pieces.of(largest)
    return direct_speed(pieces, seconds) if pieces.count else None


class Pieces(ExpertFile):
    """Any file, as pieces of one size that are read like experts."""

    @classmethod
    def of(cls, path: Path) -> "Pieces":
        nbytes = path.stat().st_size
        stride = max(ALIGNMENT, min(PIECE, nbytes // ALIGNMENT * ALIGNMENT))
        return cls("", path, nbytes // stride, {}, stride, np.empty(0, np.uint32))

    def check(self) -> None:
        """Nothing: it was there when its pieces were counted."""


def direct_speed(file: ExpertFile, seconds: float) -> float:
    """Bytes per second of random experts, as many reads at once as there are when a model runs."""
    reader, chosen = Reader(verify=False), random.Random(SEED)
    slots = MainSlots(file, DEPTH, reader, Meter())
    began, nbytes = time.perf_counter(), 0
    reads: dict[int, Read] = {}
    while (took := time.perf_counter() - began) < seconds:
        for slot in range(DEPTH):
            if slot not in reads:
                reads[slot] = slots.fill(chosen.randrange(file.count), slot, False)
        reader.wait(lambda: any(read.done for read in reads.values()))
        for slot, read in [pair for pair in reads.items() if pair[1].done]:
            if read.error is not None:
                raise read.error
            nbytes += file.stride
            del reads[slot]
    reader.close()
    return nbytes / took


def mapped_speed(file: ExpertFile, seconds: float) -> float:
    """Bytes per second of random experts through a mapped file of which nothing is in memory."""
    chosen = random.Random(SEED)
    try:
        handle = os.open(file.path, os.O_RDONLY)
    except OSError as err:
        raise ExpertError(f"{file.path} cannot be read: {err.strerror}.") from err
    try:
        forget(handle)
        with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as whole:
            order = chosen.sample(range(file.count), file.count)
            began, nbytes = time.perf_counter(), 0
            for expert in order:
                first = file.offset(expert)
                for page in range(first, first + file.stride, mmap.PAGESIZE):
                    whole[page]
                nbytes += file.stride
                if time.perf_counter() - began > seconds:
                    break
            return nbytes / (time.perf_counter() - began)
    finally:
        os.close(handle)
