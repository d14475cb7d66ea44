"""Expert cache: eviction by LFU with decay, failed loads, prefetch priority."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.errors import AurafluxError, ExpertError
from auraflux.weights.experts.expert_cache import HALF_LIFE_TOKENS, MAX_USE_WEIGHT, ExpertCache


class Load:
    def __init__(self) -> None:
        self.finished = False
        self.error: AurafluxError | None = None

    def poll(self) -> bool:
        return self.finished


class Memory:
    """Slots whose loads finish when the test says so."""

    def __init__(self, slots: int):
        self.memory = torch.zeros(slots, 4, dtype=torch.uint8)
        self.loads: dict[int, Load] = {}
        self.content: dict[int, int] = {}
        self.prioritized: list[int] = []

    def load(self, expert: int, slot: int, prefetch: bool) -> Load:
        self.content[slot] = expert
        self.loads[expert] = load = Load()
        return load

    def prioritize(self, expert: int, load: Load) -> None:
        self.prioritized.append(expert)


def make_cache(slots: int) -> tuple[ExpertCache, Memory]:
    memory = Memory(slots)
    return ExpertCache(memory), memory  # type: ignore[arg-type]


def finish(memory: Memory, *experts: int) -> None:
    for expert in experts:
        memory.loads[expert].finished = True


def fill(cache: ExpertCache, memory: Memory, *experts: int) -> None:
    for expert in experts:
        cache.request(expert, ())
        finish(memory, expert)


def test_the_least_frequently_used_expert_is_evicted():
    cache, memory = make_cache(2)
    fill(cache, memory, 0, 1)
    for expert in (0, 0, 1):
        cache.count_uses({expert: 1})
    cache.request(2, ())
    assert cache.get(1) is None
    assert cache.get(0) is not None


def test_use_counts_decay():
    cache, memory = make_cache(2)
    fill(cache, memory, 0, 1)
    cache.count_uses({0: 3})
    cache.count_uses({1: 2}, HALF_LIFE_TOKENS)
    cache.request(2, ())
    assert cache.get(0) is None


def test_use_counts_do_not_overflow():
    cache, memory = make_cache(2)
    fill(cache, memory, 0, 1)
    cache.count_uses({0: 1})
    for _ in range(3):
        cache.count_uses({1: 1}, 400 * HALF_LIFE_TOKENS)
        cache.count_uses({0: 2})
    assert cache._use_weight < MAX_USE_WEIGHT
    cache.request(2, ())
    assert cache.get(1) is None


def test_loading_and_protected_experts_are_not_evicted():
    cache, memory = make_cache(2)
    cache.request(0, ())
    cache.request(1, ())
    assert cache.request(2, ()) is None
    finish(memory, 0)
    assert cache.request(2, {0}) is None
    assert cache.request(2, {1}) is not None
    assert cache.get(0) is None


def test_a_failed_load_raises_and_can_be_requested_again():
    cache, memory = make_cache(1)
    cache.request(0, ())
    memory.loads[0].error = ExpertError("broken")
    finish(memory, 0)
    with pytest.raises(ExpertError, match="broken"):
        cache.loaded([0])
    assert cache.get(0) is None
    cache.request(0, ())
    finish(memory, 0)
    assert cache.loaded([0]) == [0]


def test_a_failed_prefetch_is_retried():
    cache, memory = make_cache(1)
    cache.request(0, (), prefetch=True)
    memory.loads[0].error = ExpertError("broken")
    finish(memory, 0)
    cache.request(0, ())
    assert not memory.loads[0].finished
    finish(memory, 0)
    assert cache.loaded([0]) == [0]


def test_a_requested_prefetch_is_prioritized():
    cache, memory = make_cache(2)
    cache.request(0, (), prefetch=True)
    cache.request(0, (), prefetch=True)
    assert memory.prioritized == []
    cache.request(0, ())
    assert memory.prioritized == [0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), max_size=40))
def test_no_slot_holds_two_experts(slots: int, steps: list[tuple[int, bool, bool]]):
    cache, memory = make_cache(slots)
    for expert, finishes, fails in steps:
        if cache.request(expert, ()) is not None and finishes:
            memory.loads[expert].error = ExpertError("broken") if fails else None
            finish(memory, expert)
        try:
            loaded = cache.loaded(range(8))
        except ExpertError:
            loaded = []
        for each in loaded:
            assert memory.content[cache[each].slot] == each
        slots_used = [cache[each].slot for each in range(8) if cache.get(each) is not None]
        assert len(set(slots_used)) == len(slots_used) <= slots
