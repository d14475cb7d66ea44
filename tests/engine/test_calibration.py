"""Calibration files: written once, found again, and never used if they are corrupt or another model's."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from auraflux.cache import CacheSettings
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.engine import calibration
from auraflux.engine.calibrate import DEFAULT_TOKENS
from auraflux.errors import AurafluxError, FormatError, InputError
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from auraflux.weights.download.pull import locate
from tests.engine.tiny import tiny
from tests.eval.tiny_heads import tiny_heads


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AURAFLUX_CACHE", str(tmp_path))
    return tmp_path / "calibration"


def loaded(calibrate: str | Path = "auto", model: Path | None = None, kv: str = "k4v4", **more) -> LanguageModel:
    return load(model or tiny(), kv=kv, context=128, device="cpu", calibrate=calibrate, **more)


def digest(model: LanguageModel) -> str | None:
    found = model.engine.cache.key_calibration
    return None if found is None else found.digest


def the_file(home: Path) -> Path:
    (found,) = home.iterdir()
    return found


def no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_, **__):
        raise AssertionError("the model was run")

    monkeypatch.setattr(calibration, "calibrate_keys", refuse)


def test_a_given_file_is_not_used_for_the_draft_model(home: Path, tmp_path: Path):
    """The draft model has other heads, for which the file would be refused."""
    mine = digest(loaded())
    file = the_file(home).rename(tmp_path / "mine.safetensors")
    model = loaded(file, speculate=tiny_heads())
    assert model.scheduler.speculation is not None
    small = model.scheduler.speculation.begin().proposer.engine
    assert digest(model) == mine
    assert small.cache.key_calibration is None or small.cache.key_calibration.digest != mine


def test_a_calibration_is_measured_once_and_cached(home: Path, monkeypatch: pytest.MonkeyPatch):
    said: list[tuple[str, int, int]] = []
    first = loaded(report=lambda *step: said.append(step))
    # kernels may compile afterwards
    _, done, total = [step for step in said if step[0] == "calibrating"][-1]
    assert done == total
    no_run(monkeypatch)
    assert digest(loaded()) == digest(first) is not None
    # also as a given file
    assert digest(loaded(the_file(home))) == digest(first)
    shown = calibration.find_cached(locate(str(tiny())))
    assert shown == {"file": str(the_file(home)), "digest": digest(first), "tokens": DEFAULT_TOKENS}
    # one of another recipe is ignored
    changed(the_file(home), recipe=calibration.RECIPE - 1)
    assert calibration.find_cached(locate(str(tiny()))) is None


def test_a_model_folder_may_hold_its_calibration(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = loaded()
    carried = tmp_path / "model"
    carried.mkdir()
    for file in tiny().iterdir():
        (carried / file.name).write_bytes(file.read_bytes())
    the_file(home).rename(carried / calibration.MODEL_FILE)
    no_run(monkeypatch)
    assert digest(loaded(model=carried)) == digest(first)
    found = calibration.find_cached(carried)
    assert found is not None
    assert found["file"] == str(carried / calibration.MODEL_FILE)


@pytest.mark.parametrize(("calibrate", "kv"), [("off", "k4v4"), ("auto", "none")])
def test_nothing_is_measured_where_it_is_off_or_not_needed(calibrate: str, kv: str, home: Path):
    assert digest(loaded(calibrate, kv=kv)) is None
    assert not home.exists()


def changed(path: Path, **about: object) -> None:
    """Rewrite a file with other facts, or with layer 0's tensors changed by functions."""
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
    """Remove a fact by overwriting its name with one of the same length."""
    content = path.read_bytes()
    assert content.count(fact.encode()) == 1
    path.write_bytes(content.replace(fact.encode(), b"x" * len(fact)))


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


HARM = {
    "cut short": (cut_short, "is not a calibration"),
    "empty": (lambda path: path.write_bytes(b""), "is not a calibration"),
    "another version": (lambda path: changed(path, version=99), "another format or version"),
    "no layers": (lambda path: changed(path, layers={}), "no entry for layer 0"),
    "layers of another kind": (lambda path: changed(path, layers=[1, 2]), "is not a calibration"),
    "nobody's": (lambda path: changed(path, weights=None), "calibration of another model"),
    "no sum": (lambda path: without(path, "digest"), "is not a calibration: 'digest'"),
    "no weights": (lambda path: without(path, "weights"), "is not a calibration: 'weights'"),
    "a number changed": (lambda path: changed(path, along=lambda x: x + 1e-3), "is corrupt"),
    "no number": (lambda path: changed(path, across=lambda x: x * torch.nan), "some values are not finite"),
    "a scale of 0": (lambda path: changed(path, scale=lambda x: x * 0), "some scales are not above 0"),
    "another shape": (lambda path: changed(path, scale=lambda x: x[:, :-1]), "and the layer's keys have"),
    "too many frequencies": (lambda path: changed(path, frequencies=lambda x: x.repeat(9)), "RoPE would rotate"),
    "another model's": (lambda path: changed(path, weights="0" * 32), "calibration of another model"),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelCalibration, str, bytes]:
    """Return a calibration, and the name and content of its file."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("made")
        patch.setenv("AURAFLUX_CACHE", str(folder))
        found = loaded().engine.cache.key_calibration
        assert found is not None
        cached = the_file(folder / "calibration")
        return found, cached.name, cached.read_bytes()


@pytest.mark.parametrize(("harm", "said"), HARM.values(), ids=HARM)
def test_a_bad_file_is_refused_or_replaced(
    harm, said: str, home: Path, made: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    found, name, whole = made
    home.mkdir()
    cached = home / name
    cached.write_bytes(whole)
    harm(cached)
    with pytest.raises(AurafluxError, match=said):
        loaded(cached)
    runs: list[Any] = []
    # a run gives the same calibration each time, which other tests check
    monkeypatch.setattr(calibration, "calibrate_keys", lambda *args: runs.append(args) or found)
    with caplog.at_level(logging.WARNING):
        assert digest(loaded()) == found.digest
    assert len(runs) == 1
    assert said in caplog.text
    assert cached.read_bytes() == whole


def test_a_missing_file_and_another_models_file_are_refused(home: Path, tmp_path: Path):
    with pytest.raises(FormatError, match="cannot be read"):
        loaded(tmp_path / "none.safetensors")
    loaded()
    with pytest.raises(InputError, match="calibration of another model or of other weights"):
        loaded(the_file(home), model=tiny_heads())


def test_other_weights_have_another_file(home: Path):
    assert digest(loaded()) != digest(loaded(quantize=4))
    assert len(list(home.iterdir())) == 2


def test_an_unwritable_folder_is_logged(home: Path, caplog: pytest.LogCaptureFixture):
    home.write_text("a file where the folder should be")
    assert digest(loaded()) is not None
    assert "was not cached" in caplog.text


def test_a_snapshot_of_another_calibration_is_refused():
    cached = loaded().engine.cache
    plain = loaded("off").engine.cache
    other = load(tiny(), kv=CacheSettings("k4v4", sink_tokens=2), context=128, device="cpu").engine.cache
    for cache in (plain, other):
        with pytest.raises(InputError, match="does not fit"):
            cache.restore(cached.open().snapshot())
