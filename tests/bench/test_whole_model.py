"""`bench model --layers`: the whole model's rate follows from that of some layers."""

from dataclasses import asdict

import pytest
import torch

from auraflux.bench import whole_model
from auraflux.bench.model import Speed
from auraflux.bench.shapes import shape_of
from auraflux.bench.whole_model import Share, Whole, predict, whole_share
from auraflux.cache import CacheSettings
from auraflux.cli.bench.model_tables import whole_table
from auraflux.errors import SettingsError
from auraflux.loading.gpu_division import GpuRequest


def test_the_same_share_predicts_the_same_time_per_layer():
    found = predict(Share(20, 0.2), Share(94, 0.2), seconds=0.02, misses=128.0, copy_s=1e-4)
    assert found.decode_rate == pytest.approx(20 / 94 / 0.02)
    assert found.misses_per_token == pytest.approx(128 / 20 * 94)


def test_fewer_slots_mean_more_copies():
    # half of the time are copies: with 90 % instead of 60 % missing they take 1.5 times as long
    found = predict(Share(10, 0.4), Share(10, 0.1), seconds=0.02, misses=100.0, copy_s=1e-4)
    assert found.misses_per_token == pytest.approx(150)
    assert 1 / found.decode_rate == pytest.approx(0.025)


def test_copies_that_the_cpu_saves_are_part_of_the_misses():
    found = predict(Share(10, 0.5), Share(20, 0.25), seconds=0.01, misses=200.0, copy_s=1e-4)
    assert 1 / found.decode_rate == pytest.approx(0.01 * 2 * 1.5)


def test_the_table_shows_the_prediction_or_why_there_is_none(capsys: pytest.CaptureFixture):
    from rich.console import Console

    console, speed = Console(width=120), Speed("auraflux k4v4", 1024, 1, 100.0, 50.0)
    console.print(whole_table([asdict(Whole(94, 0.128, 655.7, 7.04))], [speed]))
    text = capsys.readouterr().out
    assert [cell.strip() for cell in text.splitlines()[-2].split("│")[1:-1]] == ["1024", "94", "12.8%", "655.7", "7.0"]
    assert whole_table("24 GB is too little.", [speed]) == "the whole model cannot be predicted: 24 GB is too little."


def test_the_gpu_is_divided_for_the_whole_model(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(whole_model, "activation_dtype", lambda device: torch.bfloat16)
    request, device = GpuRequest(24 * 10**9, True, 1), torch.device("cuda")
    found = whole_share(shape_of("qwen3-235b-a22b"), 4, request, CacheSettings("k8v4"), device, 1280, 1)
    assert found.layers == 94
    assert 0.1 < found.share < 0.2
    with pytest.raises(SettingsError, match="is too little"):
        whole_share(shape_of("qwen3-235b-a22b"), 4, GpuRequest(4 * 10**9, True, 1), CacheSettings("k8v4"), device, 1280, 1)
