"""Which experts are in which slots."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.errors import AurafluxError, ExpertError
from auraflux.weights.bank import HALF_LIFE, LARGEST, Bank


class Load:
    def __init__(self) -> None:
        self.there = False
        self.error: AurafluxError | None = None

    def poll(self) -> bool:
        return self.there


class Memory:
    """Slots that are filled when the test says so."""

    def __init__(self, slots: int):
        self.memory = torch.zeros(slots, 4, dtype=torch.uint8)
        self.loads: dict[int, Load] = {}
        self.content: dict[int, int] = {}
        self.hurried: list[int] = []

    def fill(self, expert: int, slot: int, ahead: bool) -> Load:
        self.content[slot] = expert
        self.loads[expert] = load = Load()
        return load

    def hurry(self, expert: int, load: Load) -> None:
        self.hurried.append(expert)

    def before(self, slots: object) -> None: ...
    def after(self, slots: object) -> None: ...


def bank(slots: int) -> tuple[Bank, Memory]:
    memory = Memory(slots)
    return Bank(memory), memory  # type: ignore[arg-type]


def land(memory: Memory, *experts: int) -> None:
    for expert in experts:
        memory.loads[expert].there = True


def fill(found: Bank, memory: Memory, *experts: int) -> None:
    for expert in experts:
        found.request(expert, ())
        land(memory, expert)


def test_the_one_asked_for_least_makes_room():
    found, memory = bank(2)
    fill(found, memory, 0, 1)
    for expert in (0, 0, 1):
        found.note({expert: 1})
    found.request(2, ())
    assert found.get(1) is None
    assert found.get(0) is not None


def test_an_ask_counts_less_as_time_goes_by():
    found, memory = bank(2)
    fill(found, memory, 0, 1)
    found.note({0: 3})
    found.note({1: 2}, HALF_LIFE)
    found.request(2, ())
    assert found.get(0) is None


def test_counts_do_not_overflow():
    found, memory = bank(2)
    fill(found, memory, 0, 1)
    found.note({0: 1})
    for _ in range(3):
        found.note({1: 1}, 400 * HALF_LIFE)
        found.note({0: 2})
    assert found._ask < LARGEST
    found.request(2, ())
    assert found.get(1) is None


def test_slots_that_are_being_filled_or_kept_make_no_room():
    found, memory = bank(2)
    found.request(0, ())
    found.request(1, ())
    assert found.request(2, ()) is None
    land(memory, 0)
    assert found.request(2, {0}) is None
    assert found.request(2, {1}) is not None
    assert found.get(0) is None


def test_a_pinned_slot_makes_no_room():
    found, memory = bank(1)
    held = found.request(0, ())
    assert held is not None
    land(memory, 0)
    held.pins = 1
    assert found.request(1, ()) is None
    held.pins = 0
    assert found.request(1, ()) is not None


def test_what_failed_is_told_once_and_can_be_asked_for_again():
    found, memory = bank(1)
    found.request(0, ())
    memory.loads[0].error = ExpertError("broken")
    land(memory, 0)
    with pytest.raises(ExpertError, match="broken"):
        found.arrived([0])
    assert found.get(0) is None
    found.request(0, ())
    land(memory, 0)
    assert found.arrived([0]) == [0]


def test_what_failed_while_nobody_waited_is_tried_again():
    found, memory = bank(1)
    found.request(0, (), ahead=True)
    memory.loads[0].error = ExpertError("broken")
    land(memory, 0)
    found.request(0, ())
    assert not memory.loads[0].there
    land(memory, 0)
    assert found.arrived([0]) == [0]


def test_what_is_read_ahead_is_hurried_when_somebody_asks():
    found, memory = bank(2)
    found.request(0, (), ahead=True)
    found.request(0, (), ahead=True)
    assert memory.hurried == []
    found.request(0, ())
    assert memory.hurried == [0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 7), st.booleans(), st.booleans()), max_size=40))
def test_no_slot_holds_two_experts(slots: int, steps: list[tuple[int, bool, bool]]):
    found, memory = bank(slots)
    for expert, lands, fails in steps:
        if found.request(expert, ()) is not None and lands:
            memory.loads[expert].error = ExpertError("broken") if fails else None
            land(memory, expert)
        try:
            ready = found.arrived(range(8))
        except ExpertError:
            ready = []
        for each in ready:
            assert memory.content[found[each].slot] == each
        held = [found[each].slot for each in range(8) if found.get(each) is not None]
        assert len(set(held)) == len(held) <= slots
