"""What a server does before it is ready: steps are taken for show, and nothing of them is left."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

import auraflux
from auraflux.models.decoder import Layer
from auraflux.run.graph import Replayer
from auraflux.run.language import LanguageModel
from auraflux.run.warmup import Load, Passed, Watched, crowds, one_of_each, usual_loads, warm_up
from tests.models.oracles import save
from tests.models.test_replay import MODELS, UNREPLAYED

pytest.importorskip("triton")
PROMPT = list(range(3, 40))


@cache
def saved(name: str) -> Path:
    torch.manual_seed(0)
    return save((MODELS | UNREPLAYED)[name](), Path(mkdtemp(prefix="auraflux-tiny-")))


def loaded(name: str = "qwen3_5_moe") -> LanguageModel:
    return auraflux.load(saved(name), kv="k8v4", context=300, device="cpu", graphs=False, sequences=8)


class Stub:
    """Stands in for Triton: layers launch what their parts are called.

    fresh  kernels that have to be compiled
    steps  layers' calls while nothing is launched, in a list for each block of them
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *fresh: str):
        self.steps: list[list[str]] = []
        self.fresh, self._inside = fresh, False
        called = Layer.__call__
        monkeypatch.setattr(Replayer, "ahead", True)
        monkeypatch.setattr("auraflux.ops.hopper.ahead.serves", lambda: True)
        monkeypatch.setattr("auraflux.ops.hopper.ahead.compiled_ahead", self.compiled_ahead)
        monkeypatch.setattr("auraflux.ops.hopper.ahead.counted_builds", self.counted_builds)
        monkeypatch.setattr(Layer, "__call__", lambda layer, *given: self.note(layer) or called(layer, *given))

    def note(self, layer: Layer) -> None:
        if self._inside:
            self.steps[-1].append(f"{type(layer.mixer).__name__} {type(layer.mlp).__name__}")

    @contextmanager
    def compiled_ahead(self, report) -> Iterator[list[str]]:
        self.steps.append([])
        self._inside = True
        yield self.steps[-1]
        self._inside = False
        report(0, 1)

    @contextmanager
    def counted_builds(self) -> Iterator[list[str]]:
        yield list(self.fresh)


@pytest.mark.parametrize("name", ["llama", "qwen3_5_moe", "gpt_oss", "deepseek_v3", "gemma4_moe"])
def test_a_model_that_was_warmed_up_writes_the_same(name: str, monkeypatch: pytest.MonkeyPatch, caplog):
    wanted = loaded(name).generate_batch([PROMPT], max_tokens=6, endless=True)
    model, said = loaded(name), []
    layers = model.engine.model.layers
    stub = Stub(monkeypatch, "_rms")
    with caplog.at_level(logging.INFO, "auraflux"):
        warm_up(model, lambda *told: said.append(told))
    assert [record.getMessage() for record in caplog.records] == ["1 kernels compiled in 0 s; the next start finds them"]
    assert {what for what, _, _ in said} >= {"compiling kernels", "finding kernels", "preparing steps: 8 at once"}
    assert all(done < total for _, done, total in said)
    first, others = stub.steps
    assert set(others) == set(first)
    assert model.engine.model.layers is layers
    assert model.engine.cache.nbytes == 0
    assert model.scheduler.counts.looked_up == 0
    assert model.generate_batch([PROMPT], max_tokens=6, endless=True) == wanted


def test_layers_that_launch_the_same_are_taken_once(monkeypatch: pytest.MonkeyPatch):
    model, stub = loaded(), Stub(monkeypatch, "_rms")
    kinds = [f"{type(layer.mixer).__name__} {type(layer.mlp).__name__}" for layer in model.engine.model.layers]
    assert len(kinds) > len(set(kinds)) + 1
    warm_up(model, lambda *told: None)
    first, others = stub.steps
    assert first[: len(kinds) - 1] == kinds[:-1]
    assert others.count(kinds[0]) < others.count(kinds[-1]) * kinds.count(kinds[0])


def test_kernels_that_an_earlier_start_left_are_not_looked_for(monkeypatch: pytest.MonkeyPatch, caplog):
    model, stub = loaded("llama"), Stub(monkeypatch)
    with caplog.at_level(logging.INFO, "auraflux"):
        warm_up(model, lambda *told: None)
    assert len(stub.steps) == 1
    assert not caplog.records


def test_a_failure_in_looking_for_kernels_is_told_of_and_no_more(monkeypatch: pytest.MonkeyPatch, caplog):
    wanted = loaded("llama").generate_batch([PROMPT], max_tokens=6, endless=True)
    model = loaded("llama")
    Stub(monkeypatch, "_rms")
    monkeypatch.setattr("auraflux.run.warmup.one_of_each", lambda watched: [None for _ in watched])
    layers = model.engine.model.layers
    warm_up(model, lambda *told: None)
    assert "kernels are compiled one by one: 'NoneType' object is not callable" in caplog.text
    assert model.engine.model.layers is layers
    assert model.generate_batch([PROMPT], max_tokens=6, endless=True) == wanted


def test_one_layer_of_each_kind_and_the_last():
    launched: list[str] = []
    layers = [lambda x, kind=kind: launched.append(kind) or x for kind in "abbcbb"]
    watched = [Watched(layer, launched) for layer in layers]
    assert [each(5) for each in watched] == [5] * 6
    found = one_of_each(watched)
    assert [each if isinstance(each, Passed) else layers.index(each) for each in found][:2] == [0, 1]
    assert [isinstance(each, Passed) for each in found] == [False, False, True, False, True, False]


def test_what_is_prepared():
    model = loaded("llama")
    assert usual_loads(model) == [Load(1, 32), Load(8, 32)]
    assert {load.texts * load.tokens for load in crowds(8192)} == set(range(2176, 8193, 128))
    assert crowds(512) == []
