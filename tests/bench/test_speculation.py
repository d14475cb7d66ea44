"""Speculative decoding with a given acceptance rate."""

from functools import cache

import pytest
import torch
from click.testing import CliRunner

import auraflux
from auraflux.bench.random_weights import random_language
from auraflux.bench.speculation import _run, measure, measure_forced, tasks
from auraflux.cache import CacheSettings
from auraflux.cli import main
from auraflux.loading.language_model import LanguageModel
from tests.engine.tiny import tiny

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
def test_draft_tokens_are_accepted_at_the_given_rate(chance: float):
    found = list(measure_forced(model_of(2), model_of(1).engine, list(range(80)), 20, chance, 1, lambda _: None))
    assert [gain.task for gain in found] == [f"{count} draft tokens a step" for count in range(1, 9)]
    assert all(gain.same for gain in found)
    first = found[0].accepted / found[0].drafted
    assert first == chance if chance in (0, 1) else 0.5 < first < 0.9
    # draft tokens after a rejected one are rejected too
    assert found[-1].accepted / found[-1].drafted <= first
    assert model_of(1).engine.cache.nbytes == 0


def test_repetition_tasks_can_be_forced():
    """Check that a forced output equals the task's text with and without speculation, for any weights."""
    model = auraflux.load(tiny(), context=4096, device="cpu", speculate="ngram")
    found = {gain.task: gain for gain in measure(model, 40, 1, lambda _: None)}
    assert list(found) == [task.name for task in tasks()]
    assert all(gain.same for gain in found.values())
    for task in (task for task in tasks() if task.dictated):
        _, stats, generated = _run(model, task, 40)
        assert model.tokenizer.decode(generated) in task.dictated
        assert stats.tokens == 40


@pytest.mark.parametrize("given", [["--shape", "llama-8b"], ["--random"], ["--random", "--shape", "llama-8b", "model"]])
def test_random_weights_need_a_shape_and_no_model(given: list[str]):
    done = CliRunner().invoke(main, ["bench", "speculate", *given])
    assert done.exit_code == 1
    assert "random weights need --random and --shape NAME, and no MODEL." in done.stderr
