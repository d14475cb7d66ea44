"""What ranks of a group send each other comes as it was, in its order, however long it is and whatever wire is pretended."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from auraflux.run.ranks.group import UNDER_WAY, Group, Place, meeting_place
from auraflux.run.ranks.members import LENGTH, NOTE_NBYTES
from auraflux.run.ranks.parallel import LOCAL
from auraflux.run.ranks.wire import find_wire


@contextmanager
def pair(wire: str) -> Iterator[tuple[Group, Group]]:
    """Two ranks of this process."""
    place, server = meeting_place(LOCAL, 0)
    made: dict[int, Group] = {}

    def make(rank: int) -> None:
        made[rank] = Group(Place(LOCAL, place.port, LOCAL), 1, rank, 2, 15.0, find_wire(wire))

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


@pytest.mark.parametrize("wire", ["here", "10gbe"])
def test_notes_of_all_lengths(wire: str):
    # {"a":"..."} is eight characters more
    room = NOTE_NBYTES - LENGTH.size - 8
    told = [{"a": "x" * length} for length in (0, 1, room - 1, room, room + 1, 3 * NOTE_NBYTES)]
    with pair(wire) as (here, there):
        speaking = threading.Thread(target=lambda: [here.say(each, 1) for each in told])
        speaking.start()
        notes = there.notes(0)
        assert [next(notes) for _ in told] == told
        speaking.join(60)


@pytest.mark.parametrize("wire", ["here", "10gbe"])
def test_more_is_sent_than_is_waited_for(wire: str):
    sent = [torch.arange(7.0).view(1, 7) + number for number in range(3 * UNDER_WAY)]
    with pair(wire) as (here, there):
        speaking = threading.Thread(target=lambda: [here.send(each, 1) for each in sent])
        speaking.start()
        for each in sent:
            assert torch.equal(there.receive(1, 7, source=0), each)
        speaking.join(60)
        assert here.tally.nbytes == sum(each.nbytes for each in sent)
        # less than there is room for
        coming = there.expect(100, source=0, dtype=torch.uint8)
        here.send(torch.arange(9, dtype=torch.uint8), 1)
        assert coming.wait(9).tolist() == list(range(9))
