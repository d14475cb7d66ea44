"""`RowTable`: an embedding table that stays on disk. A step reads the rows it needs, several in flight, behind an LRU cache.

A table may be split into parts, in one file or several. Only the requested rows are read, with `pread`; nothing is mapped. A
file that changes while the model is in use is refused, as mapped files are (`file_watch.py`), and rows with checksums are
verified when they are read.
"""

import os
import re
import threading
import weakref
import zlib
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.weights.formats.row_layout import CHECKSUM_NBYTES, RowFormat

ON_DISK_TABLE = re.compile(r"\.ngram_embedding\.")  # matches names of tables that stay on disk
ROW_CACHE_NBYTES = 16 << 20  # of cached rows per table
DEPTH = 8  # reads in flight
MIN_ROWS_PER_THREAD = 4


def loaded_nbytes(sizes: Mapping[str, int]) -> int:
    """Return the bytes of all tensors except tables that stay on disk."""
    return sum(nbytes for name, nbytes in sizes.items() if not ON_DISK_TABLE.search(name))


@dataclass(frozen=True)
class Extent:
    """Rows in a file: row i has `nbytes` bytes at start + i * nbytes."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class TablePart:
    """Consecutive rows of a table.

    extents  of dense rows, of codes, scales and biases, or of records, which join these with a checksum
    records  the rows are records
    """

    name: str
    rows: int
    form: RowFormat
    extents: tuple[Extent, ...]
    records: bool = False


class _Files:
    """Open files, with their size and modification time when opened."""

    def __init__(self, paths: Sequence[Path]):
        self._open: dict[Path, tuple[int, tuple[int, int]]] = {}
        for path in paths:
            try:
                number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as err:
                raise FormatError(f"{path} cannot be read: {err.strerror}.") from err
            if hasattr(os, "posix_fadvise"):
                # rows are scattered: readahead would be wasted
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
            self._open[path] = number, _stamp(number)

    def read(self, path: Path, memory: memoryview, position: int) -> None:
        """Fill memory from a position of a file."""
        number = self._open[path][0]
        while memory:
            try:
                count = os.preadv(number, [memory], position)
            except OSError as err:
                raise FormatError(f"{path} gives an error ({err.strerror or err}).") from err
            if not count:
                self.check([path])
                raise FormatError(f"{path} is truncated before byte {position}; download it again.")
            memory, position = memory[count:], position + count

    def check(self, paths: Sequence[Path]) -> None:
        """Raise if a file has changed."""
        for path in paths:
            number, stamp = self._open[path]
            if _stamp(number) != stamp:
                raise FormatError(f"{path} was changed while the model was in use; load it again.")

    def close(self) -> None:
        for number, _ in self._open.values():
            os.close(number)
        self._open = {}


def _stamp(number: int) -> tuple[int, int]:
    found = os.fstat(number)
    return found.st_size, found.st_mtime_ns


class PendingRows(Protocol):
    """Requested rows, possibly still being read."""

    def result(self) -> Tensor:
        """Wait for the rows and return them in the order requested: float32 [n, width]."""


class RowSource(Protocol):
    """Table whose rows are fetched on demand."""

    def fetch(self, ids: Tensor) -> PendingRows:
        """Start to read rows: int64 [n]."""


class RowFetch:
    """Fetch of some rows: cached ones are copied, misses are read by threads."""

    def __init__(self, table: "RowTable", ids: np.ndarray, rows: np.ndarray, order: np.ndarray, misses: list[int]):
        self._table, self._ids, self._rows, self._order, self._misses = table, ids, rows, order, misses
        self._reads: list[Future[None]] = []

    def begin(self, pool: ThreadPoolExecutor) -> None:
        """Split the misses over threads."""
        step = max(MIN_ROWS_PER_THREAD, -(-len(self._misses) // DEPTH))
        for start in range(0, len(self._misses), step):
            self._reads.append(pool.submit(self._read, self._misses[start : start + step]))

    def _read(self, places: list[int]) -> None:
        for place in places:
            self._table.read_row(int(self._ids[place]), self._rows[place])

    def result(self) -> Tensor:
        """Wait for the rows and return them in the order requested: float32 [n, width]."""
        for read in self._reads:
            read.result()
        self._table.cache_rows(self._ids, self._rows, self._misses)
        self._misses = []
        return self._table.form.dequantize(torch.from_numpy(self._rows))[torch.from_numpy(self._order)]


class RowTable:
    """Table of rows in one format, in parts, with an LRU cache of rows.

    cache_nbytes     most bytes of cached rows
    requested, read  rows so far, each once per step
    """

    def __init__(self, parts: Sequence[TablePart], cache_nbytes: int = ROW_CACHE_NBYTES):
        self.parts, self.form = tuple(parts), parts[0].form
        other = next((part for part in parts if part.form != self.form), None)
        if other is not None:
            raise FormatError(f"rows of {other.name} are {other.form.name}, and those of {parts[0].name} {self.form.name}.")
        self._firsts = [0, *accumulate(part.rows for part in parts)]
        self.rows = self._firsts[-1]
        self._files = _Files(sorted({extent.path for part in parts for extent in part.extents}))
        self._close = weakref.finalize(self, self._files.close)
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self.max_cached_rows = min(max(1, cache_nbytes // self.form.nbytes), self.rows)
        # pages are allocated when rows are first written
        self._cached = np.empty((self.max_cached_rows, self.form.nbytes), np.uint8)
        self._slots: OrderedDict[int, int] = OrderedDict()
        self.requested = self.read = 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(part.rows * sum(extent.nbytes for extent in part.extents) for part in self.parts)

    @property
    def cached_nbytes(self) -> int:
        """Bytes of cached rows."""
        return len(self._slots) * self.form.nbytes

    def fetch(self, ids: Tensor) -> RowFetch:
        """Start to read rows: int64 [n]."""
        wanted, order = np.unique(ids.cpu().numpy().reshape(-1), return_inverse=True)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < self.rows:
            raise FormatError(f"rows {wanted[0]} to {wanted[-1]} were requested of a table of {self.rows}.")
        rows, misses = np.empty((len(wanted), self.form.nbytes), np.uint8), []
        with self._lock:
            for place, row in enumerate(wanted.tolist()):
                slot = self._slots.get(row)
                if slot is None:
                    misses.append(place)
                else:
                    self._slots.move_to_end(row)
                    rows[place] = self._cached[slot]
            self.requested, self.read = self.requested + len(wanted), self.read + len(misses)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(DEPTH, "auraflux-rows")
        made = RowFetch(self, wanted, rows, order.reshape(-1), misses)
        made.begin(self._pool)
        return made

    def read_row(self, row: int, into: np.ndarray) -> None:
        """Read one row and verify its checksum, if it has one."""
        number = bisect_right(self._firsts, row) - 1
        part, index = self.parts[number], row - self._firsts[number]
        if part.records:
            (extent,) = part.extents
            record = bytearray(extent.nbytes)
            self._files.read(extent.path, memoryview(record), extent.start + index * extent.nbytes)
            row_bytes, expected = record[:-CHECKSUM_NBYTES], int.from_bytes(record[-CHECKSUM_NBYTES:], "little")
            if (found := zlib.crc32(row_bytes)) != expected:
                self._files.check([extent.path])
                raise FormatError(
                    f"row {index} of {part.name} is corrupt: {extent.path} does not match its checksum "
                    f"(CRC-32 {found:08x}, expected {expected:08x}); convert the model again."
                )
            into[:] = np.frombuffer(row_bytes, np.uint8)
            return
        memory, at = into.data, 0
        for extent in part.extents:
            self._files.read(extent.path, memory[at : at + extent.nbytes], extent.start + index * extent.nbytes)
            at += extent.nbytes

    def cache_rows(self, ids: np.ndarray, rows: np.ndarray, places: list[int]) -> None:
        """Cache rows that were read and evict the least recently used; raise if their files have changed."""
        if not places:
            return
        numbers = {bisect_right(self._firsts, int(ids[place])) - 1 for place in places}
        self._files.check(sorted({extent.path for number in numbers for extent in self.parts[number].extents}))
        with self._lock:
            for place in places[-self.max_cached_rows :]:
                row = int(ids[place])
                if row in self._slots:
                    continue
                free = len(self._slots)
                slot = free if free < self.max_cached_rows else self._slots.popitem(last=False)[1]
                self._slots[row] = slot
                self._cached[slot] = rows[place]

    def chunks(self, nbytes: int) -> Iterator[Tensor]:
        """Yield all rows in order, about `nbytes` at a time, without checksums: uint8 [n, row bytes]."""
        step = max(1, nbytes // self.form.nbytes)
        for first in range(0, self.rows, step):
            yield self._chunk(first, min(first + step, self.rows))

    def _chunk(self, first: int, last: int) -> Tensor:
        made = np.empty((last - first, self.form.nbytes), np.uint8)
        for number, part in enumerate(self.parts):
            low, high = max(first, self._firsts[number]), min(last, self._firsts[number + 1])
            if low >= high:
                continue
            if part.records:
                for row in range(low, high):
                    self.read_row(row, made[row - first])
                continue
            at = 0
            for extent in part.extents:
                block = np.empty((high - low, extent.nbytes), np.uint8)
                start = extent.start + (low - self._firsts[number]) * extent.nbytes
                self._files.read(extent.path, block.reshape(-1).data, start)
                made[low - first : high - first, at : at + extent.nbytes] = block
                at += extent.nbytes
            self._files.check([extent.path for extent in part.extents])
        return torch.from_numpy(made)
