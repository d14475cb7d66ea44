"""`DiskTier`: experts on disk below a `GpuExpertPool`, with a cache of fixed size in pinned host memory.

Kernels ask for experts through a mailbox while a CUDA graph is replayed, and native threads (`read_loop.py`) read them into
slots of host memory, shared by all layers. The host learns of a failed read after the step, from `check`.
"""

import ctypes
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from auraflux.errors import ExpertError, SettingsError
from auraflux.machine import usable_cores
from auraflux.ops.moe.cpu import read_setup as at
from auraflux.ops.moe.cpu.polling import LINE, SHARED_NBYTES, SPIN_NS, TIMESPEC_NBYTES, init_polling, libc_addresses, wake
from auraflux.ops.moe.cpu.read_loop import await_answer, compile_loop, post_request, serve_reads
from auraflux.ops.moe.experts import BIASES, Stack, blob_nbytes
from auraflux.ops.moe.pool import HALF_LIFE_TOKENS, DiskMailbox
from auraflux.ops.simd.crc32 import advance_table, step_table
from auraflux.weights.experts.disk_reader import DEPTH, not_direct, open_direct
from auraflux.weights.experts.packed_files import ALIGNMENT, ExpertFile
from auraflux.weights.experts.pool.host_memory import HostMemory
from auraflux.weights.experts.settings import format_nbytes
from auraflux.weights.experts.stats import ExpertCacheStats

LINE_NBYTES = 128  # a GPU transfers this much; a field that one side polls has a line of its own
PATIENCE_S = 60  # that a kernel waits for an expert
PIN_NBYTES = 1 << 30  # of host memory that is pinned at once
WAIT_NS = 100_000_000  # of a wait in native code, between which Python handles signals
ROOM_NBYTES = TIMESPEC_NBYTES + at.STAT_NBYTES
LIBC = "pread", "posix_fadvise", "clock_nanosleep", "__errno_location", "syscall"


class _Layer(NamedTuple):
    """A layer's file, its handle, whether it is read with O_DIRECT, and the biases of its experts, uint8 [E, nbytes]."""

    file: ExpertFile
    handle: int
    direct: bool
    biases: Tensor


@dataclass(frozen=True)
class _Running:
    """Threads, the memory that they share, their own memory, and the files that they read."""

    threads: list[threading.Thread]
    shared: int
    rooms: list[int]
    memory: list[Any]
    handles: list[int]


class DiskTier:
    """Experts on disk with a cache in host memory.

    nbytes     of the cache, at most
    bandwidth  bytes per second of a simulated disk; None for the real one
    notes      sentences for the user
    pinned     whether GPU kernels can read the cache
    """

    def __init__(self, nbytes: int, device: torch.device, verify: bool = True, bandwidth: int | None = None):
        self.nbytes, self.device, self.verify, self.bandwidth = nbytes, device, verify, bandwidth
        self.pinned = device.type == "cuda"
        self.notes: list[str] = []
        self.depth, self.patience_s = DEPTH, float(PATIENCE_S)
        self._layers: list[_Layer] = []
        self._mailbox: DiskMailbox | None = None
        self._running: _Running | None = None
        self._memory: list[HostMemory] = []
        self._counters = torch.zeros(at.COUNTER_WORDS, dtype=torch.int64)

    @property
    def mailbox(self) -> DiskMailbox:
        assert self._mailbox is not None, "start() was not called"
        return self._mailbox

    @property
    def slots(self) -> int:
        """Number of experts that the cache holds."""
        return len(self.mailbox.slots)

    def add_layer(self, file: ExpertFile, like: Mapping[str, Stack], biases: Mapping[str, Tensor]) -> None:
        """Add the experts of one more layer; biases are not in its file."""
        file.check()
        handle, direct = open_direct(file.path)
        if not direct and (note := not_direct(file.path)) not in self.notes:
            self.notes.append(note)
        rows = torch.zeros(file.count, blob_nbytes(like) - file.nbytes, dtype=torch.uint8)
        if rows.shape[1]:
            for expert, row in enumerate(rows):
                found = torch.cat([biases[name][expert].contiguous().view(torch.uint8) for name in BIASES if name in biases])
                row[rows.shape[1] - len(found) :] = found
        self._layers.append(_Layer(file, handle, direct, rows))

    def start(self, k: int) -> None:
        """Allocate the cache, which must hold the k experts of a token, and start the threads."""
        count, files = self._layers[0].file.count, [each.file for each in self._layers]
        if count > 1 << at.EXPERT_BITS:
            raise SettingsError(f"a layer has {count} experts; below a GPU up to {1 << at.EXPERT_BITS} can be on disk.")
        wide = max(max(each.file.stride, each.file.nbytes + each.biases.shape[1]) for each in self._layers)
        stride = -(-wide // ALIGNMENT) * ALIGNMENT
        slots = min(self.nbytes // stride, count * len(files), (1 << at.SLOT_BITS) - 2)
        if slots < k:
            raise SettingsError(
                f"{format_nbytes(self.nbytes)} of host memory for experts is too little: a token uses {k} experts of "
                f"{format_nbytes(stride)}. Give --expert-host-memory {format_nbytes(k * stride)} or more."
            )
        memory = self._allocate(slots * stride, PIN_NBYTES // stride * stride).view(slots, stride)
        self._mailbox, block = self._make_mailbox(memory, count)
        self._running = self._start(self._make_setup(count), block)
        # threads must end before their memory is freed, and when nobody holds this object
        self._finalizer = weakref.finalize(self, _stop, self._running)

    def _allocate(self, nbytes: int, part: int = 0) -> Tensor:
        """Allocate host memory and pin it, part by part."""
        memory = HostMemory(nbytes, self.device)
        _, made = memory.allocate(nbytes)
        for each in made.split(part or nbytes):
            memory.pin(each)
        self.pinned = self.pinned and memory.pinned
        # it is unpinned when this object is collected
        self._memory.append(memory)
        return made

    def _make_mailbox(self, memory: Tensor, count: int) -> tuple[DiskMailbox, Tensor]:
        """Return an empty mailbox and its memory."""
        fields = {"request": (1, torch.int32), "header": (4, torch.int32), "experts": (count, torch.int32)}
        fields |= {"answers": (count, torch.int64), "late": (1, torch.int32)}
        ends = np.cumsum([-(-number * dtype.itemsize // LINE_NBYTES) * LINE_NBYTES for number, dtype in fields.values()])
        block = self._allocate(-(-int(ends[-1]) // ALIGNMENT) * ALIGNMENT)
        request, header, experts, answers, late = (
            block[start : start + number * dtype.itemsize].view(dtype)
            for start, (number, dtype) in zip([0, *ends.tolist()], fields.values(), strict=False)
        )
        patience = torch.tensor([int(self.patience_s * 1e9)], dtype=torch.int64, device=self.device)
        arrived, failed = (torch.zeros(size, dtype=torch.int64, device=self.device) for size in (count, 1))
        return DiskMailbox(request, header, experts, answers, late, memory, arrived, failed, patience), block

    def _make_setup(self, count: int) -> tuple[Tensor, list[Any]]:
        """Return the words of `read_setup.py`, and the memory that they refer to."""
        box, layers = self.mailbox, self._layers
        (slots, size), total = box.slots.shape, len(layers) * count
        chunks = max(-(-each.file.stride // at.CHUNK_NBYTES) for each in layers)
        tables = {
            at.SLOT_OF: torch.full((total,), -1),
            at.OWNERS: torch.full((slots,), -1),
            at.USES: torch.zeros(slots, dtype=torch.float64),
            at.HELD: torch.full((slots,), -1),
            at.VERIFIED: torch.zeros(total, dtype=torch.int64),
            at.SUMS: torch.from_numpy(np.concatenate([each.file.checksums for each in layers]).astype(np.int64)),
            at.JOBS: torch.zeros(count, at.JOB_WORDS, dtype=torch.int64),
            at.CRCS: torch.zeros(count, chunks, dtype=torch.int64),
            at.COUNTERS: self._counters,
            at.HEADER: box.header,
            at.LIST: box.experts,
            at.ANSWERS: box.answers,
            at.MEMORY: box.slots,
            at.STEP_TABLE: torch.from_numpy(step_table()),
            at.QUARTER_TABLE: torch.from_numpy(advance_table(at.CHUNK_NBYTES // 4)),
            at.CHUNK_TABLE: torch.from_numpy(advance_table(at.CHUNK_NBYTES)),
        }
        rests = {each.file.nbytes % at.CHUNK_NBYTES for each in layers}
        rest_tables = {nbytes: torch.from_numpy(advance_table(nbytes)) for nbytes in rests}
        rows = [
            (
                each.handle, each.direct, each.file.stride, each.file.nbytes, -(-each.file.stride // at.CHUNK_NBYTES),
                rest_tables[each.file.nbytes % at.CHUNK_NBYTES].data_ptr(), each.biases.data_ptr(), each.biases.shape[1],
            )
            for each in layers
        ]  # fmt: skip
        tables[at.LAYER_ROWS] = torch.tensor(rows, dtype=torch.int64)
        setup = torch.zeros(at.SETUP_WORDS, dtype=torch.int64)
        for place, table in tables.items():
            setup[place] = table.data_ptr()
        sizes = len(layers), count, slots, size, HALF_LIFE_TOKENS * len(layers), self.verify, self.bandwidth or 0
        setup[: at.BANDWIDTH + 1] = torch.tensor(sizes, dtype=torch.int64)
        calls = *libc_addresses(*LIBC), at.FSTAT_NUMBERS.get(os.uname().machine, 0)
        setup[at.READ : at.FSTAT + 1] = torch.tensor(calls, dtype=torch.int64)
        return setup, [*tables.values(), *rest_tables.values(), layers]

    def _start(self, made: tuple[Tensor, list[Any]], block: Tensor) -> _Running:
        """Start the threads."""
        compile_loop()
        setup, tables = made
        each = -(-ROOM_NBYTES // LINE) * LINE
        room = ctypes.create_string_buffer(SHARED_NBYTES + (self.depth + 1) * each + LINE)
        shared = -(-ctypes.addressof(room) // LINE) * LINE
        init_polling(shared, self.mailbox.request.data_ptr(), (setup.data_ptr(),))
        rooms = [shared + SHARED_NBYTES + number * each for number in range(self.depth + 1)]
        memory = [room, setup, tables, block, self._memory]
        # threads that poll would keep others from their cores
        spin_ns = SPIN_NS if usable_cores() > self.depth + 1 else 0
        threads = [
            threading.Thread(
                target=_serve,
                args=(memory, shared, int(n == 0), SPIN_NS if n == 0 else spin_ns, rooms[n]),
                name=f"expert-reader-{n}",
                daemon=True,
            )
            for n in range(self.depth)
        ]
        for thread in threads:
            thread.start()
        return _Running(threads, shared, rooms, memory, [layer.handle for layer in self._layers])

    def stop(self) -> None:
        """Stop the threads after the request that they serve, and close the files."""
        if self._running is not None:
            self._finalizer()
        self._running = None

    def wake(self) -> None:
        """Make the threads poll before a step asks for experts."""
        if self._running is not None:
            wake(self._running.shared, 0)

    def read(self, layer: int, experts: list[int], streamed: bool = False) -> Iterator[tuple[int, Tensor]]:
        """Yield experts as they arrive in host memory, with their bytes; those that cannot be read are left out.

        Their slots are kept until the next request, so no kernel or copy may still read those of the last one.

        streamed  by a long prefill step: they are evicted first
        """
        assert self._running is not None, "start() was not called"
        box, shared, room = self.mailbox, self._running.shared, self._running.rooms[-1]
        number = (int(box.request) + 1) & 0x7FFFFFFF
        box.header[:3] = torch.tensor([layer, len(experts), int(streamed)], dtype=torch.int32)
        box.experts[: len(experts)] = torch.tensor(experts, dtype=torch.int32)
        post_request(box.request.data_ptr(), number)
        for place in range(len(experts)):
            waits = int(self.patience_s * 1e9 / WAIT_NS) + 1
            word = next((word for _ in range(waits) if (word := await_answer(shared, place, number, WAIT_NS, room))), 0)
            if not word:
                box.late[0] = 1
                return
            slot, expert = word & (1 << at.SLOT_BITS) - 1, word >> at.SLOT_BITS & (1 << at.EXPERT_BITS) - 1
            if slot:
                yield expert, box.slots[slot - 1]

    def check(self) -> None:
        """Raise if an expert could not be read since the last check, after the kernels that asked; then clear the error."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        box, found = self.mailbox, self._counters
        if not int(found[at.FAIL_CODE]) and not int(box.late):
            return
        code, layer, expert, detail = found[at.FAIL_CODE : at.FAIL_DETAIL + 1].tolist()
        layer = layer if code else int(box.header[0])
        box.late.zero_()
        box.failed.zero_()
        found[at.FAIL_LOCK : at.FAIL_DETAIL + 1] = 0
        if not 0 <= layer < len(self._layers):
            raise ExpertError(f"a step used layer {layer} of {len(self._layers)} with experts on disk.")
        file = self._layers[layer].file
        who = f"expert {expert}" if code else "an expert"
        raise ExpertError(f"{who} of {file.module} cannot be read: {file.path} {self._reason(file, code, expert, detail)}.")

    def _reason(self, file: ExpertFile, code: int, expert: int, detail: int) -> str:
        """Say why an expert could not be read."""
        if code == at.READ_FAILED:
            return f"gives an error ({os.strerror(detail)})"
        if code == at.NOT_THE_CHECKSUM:
            sums = f"CRC-32 {detail:08x}, expected {file.checksum(expert):08x}"
            return f"does not match its checksum ({sums}); pack the model again"
        return {
            0: f"gave no answer for {self.patience_s:.0f} seconds",
            at.TRUNCATED: "is truncated",
            at.NO_SLOT: "has more experts in this step than host memory has room for",
        }.get(code, "has no such expert")

    def cache_stats(self) -> ExpertCacheStats:
        """Return what was found in host memory, and what was read from disk."""
        hits, reads, nbytes, busy = (int(self._counters[each]) for each in (at.HITS, at.READS, at.READ_NBYTES, at.BUSY_NS))
        return ExpertCacheStats(hits=hits, misses=reads, nbytes=nbytes, read_s=busy / 1e9)


def _serve(memory: list[Any], *words: int) -> None:
    """Run a thread, which keeps the memory that its code reads."""
    serve_reads(*words)


def _stop(running: _Running) -> None:
    wake(running.shared, 1)
    for thread in running.threads:
        thread.join()
    for handle in running.handles:
        os.close(handle)
