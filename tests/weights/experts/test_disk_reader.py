"""Disk reads of experts: chunks, priorities, checksums, shutdown."""

import mmap
import threading
import time
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from auraflux.errors import ExpertError
from auraflux.weights.experts.disk_reader import DiskReader
from auraflux.weights.experts.packed_files import ExpertFile
from auraflux.weights.experts.stats import ExpertCacheCounters, ExpertCacheStats, ExpertCacheStatsByLayer
from tests.weights.experts.packed import write_experts


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    torch.manual_seed(0)
    return write_experts(tmp_path_factory.mktemp("packed"), layers=1)[0].files[0]


def memory(file: ExpertFile) -> memoryview:
    return memoryview(mmap.mmap(-1, file.stride))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("chunk_nbytes", [4096, 1 << 20])
def test_reads_what_was_written(file: ExpertFile, chunk_nbytes: int, direct: bool):
    reader, counters = DiskReader(depth=3, chunk_nbytes=chunk_nbytes, direct=direct), ExpertCacheCounters()
    places = [memory(file) for _ in range(file.count)]
    reads = [reader.read(file, expert, place, counters) for expert, place in enumerate(places)]
    reader.wait(lambda: all(read.done for read in reads))
    data = file.path.read_bytes()
    assert all(read.error is None for read in reads)
    assert b"".join(bytes(place) for place in places) == data
    assert counters.snapshot().nbytes == reader.counters.snapshot().nbytes == len(data)
    assert counters.snapshot().bandwidth > 0
    reader.close()


def test_misses_are_read_before_prefetches(file: ExpertFile, monkeypatch: pytest.MonkeyPatch):
    import os

    order: list[int] = []
    blocked, real = threading.Event(), os.preadv

    def preadv(handle: int, buffers: object, offset: int) -> int:
        blocked.wait()
        order.append(offset // file.stride)
        return real(handle, buffers, offset)  # type: ignore[arg-type]

    reader = DiskReader(depth=1, verify=False)
    reader.open_files([file])
    monkeypatch.setattr(os, "preadv", preadv)
    reads = [reader.read(file, expert, memory(file), ExpertCacheCounters(), prefetch=True) for expert in (0, 1, 2, 3)]
    while len(reader._queue.prefetches) == 4:
        time.sleep(0.001)
    reads.append(reader.read(file, 9, memory(file), ExpertCacheCounters()))
    reader.prioritize(reads[2])
    blocked.set()
    reader.wait(lambda: all(read.done for read in reads))
    assert order == [0, 9, 2, 1, 3]


def test_checksums_are_verified_on_the_first_read_and_after_a_change(tmp_path: Path):
    file = write_experts(tmp_path, layers=1)[0].files[0]
    reader = DiskReader()

    def error() -> ExpertError | None:
        read = reader.read(file, 3, memory(file), ExpertCacheCounters())
        reader.wait(lambda: read.done)
        return read.error  # type: ignore[return-value]

    assert error() is None
    good = file.path.read_bytes()
    # modification times have a coarse resolution
    time.sleep(0.05)
    with file.path.open("r+b") as raw:
        raw.seek(file.offset(3))
        raw.write(b"\x01\x02\x03\x04\x05\x06\x07\x08")
    assert "does not match its checksum" in str(error())
    file.path.write_bytes(good)
    assert error() is None


def test_threads_end_with_the_reader():
    reader = DiskReader(depth=3)
    queue, gone = reader._queue, weakref.ref(reader)
    assert queue.threads == 3
    del reader
    assert gone() is None
    for _ in range(500):
        if queue.threads == 0:
            break
        time.sleep(0.01)
    assert queue.threads == 0


def test_stats_can_be_subtracted():
    late = ExpertCacheStatsByLayer(ExpertCacheStats(5, 1, 4, 100, 2.0, 1.0), {"a": ExpertCacheStats(5, 1, 4, 100, 2.0, 1.0)})
    early = ExpertCacheStatsByLayer(ExpertCacheStats(1, 0, 1, 40, 0.5, 0.5), {})
    found = late - early
    assert found.total == ExpertCacheStats(4, 1, 3, 60, 1.5, 0.5)
    assert found.total.hit_rate == 0.5
    assert found.total.bandwidth == 40
    assert found.layers == late.layers
    assert ExpertCacheStats().hit_rate == ExpertCacheStats().bandwidth == 0


def test_a_simulated_disk_delivers_one_chunk_after_the_other(file: ExpertFile, monkeypatch: pytest.MonkeyPatch):
    delays: list[float] = []
    monkeypatch.setattr(
        "auraflux.weights.experts.disk_reader.time", SimpleNamespace(monotonic=lambda: 0.0, sleep=delays.append)
    )
    reader = DiskReader(depth=4, verify=False, bandwidth=file.stride * 5)
    reads = [reader.read(file, expert, memory(file), ExpertCacheCounters()) for expert in range(file.count)]
    reader.wait(lambda: all(read.done for read in reads))
    assert sorted(delays) == pytest.approx([0.2 * (number + 1) for number in range(file.count)])
    assert all(read.error is None for read in reads)
    reader.close()
