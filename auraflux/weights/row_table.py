"""`RowTable`: a table that stays on disk. A step reads the rows it needs, several at once, and the newest stay in memory.

A table may lie in many parts, in one file or in several. Nothing of it is mapped or read but the rows that are asked for, which
come through `pread`; the system's page cache may keep what it likes. A file that is written to while the model is in use is
refused, as those are that are mapped (`watch.py`), and where rows have checksums, each is held against its own when it is read.
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
from auraflux.weights.row_forms import CHECKSUM_NBYTES, RowForm

BY_ROWS = re.compile(r"\.ngram_embedding\.")  # in the names of tables that stay on disk
HOT_NBYTES = 16 << 20  # of rows that stay in memory, of each table
DEPTH = 8  # reads under way at once
TOGETHER = 4  # rows that are read without another thread's help


def loaded_nbytes(sizes: Mapping[str, int]) -> int:
    """Bytes of tensors that are loaded, of all tensors by name: those without tables."""
    return sum(nbytes for name, nbytes in sizes.items() if not BY_ROWS.search(name))


@dataclass(frozen=True)
class Extent:
    """Where rows lie in a file: row i takes `nbytes` bytes from start + i * nbytes on."""

    path: Path
    start: int
    nbytes: int


@dataclass(frozen=True)
class TablePart:
    """Some consecutive rows of a table.

    extents  of their numbers, or of codes, scales and biases; or of records, which have all of them and a checksum
    records  whether it is the latter
    """

    name: str
    rows: int
    form: RowForm
    extents: tuple[Extent, ...]
    records: bool = False


class _Files:
    """Open files, and what they were when they were opened."""

    def __init__(self, paths: Sequence[Path]):
        self._open: dict[Path, tuple[int, tuple[int, int]]] = {}
        for path in paths:
            try:
                number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as err:
                raise FormatError(f"{path} cannot be read: {err.strerror}.") from err
            if hasattr(os, "posix_fadvise"):
                # rows are far apart: what lies between them need not be read
                os.posix_fadvise(number, 0, 0, os.POSIX_FADV_RANDOM)
            self._open[path] = number, _stamp(number)

    def read(self, path: Path, memory: memoryview, position: int) -> None:
        """Fill memory with a file's bytes from a position on."""
        number = self._open[path][0]
        while memory:
            try:
                count = os.preadv(number, [memory], position)
            except OSError as err:
                raise FormatError(f"{path} gives an error ({err.strerror or err}).") from err
            if not count:
                self.check([path])
                raise FormatError(f"{path} ends before row bytes at {position}; fetch it again.")
            memory, position = memory[count:], position + count

    def check(self, paths: Sequence[Path]) -> None:
        """Refuse to go on where a file has changed."""
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


class Coming(Protocol):
    """Rows that were asked for."""

    def result(self) -> Tensor:
        """Wait for the rows, in the order they were asked for: float32 [n, width]."""


class Rows(Protocol):
    """A table that stays elsewhere."""

    def fetch(self, ids: Tensor) -> Coming:
        """Begin to read rows: int64 [n]."""


class Fetch:
    """Rows on their way to memory."""

    def __init__(self, table: "RowTable", ids: np.ndarray, rows: np.ndarray, order: np.ndarray, missing: list[int]):
        self._table, self._ids, self._rows, self._order, self._missing = table, ids, rows, order, missing
        self._reads: list[Future[None]] = []

    def begin(self, pool: ThreadPoolExecutor) -> None:
        """Share the rows that have to be read among threads."""
        step = max(TOGETHER, -(-len(self._missing) // DEPTH))
        for start in range(0, len(self._missing), step):
            self._reads.append(pool.submit(self._read, self._missing[start : start + step]))

    def _read(self, places: list[int]) -> None:
        for place in places:
            self._table.read_row(int(self._ids[place]), self._rows[place])

    def result(self) -> Tensor:
        """Wait for the rows, in the order they were asked for: float32 [n, width]."""
        for read in self._reads:
            read.result()
        self._table.arrived(self._ids, self._rows, self._missing)
        self._missing = []
        return self._table.form.numbers(torch.from_numpy(self._rows))[torch.from_numpy(self._order)]


class RowTable:
    """A table of rows of one form, in parts.

    hot_nbytes  most bytes of rows that stay in memory
    asked, read  rows so far, each once in a step
    """

    def __init__(self, parts: Sequence[TablePart], hot_nbytes: int = HOT_NBYTES):
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
        self.hot_rows = min(max(1, hot_nbytes // self.form.nbytes), self.rows)
        # memory is taken as rows are written to it
        self._hot = np.empty((self.hot_rows, self.form.nbytes), np.uint8)
        self._slots: OrderedDict[int, int] = OrderedDict()
        self.asked = self.read = 0

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(part.rows * sum(extent.nbytes for extent in part.extents) for part in self.parts)

    @property
    def hot_nbytes(self) -> int:
        """Bytes of the rows that are in memory."""
        return len(self._slots) * self.form.nbytes

    def fetch(self, ids: Tensor) -> Fetch:
        """Begin to read rows: int64 [n]."""
        wanted, order = np.unique(ids.cpu().numpy().reshape(-1), return_inverse=True)
        if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < self.rows:
            raise FormatError(f"rows {wanted[0]} to {wanted[-1]} were asked for of a table that has {self.rows}.")
        rows, missing = np.empty((len(wanted), self.form.nbytes), np.uint8), []
        with self._lock:
            for place, row in enumerate(wanted.tolist()):
                slot = self._slots.get(row)
                if slot is None:
                    missing.append(place)
                else:
                    self._slots.move_to_end(row)
                    rows[place] = self._hot[slot]
            self.asked, self.read = self.asked + len(wanted), self.read + len(missing)
            if self._pool is None:
                self._pool = ThreadPoolExecutor(DEPTH, "auraflux-rows")
        made = Fetch(self, wanted, rows, order.reshape(-1), missing)
        made.begin(self._pool)
        return made

    def read_row(self, row: int, into: np.ndarray) -> None:
        """Read one row, and hold it against its checksum where it has one."""
        number = bisect_right(self._firsts, row) - 1
        part, index = self.parts[number], row - self._firsts[number]
        if part.records:
            (extent,) = part.extents
            record = bytearray(extent.nbytes)
            self._files.read(extent.path, memoryview(record), extent.start + index * extent.nbytes)
            kept, sum_ = record[:-CHECKSUM_NBYTES], int.from_bytes(record[-CHECKSUM_NBYTES:], "little")
            if (found := zlib.crc32(kept)) != sum_:
                self._files.check([extent.path])
                raise FormatError(
                    f"row {index} of {part.name} is damaged: {extent.path} holds other bytes than were written "
                    f"(CRC-32 {found:08x}, not {sum_:08x}); convert the model again."
                )
            into[:] = np.frombuffer(kept, np.uint8)
            return
        memory, at = into.data, 0
        for extent in part.extents:
            self._files.read(extent.path, memory[at : at + extent.nbytes], extent.start + index * extent.nbytes)
            at += extent.nbytes

    def arrived(self, ids: np.ndarray, rows: np.ndarray, places: list[int]) -> None:
        """Keep rows that were read, in place of those asked for longest ago; refuse them where their files have changed."""
        if not places:
            return
        numbers = {bisect_right(self._firsts, int(ids[place])) - 1 for place in places}
        self._files.check(sorted({extent.path for number in numbers for extent in self.parts[number].extents}))
        with self._lock:
            for place in places[-self.hot_rows :]:
                row = int(ids[place])
                if row in self._slots:
                    continue
                free = len(self._slots)
                slot = free if free < self.hot_rows else self._slots.popitem(last=False)[1]
                self._slots[row] = slot
                self._hot[slot] = rows[place]

    def pieces(self, nbytes: int) -> Iterator[Tensor]:
        """Read all rows in their order, so many bytes at a time: uint8 [n, row bytes], without checksums."""
        step = max(1, nbytes // self.form.nbytes)
        for first in range(0, self.rows, step):
            yield self._piece(first, min(first + step, self.rows))

    def _piece(self, first: int, last: int) -> Tensor:
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
