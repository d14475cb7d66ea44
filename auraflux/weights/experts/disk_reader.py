"""Reads of experts from disk into memory, several in flight.

A few threads take chunks of reads from two queues: misses, which a step waits for, before prefetches. Reads use O_DIRECT, as
the page cache would hold every expert a second time; where the file system refuses it, pages are dropped after the copy.
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
from auraflux.weights.experts.packed_files import ALIGNMENT, ExpertFile
from auraflux.weights.experts.page_cache import drop_page_cache
from auraflux.weights.experts.stats import ExpertCacheCounters

DEPTH = 8  # reads in flight: enough to keep the disk busy while Python runs elsewhere
CHUNK_NBYTES = 1 << 20  # of one read; larger experts take several
O_DIRECT = getattr(os, "O_DIRECT", 0)


class Read:
    """Read of one expert into memory.

    done   it has finished, or failed with `error`
    """

    def __init__(self, file: ExpertFile, expert: int, memory: memoryview, counters: ExpertCacheCounters, chunks: int):
        self.file, self.expert, self.memory, self.counters = file, expert, memory, counters
        # next() on an iterator is atomic: threads count down without a lock
        self.left = iter(range(chunks - 1, -1, -1))
        self.done = False
        self.error: AurafluxError | None = None

    def poll(self) -> bool:
        """Return whether the read has finished or failed."""
        return self.done

    def fail(self, reason: str) -> None:
        """Record the first error."""
        file = self.file
        self.error = self.error or ExpertError(f"expert {self.expert} of {file.module} cannot be read: {file.path} {reason}.")


Chunk = tuple[Read, int, int]  # of a read, from start to stop


def open_direct(path: Path) -> tuple[int, bool]:
    """Open a file for O_DIRECT reads if the file system supports them; return its handle, and whether it does."""
    if O_DIRECT:
        handle = None
        try:
            handle = os.open(path, os.O_RDONLY | O_DIRECT)
            # some file systems accept the flag and refuse the reads
            os.preadv(handle, [mmap.mmap(-1, ALIGNMENT)], 0)
            return handle, True
        except OSError:
            if handle is not None:
                os.close(handle)
    return os.open(path, os.O_RDONLY), False


def not_direct(path: Path) -> str:
    """Return the note for a file that is read through the page cache."""
    return f"{path.parent} does not support O_DIRECT; experts are read through the page cache."


class _ReadQueue:
    """State shared by the reader threads. They hold no reference to the reader, so that it can be collected while they wait.

    Every queued chunk has an entry in `wakeups`. Wakeups and notifications of finished reads are `SimpleQueue`s, which are
    implemented in C: locks in Python need the interpreter too often while kernels are launched.
    """

    def __init__(self, threads: int, direct: bool, verify: bool, bandwidth: int | None):
        self.threads, self._bandwidth, self._busy_until = threads, bandwidth, 0.0
        self.lock, self._open_lock = threading.Lock(), threading.Lock()
        self.wakeups: SimpleQueue[bool] = SimpleQueue()
        self.misses: deque[Chunk] = deque()
        self.prefetches: deque[Chunk] = deque()
        self.waiters: list[SimpleQueue[None]] = []
        self.direct, self.verify = direct, verify
        self.counters = ExpertCacheCounters()
        self.notes: list[str] = []
        self._handles: dict[Path, tuple[int, bool]] = {}
        self._verified: dict[tuple[Path, int], int] = {}

    def run_worker(self) -> None:
        """Read chunks until a wakeup ends the thread; the last thread closes the files."""
        while self.wakeups.get():
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

    def _next(self) -> Chunk:
        while True:
            for queue in (self.misses, self.prefetches):
                try:
                    return queue.popleft()
                except IndexError:
                    # a chunk that is being prioritized is briefly in neither queue
                    continue

    def _read(self, read: Read, start: int, stop: int) -> None:
        try:
            handle, direct = self.open(read.file)
            position = read.file.offset(read.expert)
            self._delay(stop - start)
            while start < stop:
                count = os.preadv(handle, [read.memory[start:stop]], position + start)
                if not direct:
                    drop_page_cache(handle, position + start, count)
                start += count
                if count == 0 or (direct and start % ALIGNMENT):
                    read.fail("is truncated")
                    return
        except OSError as err:
            read.fail(f"gives an error ({err.strerror or err})")
        except AurafluxError as err:
            read.error = read.error or ExpertError(str(err))

    def _delay(self, nbytes: int) -> None:
        """Sleep as long as the simulated disk takes, one chunk after the other."""
        if self._bandwidth is None:
            return
        with self.lock:
            self._busy_until = max(self._busy_until, time.monotonic()) + nbytes / self._bandwidth
            until = self._busy_until
        time.sleep(max(0.0, until - time.monotonic()))

    def _finish(self, read: Read) -> None:
        if read.error is None and self.verify:
            try:
                self._verify(read)
            except OSError as err:
                read.fail(f"gives an error ({err.strerror or err})")
        nbytes = 0 if read.error else len(read.memory)
        with self.lock:
            read.counters.end_read(nbytes)
            self.counters.end_read(nbytes)
        read.done = True
        for waiter in list(self.waiters):
            waiter.put(None)

    def _verify(self, read: Read) -> None:
        """Verify an expert's checksum on its first read, and again after its file was modified."""
        key, modified = (read.file.path, read.expert), os.fstat(self.open(read.file)[0]).st_mtime_ns
        if self._verified.get(key) == modified:
            return
        found, expected = zlib.crc32(read.memory[: read.file.nbytes]), read.file.checksum(read.expert)
        if found != expected:
            read.fail(f"does not match its checksum (CRC-32 {found:08x}, expected {expected:08x}); pack the model again")
        else:
            self._verified[key] = modified

    def open(self, file: ExpertFile) -> tuple[int, bool]:
        """Return a file's handle, and whether it is read with O_DIRECT."""
        with self._open_lock:
            found = self._handles.get(file.path)
            if found is None:
                file.check()
                found = self._handles[file.path] = self._open(file.path)
            return found

    def _open(self, path: Path) -> tuple[int, bool]:
        handle, direct = open_direct(path) if self.direct else (os.open(path, os.O_RDONLY), False)
        if self.direct and not direct and (note := not_direct(path)) not in self.notes:
            self.notes.append(note)
        return handle, direct

    def close(self) -> None:
        """End all threads once the queues are empty."""
        for _ in range(self.threads):
            self.wakeups.put(False)


class DiskReader:
    """Pool of threads that read experts.

    depth         reads in flight
    chunk_nbytes  bytes of one of them
    direct        use O_DIRECT where the file system supports it
    verify        verify each expert's checksum on its first read
    bandwidth     bytes per second of a simulated disk; None for the real one
    """

    def __init__(
        self,
        depth: int = DEPTH,
        chunk_nbytes: int = CHUNK_NBYTES,
        direct: bool = True,
        verify: bool = True,
        bandwidth: int | None = None,
    ):
        self.chunk_nbytes, self._queue = chunk_nbytes, _ReadQueue(depth, direct, verify, bandwidth)
        self._close = weakref.finalize(self, self._queue.close)
        for number in range(depth):
            threading.Thread(target=self._queue.run_worker, name=f"auraflux-reader-{number}", daemon=True).start()

    @property
    def counters(self) -> ExpertCacheCounters:
        """Counters of all reads."""
        return self._queue.counters

    @property
    def notes(self) -> list[str]:
        return self._queue.notes

    def read(
        self, file: ExpertFile, expert: int, memory: memoryview, counters: ExpertCacheCounters, prefetch: bool = False
    ) -> Read:
        """Start to read an expert.

        memory    the file's stride in bytes, aligned to 4096
        prefetch  with low priority, as no step waits for it yet
        """
        starts = range(0, len(memory), self.chunk_nbytes)
        read = Read(file, expert, memory, counters, len(starts))
        queue = self._queue
        with queue.lock:
            counters.begin_read()
            queue.counters.begin_read()
        chunks = [(read, start, min(start + self.chunk_nbytes, len(memory))) for start in starts]
        (queue.prefetches if prefetch else queue.misses).extend(chunks)
        for _ in chunks:
            queue.wakeups.put(True)
        return read

    def prioritize(self, read: Any) -> None:
        """Move a prefetch that a step now waits for to the queue of misses."""
        queue = self._queue
        for chunk in list(queue.prefetches):
            if chunk[0] is read:
                with suppress(ValueError):
                    queue.prefetches.remove(chunk)
                    queue.misses.append(chunk)

    def wait(self, until: Callable[[], bool]) -> None:
        """Wait for a condition, checked whenever a read finishes."""
        finished: SimpleQueue[None] = SimpleQueue()
        self._queue.waiters.append(finished)
        try:
            while not until():
                finished.get()
        finally:
            self._queue.waiters.remove(finished)

    def open_files(self, files: Collection[ExpertFile]) -> None:
        """Open files early, so that errors and notes are known before the first read."""
        for file in files:
            self._queue.open(file)

    def close(self) -> None:
        """End the threads after all queued reads."""
        self._close()
