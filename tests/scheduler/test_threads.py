"""One model, many threads: every text is the one that is written alone."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import auraflux
from auraflux.loading.language_model import LanguageModel
from auraflux.weights.download.pull import DEFAULT, models_folder
from tests.engine.tiny import tiny

THREADS, EACH = 8, 50
BEGINNINGS = [
    "The capital of",
    "Once upon a time",
    "Water boils at",
    "In 1969, the",
    "A dog and a cat",
    "To make tea, you",
    "def f(",
    "Why",
]

pytestmark = pytest.mark.slow


def wrong(model: LanguageModel, tokens: int) -> int:
    """Count the threads' outputs that differ from those generated one after the other."""
    prompts = [[f"{BEGINNINGS[thread]} {number * 7 % EACH}" for number in range(EACH)] for thread in range(THREADS)]
    settings = {"max_tokens": tokens, "temperature": 0}
    alone = []
    for prompt in (prompt for ours in prompts for prompt in ours):
        model.reset()
        alone.append(list(model.tokens(prompt, **settings)))
    model.reset()
    with ThreadPoolExecutor(THREADS) as pool:
        together = pool.map(lambda ours: [list(model.tokens(prompt, **settings)) for prompt in ours], prompts)
        found = [output for outputs in together for output in outputs]
    assert len(found) == len(alone) == THREADS * EACH
    return sum(a != b for a, b in zip(alone, found, strict=True))


def test_a_tiny_model():
    assert wrong(auraflux.load(tiny(), device="cpu", context=64, kv="k8v4", exact=True), 12) == 0


def test_a_real_model():
    if not (models_folder() / f"{DEFAULT}.gguf").exists():
        pytest.skip(f"{DEFAULT} is not here; auraflux pull fetches it")
    assert wrong(auraflux.load(device="cpu", context=64, exact=True), 4) == 0
