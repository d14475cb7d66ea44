"""Reads of experts: pieces, order, ends."""

import mmap
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch

from auraflux.errors import ExpertError
from auraflux.weights.expert_files import ExpertFile
from auraflux.weights.reader import Reader
from auraflux.weights.traffic import ExpertTraffic, Meter, Traffic
from tests.weights.packed import write_experts


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> ExpertFile:
    torch.manual_seed(0)
    return write_experts(tmp_path_factory.mktemp("packed"), layers=1)[0].files[0]


def memory(file: ExpertFile) -> memoryview:
    return memoryview(mmap.mmap(-1, file.stride))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("piece", [4096, 1 << 20])
def test_reads_what_was_written(file: ExpertFile, piece: int, direct: bool):
    reader, meter = Reader(depth=3, piece=piece, direct=direct), Meter()
    places = [memory(file) for _ in range(file.count)]
    reads = [reader.read(file, expert, place, meter) for expert, place in enumerate(places)]
    reader.wait(lambda: all(read.done for read in reads))
    whole = file.path.read_bytes()
    assert all(read.error is None for read in reads)
    assert b"".join(bytes(place) for place in places) == whole
    assert meter.traffic().nbytes == reader.meter.traffic().nbytes == len(whole)
    assert meter.traffic().bandwidth > 0
    reader.close()


def test_what_somebody_waits_for_comes_first(file: ExpertFile, monkeypatch: pytest.MonkeyPatch):
    import os

    order: list[int] = []
    held, real = threading.Event(), os.preadv

    def preadv(handle: int, buffers: object, offset: int) -> int:
        held.wait()
        order.append(offset // file.stride)
        return real(handle, buffers, offset)  # type: ignore[arg-type]

    reader = Reader(depth=1, verify=False)
    reader.probe([file])
    monkeypatch.setattr(os, "preadv", preadv)
    reads = [reader.read(file, expert, memory(file), Meter(), ahead=True) for expert in (0, 1, 2, 3)]
    while len(reader._desk.later) == 4:
        time.sleep(0.001)
    reads.append(reader.read(file, 9, memory(file), Meter()))
    reader.hurry(reads[2])
    held.set()
    reader.wait(lambda: all(read.done for read in reads))
    assert order == [0, 9, 2, 1, 3]


def test_an_expert_is_held_against_its_checksum_when_first_read_or_changed(tmp_path: Path):
    file = write_experts(tmp_path, layers=1)[0].files[0]
    reader = Reader()

    def error() -> ExpertError | None:
        read = reader.read(file, 3, memory(file), Meter())
        reader.wait(lambda: read.done)
        return read.error  # type: ignore[return-value]

    assert error() is None
    good = file.path.read_bytes()
    # files count time in ticks; what is written within one of the last write cannot be told apart
    time.sleep(0.05)
    with file.path.open("r+b") as raw:
        raw.seek(file.offset(3))
        raw.write(b"\x01\x02\x03\x04\x05\x06\x07\x08")
    assert "holds other bytes than were packed" in str(error())
    file.path.write_bytes(good)
    assert error() is None


def test_threads_end_with_the_reader():
    reader = Reader(depth=3)
    desk, gone = reader._desk, weakref.ref(reader)
    assert desk.threads == 3
    del reader
    assert gone() is None
    for _ in range(500):
        if desk.threads == 0:
            break
        time.sleep(0.01)
    assert desk.threads == 0


def test_traffic_is_a_difference():
    late = ExpertTraffic(Traffic(5, 1, 4, 100, 2.0, 1.0), {"a": Traffic(5, 1, 4, 100, 2.0, 1.0)})
    early = ExpertTraffic(Traffic(1, 0, 1, 40, 0.5, 0.5), {})
    found = late - early
    assert found.total == Traffic(4, 1, 3, 60, 1.5, 0.5)
    assert found.total.hit_rate == 0.5
    assert found.total.bandwidth == 40
    assert found.layers == late.layers
    assert Traffic().hit_rate == Traffic().bandwidth == 0


def test_a_slower_disk_gives_one_piece_after_the_other(file: ExpertFile):
    reader, began = Reader(depth=4, verify=False, rate=file.count * file.stride * 5), time.monotonic()
    reads = [reader.read(file, expert, memory(file), Meter()) for expert in range(file.count)]
    reader.wait(lambda: all(read.done for read in reads))
    assert time.monotonic() - began >= 0.2
    assert all(read.error is None for read in reads)
    reader.close()
