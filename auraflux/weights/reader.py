"""Reads of experts from disk into memory, several at once.

A few threads take pieces of reads from two queues: what somebody waits for comes before what is read ahead. Direct reads go
past the page cache, which would otherwise hold every expert a second time; where the file system refuses them, the cache is
told to forget what was copied.
"""

import mmap
import os
import threading
import time
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from auraflux.errors import AurafluxError, ExpertError
from auraflux.weights.disk import forget
from auraflux.weights.expert_files import ALIGNMENT, ExpertFile
from auraflux.weights.traffic import Meter

DEPTH = 8  # reads under way at once: enough to last while Python is busy elsewhere
PIECE = 1 << 20  # bytes of one; larger experts are read in several
DIRECT = getattr(os, "O_DIRECT", 0)


class Read:
    """An expert on its way to memory.

    done   it is there, or cannot be had: then `error` says why
    """

    def __init__(self, file: ExpertFile, expert: int, memory: memoryview, meter: Meter, pieces: int):
        self.file, self.expert, self.memory, self.meter = file, expert, memory, meter
        # counting down is one step that no other thread can come between
        self.left = iter(range(pieces - 1, -1, -1))
        self.done = False
        self.error: AurafluxError | None = None

    def poll(self) -> bool:
        """Whether it is there, or has failed."""
        return self.done

    def fail(self, reason: str) -> None:
        file = self.file
        self.error = self.error or ExpertError(f"expert {self.expert} of {file.module} cannot be read: {file.path} {reason}.")


Piece = tuple[Read, int, int]  # and from where to where


class _Desk:
    """What the reader's threads share. They know nothing of the reader, so that it can be forgotten while they wait.

    Every piece in a queue has a ticket. Tickets, and what tells of a read's end, are queues in C: threads that wait in Python
    need the interpreter too often while kernels are launched.
    """

    def __init__(self, threads: int, direct: bool, verify: bool, rate: int | None):
        self.threads, self._rate, self._busy_until = threads, rate, 0.0
        self.lock, self._opening = threading.Lock(), threading.Lock()
        self.tickets: SimpleQueue[bool] = SimpleQueue()
        self.urgent: deque[Piece] = deque()
        self.later: deque[Piece] = deque()
        self.waiting: list[SimpleQueue[None]] = []
        self.direct, self.verify = direct, verify
        self.meter = Meter()
        self.notes: list[str] = []
        self._handles: dict[Path, tuple[int, bool]] = {}
        self._sound: dict[tuple[Path, int], int] = {}

    def work(self) -> None:
        """Take one piece after the other until a ticket says that it is the last; the last to go closes the files."""
        while self.tickets.get():
            read, start, stop = self._next()
            if read.error is None:
                self._read(read, start, stop)
            if next(read.left) == 0:
                self._finish(read)
        with self.lock:
            self.threads -= 1
            if self.threads == 0:
                for handle, _ in self._handles.values():
                    os.close(handle)

    def _next(self) -> Piece:
        while True:
            for queue in (self.urgent, self.later):
                try:
                    return queue.popleft()
                except IndexError:
                    # for a moment, a piece that is hurried is in neither
                    continue

    def _read(self, read: Read, start: int, stop: int) -> None:
        try:
            handle, direct = self.open(read.file)
            position = read.file.offset(read.expert)
            self._delay(stop - start)
            while start < stop:
                count = os.preadv(handle, [read.memory[start:stop]], position + start)
                if not direct:
                    forget(handle, position + start, count)
                start += count
                if count == 0 or (direct and start % ALIGNMENT):
                    read.fail("ends before it does")
                    return
        except OSError as err:
            read.fail(f"gives an error ({err.strerror or err})")
        except AurafluxError as err:
            read.error = read.error or ExpertError(str(err))

    def _delay(self, nbytes: int) -> None:
        """Let bytes come as late as from a disk that gives so many a second, one piece after the other."""
        if self._rate is None:
            return
        with self.lock:
            self._busy_until = max(self._busy_until, time.monotonic()) + nbytes / self._rate
            until = self._busy_until
        time.sleep(max(0.0, until - time.monotonic()))

    def _finish(self, read: Read) -> None:
        if read.error is None and self.verify:
            try:
                self._compare(read)
            except OSError as err:
                read.fail(f"gives an error ({err.strerror or err})")
        nbytes = 0 if read.error else len(read.memory)
        with self.lock:
            read.meter.end(nbytes)
            self.meter.end(nbytes)
        read.done = True
        for waiting in list(self.waiting):
            waiting.put(None)

    def _compare(self, read: Read) -> None:
        """Hold an expert against its checksum, the first time and whenever its file was written to since."""
        key, changed = (read.file.path, read.expert), os.fstat(self.open(read.file)[0]).st_mtime_ns
        if self._sound.get(key) == changed:
            return
        found, wanted = zlib.crc32(read.memory[: read.file.nbytes]), read.file.checksum(read.expert)
        if found != wanted:
            read.fail(f"holds other bytes than were packed (CRC-32 {found:08x}, not {wanted:08x}); pack the model again")
        else:
            self._sound[key] = changed

    def open(self, file: ExpertFile) -> tuple[int, bool]:
        """A file's handle, and whether it is read directly."""
        with self._opening:
            found = self._handles.get(file.path)
            if found is None:
                file.check()
                found = self._handles[file.path] = self._open(file.path)
            return found

    def _open(self, path: Path) -> tuple[int, bool]:
        if self.direct and DIRECT:
            handle = None
            try:
                handle = os.open(path, os.O_RDONLY | DIRECT)
                # some file systems take the flag and refuse the reads
                os.preadv(handle, [mmap.mmap(-1, ALIGNMENT)], 0)
                return handle, True
            except OSError:
                if handle is not None:
                    os.close(handle)
        note = f"{path.parent} cannot be read past the page cache; experts are read through it."
        if self.direct and note not in self.notes:
            self.notes.append(note)
        return os.open(path, os.O_RDONLY), False

    def close(self) -> None:
        for _ in range(self.threads):
            self.tickets.put(False)


class Reader:
    """A pool of threads that read experts.

    depth   reads under way at once
    piece   bytes of one of them
    direct  go past the page cache where the file system lets us
    verify  hold each expert's first read against its checksum
    rate    bytes a second of a slower disk that is pretended; None for the one there is
    """

    def __init__(
        self, depth: int = DEPTH, piece: int = PIECE, direct: bool = True, verify: bool = True, rate: int | None = None
    ):
        self.piece, self._desk = piece, _Desk(depth, direct, verify, rate)
        self._close = weakref.finalize(self, self._desk.close)
        for number in range(depth):
            threading.Thread(target=self._desk.work, name=f"auraflux-reader-{number}", daemon=True).start()

    @property
    def meter(self) -> Meter:
        """The traffic of all reads."""
        return self._desk.meter

    @property
    def notes(self) -> list[str]:
        return self._desk.notes

    def read(self, file: ExpertFile, expert: int, memory: memoryview, meter: Meter, ahead: bool = False) -> Read:
        """Begin to read an expert.

        memory  the file's stride in bytes, at a multiple of 4096
        ahead   nobody waits for it yet
        """
        starts = range(0, len(memory), self.piece)
        read = Read(file, expert, memory, meter, len(starts))
        desk = self._desk
        with desk.lock:
            meter.begin()
            desk.meter.begin()
        pieces = [(read, start, min(start + self.piece, len(memory))) for start in starts]
        (desk.later if ahead else desk.urgent).extend(pieces)
        for _ in pieces:
            desk.tickets.put(True)
        return read

    def hurry(self, read: Any) -> None:
        """Somebody waits by now for what was to be read ahead."""
        desk = self._desk
        for piece in list(desk.later):
            if piece[0] is read:
                with suppress(ValueError):
                    desk.later.remove(piece)
                    desk.urgent.append(piece)

    def wait(self, until: Callable[[], bool]) -> None:
        """Sleep until something is so that only a read's end can make so."""
        told: SimpleQueue[None] = SimpleQueue()
        self._desk.waiting.append(told)
        try:
            while not until():
                told.get()
        finally:
            self._desk.waiting.remove(told)

    def probe(self, files: Collection[ExpertFile]) -> None:
        """Open files now, so that what is wrong with them, and notes, are known before anyone waits."""
        for file in files:
            self._desk.open(file)

    def close(self) -> None:
        """End the threads, once they have read what was asked for."""
        self._close()
