"""The JSON report: numbers with units, written atomically."""

import json

import pytest

from auraflux.bench.report import place, row, save
from auraflux.bench.result import PeerResult, Result
from auraflux.bench.timing import Timing
from auraflux.errors import InputError


def test_row_gives_rates_and_ratios():
    peer = PeerResult("other", "exact", Timing(4e-6, 3e-6, 5e-6, 9), error=0.1)
    result = Result("linear", "4bit", "fast", "timed", None, 0.001, Timing(2e-6, 1e-6, 3e-6, 10), 4000, 8000, [peer])
    found = row(result, peak=4e9)
    assert (found["time_us"], found["low_us"], found["high_us"]) == pytest.approx((2, 1, 3))
    assert (found["gb_per_s"], found["ceiling_share"], found["gflop_per_s"]) == pytest.approx((2, 0.5, 4))
    assert found["peers"][0]["ratio"] == pytest.approx(2)


def test_missing_measurements_are_null():
    found = row(
        Result("linear", "4bit", "fast", "wrong", "NaN", float("inf"), peers=[PeerResult("other", "exact", note="gone")]), 1e9
    )
    assert found["error"] is found["time_us"] is found["gb_per_s"] is found["peers"][0]["ratio"] is None
    assert json.loads(json.dumps(found, allow_nan=False)) == found


def test_save_replaces_atomically(tmp_path):
    target = tmp_path / "results.json"
    target.write_text("old")
    save({"a": 1}, target)
    assert json.loads(target.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [target]


def test_failed_save_does_not_change_the_old_file(tmp_path):
    target = tmp_path / "results.json"
    target.write_text("old")
    with pytest.raises(TypeError):
        save({"a": object()}, target)
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_unwritable_path_is_refused(tmp_path):
    with pytest.raises(InputError, match="there is no folder"):
        place(tmp_path / "nowhere" / "x.json", "machine")
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"cannot save to .*folder: Is a directory\."):
        save({}, tmp_path / "folder")
