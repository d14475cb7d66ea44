"""What guesses are worth where it is said beforehand how many are right."""

from functools import cache

import pytest
import torch
from click.testing import CliRunner

import auraflux
from auraflux.bench.random_weights import random_language
from auraflux.bench.speculation import _write, measure, measure_forced, tasks
from auraflux.cache import CacheSettings
from auraflux.cli import main
from auraflux.run.language import LanguageModel
from tests.run.tiny import tiny

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "vocab_size": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 512,
}


@cache
def model_of(layers: int) -> LanguageModel:
    shape = {**TINY, "num_hidden_layers": layers}
    return random_language(shape, CacheSettings("k8v4"), torch.device("cpu"), context=128)


@pytest.mark.parametrize("chance", [0.7, 1.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_guesses_are_right_as_often_as_they_are_told_to_be(chance: float):
    found = list(measure_forced(model_of(2), model_of(1).engine, list(range(80)), 20, chance, 1, lambda _: None))
    assert [gain.task for gain in found] == [f"{count} guesses a step" for count in range(1, 9)]
    assert all(gain.same for gain in found)
    first = found[0].accepted / found[0].drafted
    assert first == chance if chance in (0, 1) else 0.5 < first < 0.9
    # a guess after one that was wrong is of no use
    assert found[-1].accepted / found[-1].drafted <= first
    assert model_of(1).engine.cache.nbytes == 0


def test_what_repeats_is_also_dictated():
    """Then it is what was asked for, whatever a model of random weights makes of it, with guesses and without."""
    model = auraflux.load(tiny(), context=4096, device="cpu", speculate="ngram")
    found = {gain.task: gain for gain in measure(model, 40, 1, lambda _: None)}
    assert list(found) == [task.name for task in tasks()]
    assert all(gain.same for gain in found.values())
    for task in (task for task in tasks() if task.dictated):
        _, stats, text = _write(model, task, 40)
        assert model.tokenizer.decode(text) in task.dictated
        assert stats.tokens == 40


@pytest.mark.parametrize("given", [["--shape", "llama-8b"], ["--random"], ["--random", "--shape", "llama-8b", "model"]])
def test_random_weights_need_a_shape_and_no_model(given: list[str]):
    done = CliRunner().invoke(main, ["bench", "speculate", *given])
    assert done.exit_code == 1
    assert "random weights need --random and --shape NAME, and no MODEL." in done.stderr
