"""The rates of experts on the CPU are printed for every number of experts."""

import sys

import pytest

from bench.lab import cpu_experts


def test_rates_are_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cpu_experts, "SECONDS", 0.0)
    monkeypatch.setattr(cpu_experts, "last_cache_nbytes", lambda: 1 << 16)
    monkeypatch.setattr(cpu_experts, "peak_read_bandwidth", lambda: {"all_threads": 1e9, "one_thread": 1e9})
    sizes = ["--threads", "1", "--hidden", "320", "--inner", "192", "--experts", "4", "--counts", "1", "3"]
    monkeypatch.setattr(sys, "argv", ["cpu_experts", *sizes])
    cpu_experts.main()
    lines = capsys.readouterr().out.splitlines()
    assert "an empty request takes" in lines[2]
    assert [line.split()[:2] for line in lines[3:]] == [["1", "experts"], ["3", "experts"]]
    assert all("GB/s" in line and "% of the peak" in line for line in lines[3:])
