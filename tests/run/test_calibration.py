"""Files of calibrations: made once, found again, and never used where they are damaged or another model's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from auraflux.cache import CacheSettings
from auraflux.cache.calibration import ModelVectors
from auraflux.errors import AurafluxError, FormatError, InputError
from auraflux.run import calibration
from auraflux.run.calibrate import TOKENS
from auraflux.run.language import LanguageModel
from auraflux.run.load import load
from auraflux.weights.pull import locate
from tests.eval.tiny_heads import tiny_heads
from tests.run.tiny import tiny


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path))
    return tmp_path / "calibration"


def loaded(calibrate: str | Path = "auto", model: Path | None = None, kv: str = "k4v4", **more) -> LanguageModel:
    return load(model or tiny(), kv=kv, context=128, device="cpu", calibrate=calibrate, **more)


def digest(model: LanguageModel) -> str | None:
    vectors = model.engine.cache.vectors
    return None if vectors is None else vectors.digest


def the_file(home: Path) -> Path:
    (found,) = home.iterdir()
    return found


def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("the model was run")

    monkeypatch.setattr(calibration, "find_vectors", refuse)


def test_a_named_file_is_not_for_a_second_model(home: Path, tmp_path: Path):
    """It has other heads, of which the file would be refused."""
    mine = digest(loaded())
    file = the_file(home).rename(tmp_path / "mine.safetensors")
    model = loaded(file, speculate=tiny_heads())
    assert model.scheduler.speculation is not None
    small = model.scheduler.speculation.begin().draft.engine
    assert digest(model) == mine
    assert small.cache.vectors is None or small.cache.vectors.digest != mine


def test_it_is_made_once_and_found_again(home: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[tuple[str, int, int]] = []
    first = loaded(report=lambda *step: said.append(step))
    # kernels may be compiled after that
    _, done, total = [step for step in said if step[0] == "calibrating"][-1]
    assert done == total
    no_run(monkeypatch)
    assert digest(loaded()) == digest(first) is not None
    # also by its name, and where it lies in the model's folder
    assert digest(loaded(the_file(home))) == digest(first)
    shown = calibration.kept_for(locate(str(tiny())))
    assert shown == {"file": str(the_file(home)), "digest": digest(first), "tokens": TOKENS}
    # one that was made by another recipe is neither shown nor carried
    changed(the_file(home), recipe=calibration.RECIPE - 1)
    assert calibration.kept_for(locate(str(tiny()))) is None


def test_a_folder_may_carry_it(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = loaded()
    carried = tmp_path / "model"
    carried.mkdir()
    for file in tiny().iterdir():
        (carried / file.name).write_bytes(file.read_bytes())
    the_file(home).rename(carried / calibration.CARRIED)
    no_run(monkeypatch)
    assert digest(loaded(model=carried)) == digest(first)
    found = calibration.kept_for(carried)
    assert found is not None
    assert found["file"] == str(carried / calibration.CARRIED)


@pytest.mark.parametrize(("calibrate", "kv"), [("off", "k4v4"), ("auto", "none")])
def test_it_is_not_made_where_nobody_wants_it(calibrate: str, kv: str, home: Path):
    assert digest(loaded(calibrate, kv=kv)) is None
    assert not home.exists()


def changed(path: Path, **about: object) -> None:
    """Write a file again with other tensors or facts; a function of a tensor changes layer 0's."""
    with safe_open(str(path), "pt") as content:
        facts = json.loads(content.metadata()["about"])
        tensors = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
    for name, value in about.items():
        if callable(value):
            tensors[f"0.{name}"] = value(tensors[f"0.{name}"]).contiguous()
        else:
            facts[name] = value
    save_file(tensors, path, {"about": json.dumps(facts)})


def without(path: Path, fact: str) -> None:
    """Leave a fact out; its name keeps its length, so that nothing else changes."""
    content = path.read_bytes()
    assert content.count(fact.encode()) == 1
    path.write_bytes(content.replace(fact.encode(), b"x" * len(fact)))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


HARM = {
    "cut short": (cut_short, "is no calibration"),
    "empty": (lambda path: path.write_bytes(b""), "is no calibration"),
    "another version": (lambda path: changed(path, version=99), "another kind or version"),
    "no layers": (lambda path: changed(path, layers={}), "no vectors for layer 0"),
    "layers of another kind": (lambda path: changed(path, layers=[1, 2]), "is no calibration"),
    "nobody's": (lambda path: changed(path, weights=None), "calibration of another model"),
    "no sum": (lambda path: without(path, "digest"), "is no calibration: 'digest'"),
    "no weights": (lambda path: without(path, "weights"), "is no calibration: 'weights'"),
    "a number changed": (lambda path: changed(path, along=lambda x: x + 1e-3), "not what was written"),
    "no number": (lambda path: changed(path, across=lambda x: x * torch.nan), "values that are no numbers"),
    "a scale of 0": (lambda path: changed(path, scale=lambda x: x * 0), "scales that are not above 0"),
    "another shape": (lambda path: changed(path, scale=lambda x: x[:, :-1]), "and the layer's keys have"),
    "too many frequencies": (lambda path: changed(path, frequencies=lambda x: x.repeat(9)), "channels would turn"),
    "another model's": (lambda path: changed(path, weights="0" * 32), "calibration of another model"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelVectors, str, bytes]:
    """What the model is found to have, and the file of it: its name and its content."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("made")
        patch.setenv("AURAFLUX_CACHE", str(folder))
        vectors = loaded().engine.cache.vectors
        assert vectors is not None
        kept = the_file(folder / "calibration")
        return vectors, kept.name, kept.read_bytes()


@pytest.mark.parametrize(("harm", "said"), HARM.values(), ids=HARM)
def test_what_is_not_right_is_refused_or_made_anew(
    harm, said: str, home: Path, made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    vectors, name, whole = made
    home.mkdir()
    kept = home / name
    kept.write_bytes(whole)
    harm(kept)
    with pytest.raises(AurafluxError, match=said):
        loaded(kept)
    runs: list[Any] = []
    # to run the model finds the same each time, which other tests hold
    monkeypatch.setattr(calibration, "find_vectors", lambda *args: runs.append(args) or vectors)
    with caplog.at_level(logging.WARNING):
        assert digest(loaded()) == vectors.digest
    assert len(runs) == 1
    assert said in caplog.text
    assert kept.read_bytes() == whole


def test_a_file_that_is_not_there_and_another_models(home: Path, tmp_path: Path):
    with pytest.raises(FormatError, match="cannot be read"):
        loaded(tmp_path / "none.safetensors")
    loaded()
    with pytest.raises(InputError, match="calibration of another model, or of other weights"):
        loaded(the_file(home), model=tiny_heads())


def test_other_weights_have_another_file(home: Path):
    assert digest(loaded()) != digest(loaded(quantize=4))
    assert len(list(home.iterdir())) == 2


def test_a_folder_that_cannot_be_written_is_said(home: Path, caplog: pytest.LogCaptureFixture):
    home.write_text("a file where the folder should be")
    assert digest(loaded()) is not None
    assert "was not kept" in caplog.text


def test_a_snapshot_of_other_vectors_is_refused():
    cached = loaded().engine.cache
    plain = loaded("off").engine.cache
    other = load(tiny(), kv=CacheSettings("k4v4", first=2), context=128, device="cpu").engine.cache
    for cache in (plain, other):
        with pytest.raises(InputError, match="does not fit"):
            cache.restore(cached.open().snapshot())
