"""Timing in alternating bursts with rotated argument copies."""

from types import SimpleNamespace

import pytest
import torch

from auraflux.bench.arguments import Rotation, bytes_moved, copies_to_rotate, moved, storage_nbytes
from auraflux.bench.timing import ROUNDS, Contender, race
from auraflux.machine import Machine, last_cache_nbytes
from auraflux.ops._cases import Case
from auraflux.ops.norm.reference import rms_norm
from auraflux.ops.simd.peak_bandwidth import STEP_NBYTES, peak_read_bandwidth
from auraflux.quant import QTensor, quantize

MB = 1 << 20


class Clock:
    """A clock that advances only in `sleep`."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    fake = SimpleNamespace(perf_counter=lambda: made.now_s, process_time=lambda: 0.0, sleep=made.sleep)
    monkeypatch.setattr("auraflux.bench.timing.time", fake)
    return made


def test_comparison_separates_close_contenders(clock: Clock):
    slow, slower = Contender([lambda: clock.sleep(2e-3)]), Contender([lambda: clock.sleep(30e-3)])
    one, other = race([slow, slower], 0.1)
    assert (one.median_s, other.median_s) == pytest.approx((2e-3, 30e-3))
    assert (one.low_s, one.high_s) == pytest.approx((2e-3, 2e-3))


def test_bursts_alternate(monkeypatch):
    order: list[object] = []

    def burst(self: Contender, duration_s: float) -> None:
        order.append(self.calls[0]())
        self.samples_s.append(duration_s)

    monkeypatch.setattr(Contender, "burst", burst)
    race([Contender([lambda: "a"]), Contender([lambda: "b"])], 1.0)
    assert order == ["a", "b"] * ROUNDS


def test_a_very_slow_contender_gets_few_calls(clock: Clock):
    calls: list[None] = []

    def call():
        calls.append(clock.sleep(0.03))

    race([Contender([call])], 0.02)
    assert 2 <= len(calls) <= 4


def test_copies_are_used_round_robin_and_restored():
    order: list[object] = []
    contender = Contender([lambda: order.append(1), lambda: order.append(2)], restore=lambda: order.append("restored"))
    contender.sample(1)
    contender.sample(1)
    contender.sample(1)
    assert order == [1, 2, "restored", 1]


def test_work_divides_the_time(monkeypatch):
    contender = Contender([lambda: None], work=2)
    monkeypatch.setattr(contender, "sample", lambda repeats: 0.004)
    contender.burst(0)
    assert contender.samples_s == [0.002]


@pytest.mark.parametrize(
    ("nbytes", "cache", "free", "copies"),
    [
        (1000, 32 * MB, 1 << 34, 1),
        (10 * MB, 32 * MB, 1 << 34, 13),
        (MB, 32 * MB, 1 << 34, 64),
        (100 * MB, 300 * MB, 1 << 34, 12),
        (100 * MB, 300 * MB, 800 * MB, 2),
        (300 * MB, 300 * MB, 800 * MB, 1),
        (1000 * MB, 1000 * MB, 1 << 40, 2),
    ],
)
def test_number_of_copies(nbytes, cache, free, copies):
    assert copies_to_rotate(nbytes, cache, free) == copies


def test_rotation_restores_only_modified_arguments():
    rotation = Rotation({"state": torch.ones(3), "x": torch.zeros(2)}, 2)
    rotation.copies[0]["state"].mul_(0.5)
    rotation.note_changes()
    rotation.copies[1]["state"].zero_()
    rotation.copies[1]["x"].fill_(7)
    rotation.restore()
    assert all(torch.equal(args["state"], torch.ones(3)) for args in rotation.copies)
    assert rotation.copies[1]["x"].tolist() == [7, 7]


def test_bytes_count_arguments_and_results_once():
    args = {"x": torch.ones(2, 8), "weight": torch.ones(8), "eps": 1e-6}
    case = Case(rms_norm, "any", lambda: args)
    assert bytes_moved(case, args, torch.ones(2, 8)) == 4 * (16 + 8 + 16)
    assert bytes_moved(case, args, args["x"]) == 4 * (16 + 8)
    assert bytes_moved(Case(rms_norm, "any", lambda: args, nbytes=lambda args: 5), args, None) == 5


def test_move_recurses_into_weights_and_lists():
    weight = quantize(torch.randn(8, 64))
    there = moved({"w": weight, "many": [torch.ones(1), (torch.ones(2), None)], "eps": 1e-6}, "meta")
    assert isinstance(there["w"], QTensor)
    assert there["w"].device.type == there["many"][0].device.type == there["many"][1][0].device.type == "meta"
    assert there["eps"] == 1e-6


def test_storage_counts_shared_memory_once():
    x = torch.ones(4)
    assert storage_nbytes([x, x, torch.ones(2)]) == 24


def test_peak_bandwidth_is_in_bytes_per_second():
    found = peak_read_bandwidth(1000 * STEP_NBYTES)
    assert all(1e6 < rate < 1e13 for rate in found.values())


def test_cache_sizes_are_read_with_their_units(tmp_path):
    for number, size in enumerate(["48K", "2048K", "3M"]):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(size + "\n")
    assert last_cache_nbytes(tmp_path) == 3 * MB
    assert last_cache_nbytes(tmp_path / "nowhere") == 32 * MB


def test_a_machines_slug_is_a_file_name():
    machine = Machine("Intel(R) Xeon(R) CPU @ 2.20GHz", "x86_64", "Linux", 4, 1 << 34, 32 * MB)
    assert machine.slug == "intel-xeon-x86_64-4-cores"
