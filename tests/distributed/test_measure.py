"""Measurement of ranks and of their links, after which the followers end."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection

import pytest
import torch

from auraflux.distributed import follower as following
from auraflux.distributed import measure
from auraflux.distributed.comm.slow_link import SimulatedLink, find_link
from auraflux.distributed.leader import Leader
from auraflux.distributed.measure import HostSpeeds, RankMeasurement, slowest_link
from auraflux.distributed.parallel import LOCAL, is_address
from auraflux.errors import InputError
from auraflux.ops.simd import peak_bandwidth
from auraflux.weights.experts.read_speed import FileChunks, disk_speed
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.distributed.threaded_ranks import PATIENCE_S, free_port, parallel_here
from tests.engine.tiny import tiny


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read memory and disks for no longer than a test wants."""
    monkeypatch.setattr(peak_bandwidth, "peak_read_bandwidth", lambda: {"all_threads": 5e9})
    monkeypatch.setattr(measure, "DISK_S", 0.02)
    monkeypatch.setattr(measure, "LONG_S", 0.01)


@contextmanager
def led(size: int = 2, network: str = "here") -> Iterator[Leader]:
    """A group whose followers are threads, which have ended afterwards."""
    port = free_port()
    with ThreadPoolExecutor(size) as threads:

        def call() -> Leader:
            return Leader(
                parallel_here(f"pipeline={size}", port, network=network), open_checkpoint(tiny()), torch.device("cpu")
            )

        calling = threads.submit(call)
        followers = [threads.submit(follow_soon, port, network, calling) for _ in range(size - 1)]
        try:
            with calling.result(PATIENCE_S) as leader:
                yield leader
        finally:
            ended = [each.exception(PATIENCE_S) for each in followers]
    assert [type(each) for each in ended if each is not None] in ([], [InputError])


def follow_soon(port: int, network: str, calling: "Future[Leader]") -> None:
    """Follow as soon as rank 0 listens."""
    while not calling.done():
        try:
            create_connection((LOCAL, port), 1).close()
            break
        except OSError:
            continue
    following.follow(LOCAL, port, tiny(), link=find_link(network))


def test_every_rank_and_link_is_measured():
    said: list[tuple[str, int, int]] = []
    with led(3, "1gbe") as leader:
        found = leader.measure(lambda *each: said.append(each))
        # what was measured once can be again, and the group is still of use
        assert len(leader.measure(lambda *each: None)) == 3
    assert [each.address for each in found] == [LOCAL] * 3
    assert [each.speeds.memory_rate for each in found] == [5e9] * 3
    assert all(each.free_nbytes > 0 and each.speeds.disk_rate for each in found)
    assert found[0].link is None
    slow = find_link("1gbe")
    for each in found[1:]:
        # the simulated delay adds to the real one
        assert each.link.latency_s >= slow.latency_s
        assert each.link.rate <= 1.5 * slow.rate
    assert [done for _, done, _ in said] == list(range(6))
    assert {total for *_, total in said} == {5}
    assert all(what.startswith("measuring: ") for what, *_ in said)


def test_the_slowest_link_counts():
    def found(link: SimulatedLink | None) -> RankMeasurement:
        return RankMeasurement("10.0.0.1", 1, HostSpeeds(1.0, None), link)

    assert slowest_link([found(None), found(SimulatedLink(1e-3, 2e9)), found(SimulatedLink(2e-3, 3e9))]) == SimulatedLink(
        2e-3, 2e9
    )
    assert slowest_link([found(None)]) == SimulatedLink()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "identity", lambda checkpoint: {"version": "0.0.1", "files": {}})
    with pytest.raises(InputError, match=r"rank 1 cannot join: it runs version 0\.0\.1, and rank 0 runs"), led():
        pass


def test_pieces_of_a_file_stand_for_a_disk(tmp_path: Path):
    assert disk_speed(open_checkpoint(tiny()), 0.02) > 0
    path = tmp_path / "file"
    for nbytes, wanted in ((0, (0, 4096)), (4095, (0, 4096)), (5000, (1, 4096)), (3 << 20, (3, 1 << 20)), (9000, (1, 8192))):
        path.write_bytes(bytes(nbytes))
        pieces = FileChunks.of(path)
        assert (pieces.count, pieces.stride) == wanted


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:29400", "::1", "[::1]:5"])
def test_addresses(text: str):
    assert is_address(text)


@pytest.mark.parametrize("text", ["16GB", "16", "16GB/3GB", "1.5G", "", "laptop", "10.0.0", "10.0.0.1:x", "10.0.0.1:70000"])
def test_what_is_no_address(text: str):
    assert not is_address(text)
