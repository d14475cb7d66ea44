"""A target for inter-token latency: prefill takes what it leaves, on any machine."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from auraflux.scheduler.budget import latency_target
from auraflux.scheduler.budget.latency_target import LatencyTarget
from auraflux.scheduler.budget.prefill_budget import LEAST, PrefillBudget


class Machine:
    """A clock that steps advance: so long for decoding, and so long per prompt token."""

    def __init__(self, decode_s: float, token_s: float):
        self.decode_s, self.token_s, self.now = decode_s, token_s, 0.0

    def step(self, target: LatencyTarget, uncomputed: int) -> float:
        """Run a step and return its time."""
        tokens = min(target.tokens(), uncomputed)
        target.plan(tokens)
        took = self.decode_s + tokens * self.token_s
        self.now += took
        target.decoded()
        return took


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine(0.004, 0.0001)
    monkeypatch.setattr(latency_target.time, "perf_counter", lambda: machine.now)
    return machine


@settings(max_examples=100, deadline=None, derandomize=True)
@given(decode_ms=st.floats(0.5, 8), rate=st.floats(2_000, 100_000), target_ms=st.floats(20, 200))
def test_steps_approach_the_target_and_stay_below_it(decode_ms: float, rate: float, target_ms: float):
    machine, target = Machine(decode_ms / 1e3, 1 / rate), LatencyTarget(target_ms / 1e3, 16, 1 << 16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latency_target.time, "perf_counter", lambda: machine.now)
        times = [machine.step(target, 1 << 20) for _ in range(150)][100:]
    assert max(times) <= target.target_s + 16 / rate
    # not more than a unit below what the aim allows, or at the largest chunk
    assert min(times) >= 0.8 * target.target_s - 16 / rate or target.tokens() == 1 << 16


def test_a_slower_machine_gets_fewer_tokens_at_once(machine: Machine):
    target = LatencyTarget(0.05, 16, 8192)
    for _ in range(100):
        machine.step(target, 1 << 20)
    before = target.tokens()
    machine.token_s *= 3
    for _ in range(3):
        machine.step(target, 1 << 20)
    assert target.tokens() < before / 2


def test_steps_with_little_prefill_change_nothing(machine: Machine):
    target = LatencyTarget(0.05, 16, 8192)
    for _ in range(50):
        machine.step(target, 1 << 20)
    before = target.tokens()
    for _ in range(50):
        machine.step(target, 8)
    assert target.tokens() == before


def test_a_decode_step_above_the_target_leaves_the_least(machine: Machine):
    target, machine.decode_s = LatencyTarget(0.05, 16, 8192), 0.2
    for _ in range(10):
        machine.step(target, 1 << 20)
    assert target.tokens() == 16


def test_time_without_running_sequences_does_not_count(machine: Machine):
    made = PrefillBudget(512, "cpu", 0.05)
    assert made.target is not None
    for _ in range(20):
        machine.step(made.target, 1 << 20)
    before = made.target.tokens()
    machine.now += 60
    assert made.tokens(uncomputed=10_000, prefilling=1, decoding=0) == 512
    assert made.tokens(uncomputed=10_000, prefilling=1, decoding=1) == before
    made.target.decoded()
    assert made.target.tokens() == before


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_step_is_small(device: str):
    made = PrefillBudget(8192, device, 0.05)
    assert made.tokens(uncomputed=100_000, prefilling=4, decoding=2) == LEAST[device]
