"""How the tokens of a turn are shared out among the prompts that are read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.run import pace
from auraflux.run.pace import Pace

QUICK = settings(max_examples=200, deadline=None, derandomize=True)


@QUICK
@given(wanted=st.lists(st.integers(1, 400), min_size=1, max_size=12), budget=st.integers(1, 900), turns=st.integers(0, 1))
def test_a_budget_is_shared_out(wanted: list[int], budget: int, turns: int):
    made = Pace(512)
    made._turns = turns
    shares = made.shares(wanted, budget)
    assert sum(shares) <= budget
    assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
    assert 1 <= sum(share > 0 for share in shares) <= pace.TOGETHER
    # nothing is left over that somebody could have
    assert sum(shares) == min(budget, sum(wanted)) or sum(share > 0 for share in shares) == pace.TOGETHER
    if budget >= 2 * pace.LEAST["cpu"]:
        assert shares[0] >= min(wanted[0], budget // 2)
        # of the others the shortest come first
        left = [most for share, most in zip(shares[1:], wanted[1:], strict=True) if share < most]
        got = [most for share, most in zip(shares[1:], wanted[1:], strict=True) if share == most]
        assert not left or not got or max(got) <= min(left)


def test_a_small_budget_goes_to_the_oldest_and_the_shortest_by_turns():
    made = Pace(512)
    assert [made.shares([300, 200, 100], 16) for _ in range(3)] == [[0, 0, 16], [16, 0, 0], [0, 0, 16]]


def test_where_each_piece_costs_much_one_prompt_gets_all_that_it_can_use():
    made = Pace(8192, "cuda")
    assert [made.shares([900, 200, 100], 1024, one=True) for _ in range(2)] == [[0, 0, 100], [900, 0, 0]]


def test_a_prompt_has_all_of_a_turn_while_nobody_writes():
    assert Pace(512).budget(unread=10_000, waiting=1, writing=0) == 512


@pytest.mark.parametrize("unread", [1, 100, 3_000, 100_000])
def test_prompts_are_spread_over_turns_while_texts_are_written(unread: int):
    budget = Pace(512).budget(unread, waiting=1, writing=3)
    assert pace.LEAST["cpu"] <= budget <= 512
    assert budget <= max(pace.LEAST["cpu"], -(-unread // pace.SPREAD["cpu"]))


def test_few_prompts_wait_rather_than_the_many_that_write_on_a_gpu():
    made = Pace(8192, "cuda")
    unread = 12 * 1024
    few_write, many_write, more_write = (made.budget(unread, 12, writing) for writing in (4, 20, 100))
    assert few_write == unread // pace.SPREAD["cuda"]
    assert many_write == pace.LEAST["cuda"]
    # a longer step has room for more, but not for more than it would have anyway
    assert many_write < more_write <= few_write


def test_a_slow_machine_reads_less_at_once(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(clock))
    made = Pace(512)
    with made.measured(128):
        pass
    # 64 tokens a second: half a second is 32 of them
    assert made.budget(100_000, waiting=1, writing=1) == 32


def test_what_failed_says_nothing_of_the_pace():
    made = Pace(512)
    with pytest.raises(ZeroDivisionError), made.measured(128):
        1 / 0  # noqa: B018
    assert made.budget(1_000_000, 1, 1) == Pace(512).budget(1_000_000, 1, 1)
