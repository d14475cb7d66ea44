"""How the tokens of a turn are shared out among the prompts that are read."""

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.scheduler.budget import prefill_budget
from auraflux.scheduler.budget.prefill_budget import PrefillBudget

QUICK = settings(max_examples=200, deadline=None, derandomize=True)


@QUICK
@given(wanted=st.lists(st.integers(1, 400), min_size=1, max_size=12), budget=st.integers(1, 900), steps=st.integers(0, 1))
def test_a_budget_is_shared_out(wanted: list[int], budget: int, steps: int):
    made = PrefillBudget(512)
    made._steps = steps
    shares = made.split(wanted, budget)
    assert sum(shares) <= budget
    assert all(0 <= share <= most for share, most in zip(shares, wanted, strict=True))
    assert 1 <= sum(share > 0 for share in shares) <= prefill_budget.TOGETHER
    # nothing is left over that somebody could have
    assert sum(shares) == min(budget, sum(wanted)) or sum(share > 0 for share in shares) == prefill_budget.TOGETHER
    if budget >= 2 * prefill_budget.LEAST["cpu"]:
        assert shares[0] >= min(wanted[0], budget // 2)
        # of the others the shortest come first
        left = [most for share, most in zip(shares[1:], wanted[1:], strict=True) if share < most]
        got = [most for share, most in zip(shares[1:], wanted[1:], strict=True) if share == most]
        assert not left or not got or max(got) <= min(left)


def test_a_small_budget_goes_to_the_oldest_and_the_shortest_by_steps():
    made = PrefillBudget(512)
    assert [made.split([300, 200, 100], 16) for _ in range(3)] == [[0, 0, 16], [16, 0, 0], [0, 0, 16]]


def test_where_each_piece_costs_much_one_prompt_gets_all_that_it_can_use():
    made = PrefillBudget(8192, "cuda")
    assert [made.split([900, 200, 100], 1024, one=True) for _ in range(2)] == [[0, 0, 100], [900, 0, 0]]


def test_a_prompt_has_all_of_a_turn_while_nobody_writes():
    assert PrefillBudget(512).tokens(uncomputed=10_000, prefilling=1, decoding=0) == 512


@pytest.mark.parametrize("uncomputed", [1, 100, 3_000, 100_000])
def test_prompts_are_spread_over_steps_while_sequences_decode(uncomputed: int):
    budget = PrefillBudget(512).tokens(uncomputed, prefilling=1, decoding=3)
    assert prefill_budget.LEAST["cpu"] <= budget <= 512
    assert budget <= max(prefill_budget.LEAST["cpu"], -(-uncomputed // prefill_budget.SPREAD["cpu"]))


def test_few_prompts_wait_rather_than_the_many_that_write_on_a_gpu():
    made = PrefillBudget(8192, "cuda")
    uncomputed = 12 * 1024
    few, many, more = (made.tokens(uncomputed, 12, decoding) for decoding in (4, 20, 100))
    assert few == uncomputed // prefill_budget.SPREAD["cuda"]
    assert many == prefill_budget.LEAST["cuda"]
    # a longer step has room for more, but not for more than it would have anyway
    assert many < more <= few


def test_a_slow_machine_reads_less_at_once(monkeypatch: pytest.MonkeyPatch):
    clock = iter([0.0, 2.0])
    monkeypatch.setattr(prefill_budget.time, "perf_counter", lambda: next(clock))
    made = PrefillBudget(512)
    with made.measured(128):
        pass
    # 64 tokens a second: half a second is 32 of them
    assert made.tokens(100_000, prefilling=1, decoding=1) == 32


def test_what_failed_says_nothing_of_the_pace():
    made = PrefillBudget(512)
    with pytest.raises(ZeroDivisionError), made.measured(128):
        1 / 0  # noqa: B018
    assert made.tokens(1_000_000, 1, 1) == PrefillBudget(512).tokens(1_000_000, 1, 1)


def test_a_slow_machine_computes_fewer_chunks_in_a_step(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(prefill_budget, "time", SimpleNamespace(perf_counter=lambda: now))
    made = PrefillBudget(100, "cuda")
    assert made.several_chunks(800) == 800
    for tokens, took_s, expected in (800, 1.0, 800), (800, 4.0, 400), (400, 8.0, 200), (100, 9.0, 200), (200, 0.5, 800):
        with made.measured(tokens):
            now += took_s
        # two chunks at least, or the machine would count as slow for ever
        assert made.several_chunks(800) == expected
    assert made.several_chunks(100) == 100
