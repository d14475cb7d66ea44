"""The size of a prefill chunk that joins a decode step follows from measured times."""

from collections.abc import Callable

import pytest

from auraflux.scheduler.budget import chunk_costs
from auraflux.scheduler.budget.chunk_costs import TRUSTED, ChunkCosts
from auraflux.scheduler.budget.prefill_budget import PrefillBudget

SIZES = [96, 224, 480, 992]
# of a mixture and of a dense model, 32 sequences, as measured on an H200 (bench/notebook/serving.md)
MIXTURE = {0: 0.0060, 96: 0.0111, 224: 0.0129, 480: 0.0173, 992: 0.0244}
DENSE = {0: 0.0033, 96: 0.0067, 224: 0.0090, 480: 0.0151, 992: 0.0262}


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now, self._launched = 0.0, 0
        monkeypatch.setattr(chunk_costs.time, "perf_counter", lambda: self.now)

    def run(self, costs: ChunkCosts, seconds: Callable[[int], float], sizes: list[int]) -> None:
        """Run steps whose tokens reach the host one step later."""
        for size in sizes:
            costs.plan(32, size)
            self.now += seconds(self._launched)
            costs.decoded()
            self._launched = size


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def measured(clock: Clock, table: dict[int, float], sizes: list[int]) -> ChunkCosts:
    costs = ChunkCosts(lag=True)
    for size in sizes:
        clock.run(costs, table.__getitem__, [size] * (TRUSTED + 2))
    return costs


def settle(clock: Clock, table: dict[int, float], target_s: float | None) -> int:
    """Return the size that is chosen in the end."""
    costs, chosen = measured(clock, table, [0]), SIZES[0]
    for _ in range(40):
        chosen = costs.choose(32, SIZES, target_s) or SIZES[0]
        clock.run(costs, table.__getitem__, [chosen, chosen, 0])
    return chosen


def test_a_step_is_timed_when_its_tokens_arrive(clock: Clock):
    costs = ChunkCosts(lag=True)
    clock.run(costs, MIXTURE.__getitem__, [0, 480] * 8)
    assert costs.seconds(32, 480) == pytest.approx(MIXTURE[480])
    assert costs.seconds(32, 0) == pytest.approx(MIXTURE[0])
    assert costs.seconds(16, 0) is None


def test_nothing_is_chosen_before_a_step_was_measured(clock: Clock):
    assert ChunkCosts(lag=True).choose(32, SIZES, 0.02) is None


@pytest.mark.parametrize(("target_ms", "size"), [(10, 96), (14, 224), (18, 480), (25, 992)])
def test_the_largest_chunk_within_the_target(clock: Clock, target_ms: int, size: int):
    assert settle(clock, MIXTURE, target_ms / 1e3) == size


def test_without_a_target_a_mixture_gets_larger_chunks_than_a_dense_model(clock: Clock):
    assert settle(clock, MIXTURE, None) == 480
    assert settle(clock, DENSE, None) == 224


def test_one_slow_sample_does_not_exclude_a_size(clock: Clock):
    costs = measured(clock, MIXTURE, [0, 96, 224])
    clock.run(costs, lambda size: 0.3 if size else MIXTURE[0], [480, 0])
    for _ in range(8):
        chosen = costs.choose(32, SIZES, 0.018) or 0
        clock.run(costs, MIXTURE.__getitem__, [chosen, chosen, 0])
    assert costs.choose(32, SIZES, 0.018) == 480


def test_a_pause_is_no_step(clock: Clock):
    costs = measured(clock, MIXTURE, [0])
    costs.plan(32, 0)
    costs.pause()
    clock.now += 60
    costs.decoded()
    assert costs.seconds(32, 0) == pytest.approx(MIXTURE[0])


def test_the_budget_is_the_chosen_size(clock: Clock):
    made = PrefillBudget(8192, "cuda")
    assert made.tokens(1024, 1, 32, SIZES) == PrefillBudget(8192, "cuda").tokens(1024, 1, 32)
    made.costs = measured(clock, MIXTURE, [0, *SIZES])
    assert made.tokens(1024, 1, 32, SIZES) == 480
