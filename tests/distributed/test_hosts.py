"""Hosts by address or by name, and their ranks in the order of the hosts."""

import socket
import threading
from typing import Any

import pytest

from auraflux.distributed.comm.group import Group
from auraflux.distributed.comm.hosts import Hosts
from auraflux.distributed.follower import follow
from auraflux.distributed.parallel import LOCAL, Parallel
from auraflux.errors import RankError, SettingsError
from auraflux.loading.load import load
from tests.distributed.threaded_ranks import free_port
from tests.engine.tiny import tiny

BOOK = {"one": ["10.0.0.1", "fd00::1"], "two": ["10.0.0.2"], "here": ["127.0.1.1"]}


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Fake name resolution; return the names that were resolved."""
    resolved: list[str] = []

    def look_up(host: str, port: None, type: int) -> list[tuple[Any, ...]]:
        resolved.append(host)
        if host not in BOOK:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (address, 0)) for address in BOOK[host] for _ in range(2)]

    monkeypatch.setattr("auraflux.distributed.comm.hosts.socket.getaddrinfo", look_up)
    return resolved


class Store(dict[str, int]):
    """Counters of a fake rendezvous store."""

    def add(self, key: str, count: int) -> int:
        self[key] = self.get(key, 0) + count
        return self[key]


def test_names_are_resolved_once_and_compared_as_addresses(book: list[str]):
    hosts = Hosts.named(["one:29400", "two", "10.0.0.3", "[fd00::0:4]:5", "two"])
    assert hosts.addresses == (("10.0.0.1", "fd00::1"), ("10.0.0.2",), ("10.0.0.3",), ("fd00::4",), ("10.0.0.2",))
    assert book == ["one", "two", "two"]
    assert hosts.ranks_of("10.0.0.3") == hosts.ranks_of("::ffff:10.0.0.3") == [2]
    assert hosts.ranks_of("fd00:0:0::4") == [3]
    assert hosts.ranks_of("10.0.0.2") == [1, 4]
    assert hosts.ranks_of("10.0.0.1") == hosts.ranks_of("10.0.0.9") == []


def test_ranks_are_claimed_once(book: list[str]):
    hosts, store = Hosts.named(["one", "two", "10.0.0.3", "two"]), Store()
    assert [hosts.claim(store, "1/rank", address) for address in ("10.0.0.2", "10.0.0.3", "10.0.0.2")] == [1, 2, 3]
    for address in ("10.0.0.3", "10.0.0.9"):
        with pytest.raises(RankError, match=f"this machine has the address {address}, and no rank is left for it"):
            hosts.claim(store, "1/rank", address)


@pytest.mark.parametrize(("name", "reason"), [("three", "'three' cannot be resolved"), ("here", "other machines cannot reach")])
def test_hosts_that_are_refused(name: str, reason: str, book: list[str]):
    with pytest.raises(SettingsError, match=reason):
        Hosts.named([name, "two"])


def test_the_order_of_hosts_is_that_of_ranks(monkeypatch: pytest.MonkeyPatch):
    """Join in another order than that of the hosts."""
    port, first, ranks = free_port(), threading.Event(), {}
    made = Group.__init__

    def make(group: Group, place: Any, number: int, rank: int, *more: Any) -> None:
        ranks[place.address] = rank
        made(group, place, number, rank, *more)

    monkeypatch.setattr(Group, "__init__", make)
    addresses = {"late": "127.0.0.2", "early": "127.0.0.3"}
    monkeypatch.setattr(
        "auraflux.distributed.follower.address_towards", lambda host, port: addresses[threading.current_thread().name]
    )

    def run() -> None:
        if threading.current_thread().name == "late":
            first.wait()
        while True:
            try:
                socket.create_connection((LOCAL, port), 1).close()
                break
            except OSError:
                continue
        if threading.current_thread().name == "early":
            threading.Timer(0.5, first.set).start()
        follow(LOCAL, port, tiny())

    threads = [threading.Thread(target=run, name=name, daemon=True) for name in addresses]
    for thread in threads:
        thread.start()
    hosts = f"{LOCAL}:{port}", addresses["late"], addresses["early"]
    with pytest.raises(SettingsError, match="cannot be split into 3 pipeline stages"):
        load(tiny(), parallel=Parallel("pipeline", 3, hosts), calibrate="off", context=256)
    for thread in threads:
        thread.join(60)
    assert ranks == {LOCAL: 0, addresses["late"]: 1, addresses["early"]: 2}
