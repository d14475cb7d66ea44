"""Disk bandwidth for experts, with direct reads and through mapped files. For reports; nothing is chosen by it."""

import mmap
import os
import random
import time
from pathlib import Path

import numpy as np

from auraflux.errors import ExpertError
from auraflux.weights.experts.disk_reader import CHUNK_NBYTES, DEPTH, DiskReader, Read
from auraflux.weights.experts.expert_cache import HostSlots
from auraflux.weights.experts.packed_files import ALIGNMENT, ExpertFile
from auraflux.weights.experts.page_cache import drop_page_cache
from auraflux.weights.experts.stats import ExpertCacheCounters
from auraflux.weights.formats.stored import Checkpoint

SEED = 0


def disk_speed(checkpoint: Checkpoint, seconds: float) -> float | None:
    """Return bytes per second of a model's experts, or of its largest file; None if that is smaller than a page."""
    if checkpoint.experts is not None:
        return direct_speed(checkpoint.experts.files[0], seconds)
    largest = max(checkpoint.files(), key=lambda path: path.stat().st_size)
    chunks = FileChunks.of(largest)
    return direct_speed(chunks, seconds) if chunks.count else None


class FileChunks(ExpertFile):
    """Any file as chunks of one size, which are read like experts."""

    @classmethod
    def of(cls, path: Path) -> "FileChunks":
        """Split a file into chunks."""
        nbytes = path.stat().st_size
        stride = max(ALIGNMENT, min(CHUNK_NBYTES, nbytes // ALIGNMENT * ALIGNMENT))
        return cls("", path, nbytes // stride, {}, stride, np.empty(0, np.uint32))

    def check(self) -> None:
        """Do nothing: the size was read when the chunks were counted."""


def direct_speed(file: ExpertFile, seconds: float) -> float:
    """Return bytes per second of random experts, with as many reads in flight as when a model runs."""
    reader, chosen = DiskReader(verify=False), random.Random(SEED)
    slots = HostSlots(file, DEPTH, reader, ExpertCacheCounters())
    began, nbytes = time.perf_counter(), 0
    reads: dict[int, Read] = {}
    while (took := time.perf_counter() - began) < seconds:
        for slot in range(DEPTH):
            if slot not in reads:
                reads[slot] = slots.load(chosen.randrange(file.count), slot, False)
        reader.wait(lambda: any(read.done for read in reads.values()))
        for slot, read in [pair for pair in reads.items() if pair[1].done]:
            if read.error is not None:
                raise read.error
            nbytes += file.stride
            del reads[slot]
    reader.close()
    return nbytes / took


def mapped_speed(file: ExpertFile, seconds: float) -> float:
    """Return bytes per second of random experts through a mapped file, after dropping it from the page cache."""
    chosen = random.Random(SEED)
    try:
        handle = os.open(file.path, os.O_RDONLY)
    except OSError as err:
        raise ExpertError(f"{file.path} cannot be read: {err.strerror}.") from err
    try:
        drop_page_cache(handle)
        with mmap.mmap(handle, 0, prot=mmap.PROT_READ) as mapped:
            order = chosen.sample(range(file.count), file.count)
            began, nbytes = time.perf_counter(), 0
            for expert in order:
                first = file.offset(expert)
                for page in range(first, first + file.stride, mmap.PAGESIZE):
                    mapped[page]
                nbytes += file.stride
                if time.perf_counter() - began > seconds:
                    break
            return nbytes / (time.perf_counter() - began)
    finally:
        os.close(handle)
