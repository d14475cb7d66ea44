"""Ranks tell rank 0 what their machines give, links are measured by what goes over them, and ranks are let go afterwards."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from socket import create_connection

import pytest
import torch

from auraflux.errors import InputError
from auraflux.ops.simd import ceiling
from auraflux.run.ranks import follow as following
from auraflux.run.ranks import measure
from auraflux.run.ranks.lead import Lead
from auraflux.run.ranks.measure import Measured, Speeds, slowest_link
from auraflux.run.ranks.parallel import LOCAL, is_address
from auraflux.run.ranks.wire import Wire, find_wire
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.read_speed import Pieces, disk_speed
from tests.run.ranks.together import PATIENCE_S, free_port, parallel_here
from tests.run.tiny import tiny


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read memory and disks for no longer than a test wants."""
    monkeypatch.setattr(ceiling, "read_ceiling", lambda: {"all_threads": 5e9})
    monkeypatch.setattr(measure, "DISK_S", 0.02)
    monkeypatch.setattr(measure, "LONG_S", 0.01)


@contextmanager
def led(size: int = 2, wire: str = "here") -> Iterator[Lead]:
    """A group whose followers are threads, which have ended afterwards."""
    port = free_port()
    with ThreadPoolExecutor(size) as threads:

        def call() -> Lead:
            return Lead(parallel_here(f"pipeline={size}", port, wire=wire), open_checkpoint(tiny()), torch.device("cpu"))

        calling = threads.submit(call)
        followers = [threads.submit(follow_soon, port, wire, calling) for _ in range(size - 1)]
        try:
            with calling.result(PATIENCE_S) as lead:
                yield lead
        finally:
            ended = [each.exception(PATIENCE_S) for each in followers]
    assert [type(each) for each in ended if each is not None] in ([], [InputError])


def follow_soon(port: int, wire: str, calling: "Future[Lead]") -> None:
    """Follow as soon as rank 0 listens."""
    while not calling.done():
        try:
            create_connection((LOCAL, port), 1).close()
            break
        except OSError:
            continue
    following.follow(LOCAL, port, tiny(), wire=find_wire(wire))


def test_every_rank_and_link_is_measured():
    said: list[tuple[str, int, int]] = []
    with led(3, "1gbe") as lead:
        found = lead.measure(lambda *each: said.append(each))
        # what was measured once can be again, and the group is still of use
        assert len(lead.measure(lambda *each: None)) == 3
    assert [each.address for each in found] == [LOCAL] * 3
    assert [each.speeds.memory_rate for each in found] == [5e9] * 3
    assert all(each.free_nbytes > 0 and each.speeds.disk_rate for each in found)
    assert found[0].link is None
    slow = find_wire("1gbe")
    for each in found[1:]:
        # messages are held back by as much, and take what they take beside
        assert each.link.latency_s >= slow.latency_s
        assert each.link.rate <= 1.5 * slow.rate
    assert [done for _, done, _ in said] == list(range(6))
    assert {total for *_, total in said} == {5}
    assert all(what.startswith("measuring: ") for what, *_ in said)


def test_the_slowest_link_counts():
    def found(link: Wire | None) -> Measured:
        return Measured("10.0.0.1", 1, Speeds(1.0, None), link)

    assert slowest_link([found(None), found(Wire(1e-3, 2e9)), found(Wire(2e-3, 3e9))]) == Wire(2e-3, 2e9)
    assert slowest_link([found(None)]) == Wire()


def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(following, "identity", lambda checkpoint: {"version": "0.0.1", "files": {}})
    with pytest.raises(InputError, match=r"rank 1 cannot take part: it runs version 0\.0\.1, and rank 0 runs"), led():
        pass


def test_pieces_of_a_file_stand_for_a_disk(tmp_path: Path):
    assert disk_speed(open_checkpoint(tiny()), 0.02) > 0
    path = tmp_path / "file"
    for nbytes, wanted in ((0, (0, 4096)), (4095, (0, 4096)), (5000, (1, 4096)), (3 << 20, (3, 1 << 20)), (9000, (1, 8192))):
        path.write_bytes(bytes(nbytes))
        pieces = Pieces.of(path)
        assert (pieces.count, pieces.stride) == wanted


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:29400", "::1", "[::1]:5"])
def test_addresses(text: str):
    assert is_address(text)


@pytest.mark.parametrize("text", ["16GB", "16", "16GB/3GB", "1.5G", "", "laptop", "10.0.0", "10.0.0.1:x", "10.0.0.1:70000"])
def test_what_is_no_address(text: str):
    assert not is_address(text)
