"""Sampling settings of requests that leave them out: where they come from, and that every interface has the same ones."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import auraflux
from auraflux.defaults import TEMPERATURE
from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import FormatError, SettingsError
from auraflux.loading.default_sampling import default_sampling
from auraflux.serve.transport.model_process import facts_of
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.engine.tiny import tiny

LLAMA3 = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]}


class FakeGGUF:
    """A checkpoint with metadata."""

    path = Path("model.gguf")

    def __init__(self, model_type: str, **metadata: Any):
        self.config, self.metadata = {"model_type": model_type}, metadata


def of_folder(tmp_path: Path, generation: dict[str, Any], **options: Any) -> DefaultSampling:
    folder = tmp_path / "model"
    shutil.copytree(tiny(), folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return default_sampling(open_checkpoint(folder), options)


def of_gguf(model_type: str = "llama", options: Any = None, **metadata: Any) -> DefaultSampling:
    keys = {name.replace("__", "."): value for name, value in metadata.items()}
    return default_sampling(FakeGGUF(model_type, **keys), options or {})  # type: ignore[arg-type]


def test_options_precede_the_model_which_precedes_the_default(tmp_path: Path):
    found = of_folder(tmp_path, LLAMA3, temperature=0.0, min_p=0.1)
    assert found == DefaultSampling(temperature=0.0, top_p=0.9, min_p=0.1, source="options, generation_config.json")


def test_generation_config(tmp_path: Path):
    assert of_folder(tmp_path, LLAMA3) == DefaultSampling(temperature=0.6, top_p=0.9, source="generation_config.json")


def test_a_model_that_recommends_nothing_has_the_default(tmp_path: Path):
    found = of_folder(tmp_path, {"eos_token_id": [1]})
    assert found == DefaultSampling(temperature=TEMPERATURE, source="default")


@pytest.mark.parametrize(("do_sample", "temperature"), [(True, 1.0), (False, 0.0)])
def test_do_sample_without_a_temperature(tmp_path: Path, do_sample: bool, temperature: float):
    """Gemma 3's file has do_sample, top_k and top_p; transformers then samples at temperature 1."""
    found = of_folder(tmp_path, {"do_sample": do_sample, "top_k": 64})
    assert (found.temperature, found.top_k) == (temperature, 64)


@pytest.mark.parametrize("wrong", [{"temperature": "hot"}, {"top_p": 7}, {"top_k": 1.5}, {"repetition_penalty": -1}])
def test_wrong_recommendations_are_refused_by_name(tmp_path: Path, wrong: dict[str, Any]):
    with pytest.raises(FormatError, match=rf"generation_config.json has {next(iter(wrong))} ="):
        of_folder(tmp_path, wrong)


def test_gguf_metadata():
    found = of_gguf(
        general__sampling__temp=float(np.float32(0.95)),
        general__sampling__top_k=-1,
        general__sampling__penalty_repeat=float(np.float32(1.1)),
    )
    assert found == DefaultSampling(temperature=0.95, top_k=0, repetition_penalty=1.1, source="GGUF metadata")


def test_known_models_without_a_recommendation():
    assert of_gguf(general__basename="smollm2") == DefaultSampling(temperature=0.2, top_p=0.9, source="recommended for SmolLM2")
    # the name alone does not make a model of another family one of these
    assert of_gguf("mistral", general__basename="smollm2").temperature == TEMPERATURE


def test_a_request_overrides_single_settings():
    defaults = DefaultSampling(temperature=0.6, top_p=0.9, repetition_penalty=1.1)
    assert defaults.sampling(top_p=None, temperature=0, seed=1) == Sampling(
        temperature=0, top_p=0.9, repetition_penalty=1.1, seed=1
    )
    assert str(DefaultSampling(0.6, 1.0, 20, source="here")) == "temperature 0.6, top-k 20 (here)"


def test_a_loaded_model_samples_with_its_defaults():
    ids = [5, 80, 301, 17, 44]
    model = auraflux.load(tiny(), device="cpu", context=64, kv="none", sampling={"temperature": 5.0})
    assert facts_of(model).default_sampling == model.default_sampling == DefaultSampling(temperature=5.0, source="options")
    explicit, default = ([*model.tokens(ids, max_tokens=12, seed=1, **given)] for given in ({"temperature": 5.0}, {}))
    assert explicit == default != [*model.tokens(ids, max_tokens=12, temperature=0)]
    # in a batch too
    text = model.generate_batch([ids], max_tokens=12, seed=1)
    assert text == model.generate_batch([ids], max_tokens=12, seed=1, temperature=5.0)


def test_wrong_options_are_refused():
    with pytest.raises(SettingsError, match="sampling has max_tokens"):
        auraflux.load(tiny(), sampling={"max_tokens": 5})
