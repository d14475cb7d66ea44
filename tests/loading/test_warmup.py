"""Warm-up: it compiles kernels and leaves neither cache entries nor changed layers behind."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import torch

import auraflux
from auraflux.engine.graph_runner import GraphRunner
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.warmup import (
    RecordedLayer,
    SkippedLayer,
    WarmupBatch,
    one_layer_per_kind,
    packed_prefills,
    standard_batches,
    warm_up,
)
from auraflux.models.layer import Layer
from tests.models.oracles import save
from tests.models.test_graphs import MODELS, WITHOUT_GRAPHS

pytest.importorskip("triton")
PROMPT = list(range(3, 40))


@cache
def saved(name: str) -> Path:
    torch.manual_seed(0)
    return save((MODELS | WITHOUT_GRAPHS)[name](), Path(mkdtemp(prefix="auraflux-tiny-")))


def loaded(name: str = "qwen3_5_moe") -> LanguageModel:
    return auraflux.load(
        saved(name), kv="k8v4", context=300, device="cpu", graphs=False, max_sequences=8, sampling={"temperature": 0}
    )


class Stub:
    """Fake of the Triton recorder: layers launch kernels named after their modules.

    fresh  kernels that have to be compiled
    steps  layer calls while nothing is launched, one list per recording
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fresh: str):
        self.steps: list[list[str]] = []
        self.fresh, self._inside = fresh, False
        called = Layer.__call__
        for name in ("on_one_gpu", "runs_ahead"):
            monkeypatch.setattr(GraphRunner, name, True)
        monkeypatch.setattr("auraflux.ops.gpu.ahead.is_supported", lambda: True)
        monkeypatch.setattr("auraflux.ops.gpu.ahead.compile_launches_ahead", self.compile_launches_ahead)
        monkeypatch.setattr("auraflux.ops.gpu.ahead.compiler", self.compiler)
        monkeypatch.setattr(Layer, "__call__", lambda layer, *args: self.record(layer) or called(layer, *args))

    def record(self, layer: Layer) -> None:
        if self._inside:
            self.steps[-1].append(f"{type(layer.mixer).__name__} {type(layer.mlp).__name__}")

    @contextmanager
    def compile_launches_ahead(self, compiler: SimpleNamespace) -> Iterator[list[str]]:
        self.steps.append([])
        self._inside = True
        yield self.steps[-1]
        self._inside = False

    @contextmanager
    def compiler(self) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(compiled=list(self.fresh), begun=len(self.fresh), wait=lambda report: report(0, 1))


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "gpt_oss", "deepseek_v3", "gemma4_moe"])
def test_warm_up_does_not_change_output(name: str, monkeypatch: pytest.MonkeyPatch, caplog):
    wanted = loaded(name).generate_batch([PROMPT], max_tokens=6, ignore_eos=True)
    model, reports = loaded(name), []
    layers = model.engine.model.layers
    stub, clock = Stub(monkeypatch, "_rms"), iter((3.0, 10.0))
    monkeypatch.setattr("auraflux.loading.warmup.time", SimpleNamespace(perf_counter=lambda: next(clock)))
    with caplog.at_level(logging.INFO, "auraflux"):
        warm_up(model, lambda *report: reports.append(report))
    assert [record.getMessage() for record in caplog.records] == ["compiled 1 kernels in 7 s; cached for the next start"]
    assert {what for what, _, _ in reports} >= {"compiling kernels", "finding kernels", "warming up: batch of 8"}
    assert all(done < total for _, done, total in reports)
    first, others = stub.steps
    assert set(others) == set(first)
    assert model.engine.model.layers is layers
    assert model.engine.cache.nbytes == 0
    assert model.scheduler.counts.queried_tokens == 0
    assert model.generate_batch([PROMPT], max_tokens=6, ignore_eos=True) == wanted


def test_layers_with_equal_kernels_run_once(monkeypatch: pytest.MonkeyPatch):
    model, stub = loaded(), Stub(monkeypatch, "_rms")
    kinds = [f"{type(layer.mixer).__name__} {type(layer.mlp).__name__}" for layer in model.engine.model.layers]
    assert len(kinds) > len(set(kinds)) + 1
    warm_up(model, lambda *report: None)
    first, others = stub.steps
    assert first[: len(kinds) - 1] == kinds[:-1]
    assert others.count(kinds[0]) < others.count(kinds[-1]) * kinds.count(kinds[0])


def test_no_dry_run_when_kernels_are_cached(monkeypatch: pytest.MonkeyPatch, caplog):
    model, stub = loaded("llama"), Stub(monkeypatch)
    with caplog.at_level(logging.INFO, "auraflux"):
        warm_up(model, lambda *report: None)
    assert len(stub.steps) == 1
    assert not caplog.records


def test_a_failed_dry_run_is_logged_only(monkeypatch: pytest.MonkeyPatch, caplog):
    wanted = loaded("llama").generate_batch([PROMPT], max_tokens=6, ignore_eos=True)
    model = loaded("llama")
    Stub(monkeypatch, "_rms")
    monkeypatch.setattr("auraflux.loading.warmup.one_layer_per_kind", lambda recorded: [None for _ in recorded])
    layers = model.engine.model.layers
    warm_up(model, lambda *report: None)
    assert "compiling kernels one by one: 'NoneType' object is not callable" in caplog.text
    assert model.engine.model.layers is layers
    assert model.generate_batch([PROMPT], max_tokens=6, ignore_eos=True) == wanted


def test_one_layer_of_each_kind_and_the_last():
    launched: list[str] = []
    layers = [lambda x, kind=kind: launched.append(kind) or x for kind in "abbcbb"]
    recorded = [RecordedLayer(layer, launched) for layer in layers]
    assert [each(5) for each in recorded] == [5] * 6
    found = one_layer_per_kind(recorded)
    assert [each if isinstance(each, SkippedLayer) else layers.index(each) for each in found][:2] == [0, 1]
    assert [isinstance(each, SkippedLayer) for each in found] == [False, False, True, False, True, False]


def test_standard_batches():
    model = loaded("llama")
    assert standard_batches(model) == [WarmupBatch(1, 32), WarmupBatch(8, 32)]
    assert {batch.sequences * batch.tokens for batch in packed_prefills(8192)} == set(range(2176, 8193, 128))
    assert packed_prefills(512) == []
