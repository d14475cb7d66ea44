"""Users take turns, each user's jobs are in order, and none is lost."""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.errors import BusyError
from auraflux.scheduler.queue import FairQueue

QUICK = settings(max_examples=100, deadline=None, derandomize=True)
USERS = st.sampled_from("abc")


def job(user: str, number: int = 0) -> Any:
    return SimpleNamespace(request=SimpleNamespace(user=user), number=number)


def users(queue: FairQueue) -> str:
    return "".join(each.request.user for each in queue.in_order())


@QUICK
@given(given=st.lists(USERS, max_size=14), taken=st.integers(0, 14))
def test_all_come_in_order_between_users(given: list[str], taken: int):
    queue, jobs = FairQueue(), [job(user, number) for number, user in enumerate(given)]
    for each in jobs:
        queue.add(each)
    expected = list(queue.in_order())
    assert sorted(each.number for each in expected) == list(range(len(jobs)))
    for user in "abc":
        mine = [each.number for each in expected if each.request.user == user]
        assert mine == sorted(mine)
    # the order is kept while the first is taken again and again
    for place in range(min(taken, len(jobs))):
        first = next(queue.in_order())
        assert first is expected[place]
        queue.remove(first)
    assert len(queue) == max(0, len(jobs) - taken)
    # before anybody has a second turn, all who wait had their first
    order = [each.request.user for each in expected]
    turns = [order[:place].count(user) for place, user in enumerate(order)]
    assert turns == sorted(turns)


def test_one_that_was_begun_comes_first_again():
    queue = FairQueue()
    for user in "aab":
        queue.add(job(user))
    begun = next(queue.in_order())
    queue.remove(begun)
    assert users(queue) == "ba"
    queue.requeue(begun)
    assert next(queue.in_order()) is begun
    assert users(queue) == "aba"


def test_one_may_be_taken_out_of_turn():
    queue, jobs = FairQueue(), [job("a", 0), job("a", 1), job("b", 2)]
    for each in jobs:
        queue.add(each)
    queue.remove(jobs[1])
    assert sorted(each.number for each in queue.in_order()) == [0, 2]


def test_no_more_than_may_wait_are_taken():
    queue = FairQueue(2)
    begun = job("a")
    queue.add(begun)
    queue.add(job("b"))
    with pytest.raises(BusyError, match="2 requests are waiting already"):
        queue.add(job("c"))
    queue.remove(begun)
    queue.add(job("c"))
    # what was begun is never refused
    queue.requeue(begun)
    assert len(queue) == 3
