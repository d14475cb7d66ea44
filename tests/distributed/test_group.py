"""Transfers of a group arrive unchanged and in order, for all lengths and simulated networks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from auraflux.distributed.comm.collectives import LENGTH, MESSAGE_NBYTES
from auraflux.distributed.comm.group import Endpoint, Group, open_rendezvous
from auraflux.distributed.comm.slow_link import find_link
from auraflux.distributed.comm.transfer_threads import MAX_PENDING
from auraflux.distributed.parallel import LOCAL


@contextmanager
def pair(network: str) -> Iterator[tuple[Group, Group]]:
    """Connect two ranks in this process."""
    place, server = open_rendezvous(LOCAL, 0)
    made: dict[int, Group] = {}

    def make(rank: int) -> None:
        made[rank] = Group(Endpoint(LOCAL, place.port, LOCAL), 1, rank, 2, 15.0, find_link(network))

    threads = [threading.Thread(target=make, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    try:
        yield made[0], made[1]
    finally:
        for group in made.values():
            group.close()
        del server


@pytest.mark.parametrize("network", ["here", "10gbe"])
def test_messages_of_all_lengths(network: str):
    # {"a":"..."} is eight characters more
    room = MESSAGE_NBYTES - LENGTH.size - 8
    messages_sent = [{"a": "x" * length} for length in (0, 1, room - 1, room, room + 1, 3 * MESSAGE_NBYTES)]
    with pair(network) as (here, there):
        speaking = threading.Thread(target=lambda: [here.send_message(each, 1) for each in messages_sent])
        speaking.start()
        messages = there.messages(0)
        assert [next(messages) for _ in messages_sent] == messages_sent
        speaking.join(60)


@pytest.mark.parametrize("network", ["here", "10gbe"])
def test_more_pending_sends_than_slots(network: str):
    sent = [torch.arange(7.0).view(1, 7) + number for number in range(3 * MAX_PENDING)]
    with pair(network) as (here, there):
        speaking = threading.Thread(target=lambda: [here.send(each, 1) for each in sent])
        speaking.start()
        for each in sent:
            assert torch.equal(there.receive(1, 7, source=0), each)
        speaking.join(60)
        assert here.transfers.nbytes == sum(each.nbytes for each in sent)
        # less than the buffer holds
        coming = there.post_receive(100, source=0, dtype=torch.uint8)
        here.send(torch.arange(9, dtype=torch.uint8), 1)
        assert coming.wait(9).tolist() == list(range(9))
