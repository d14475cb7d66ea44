"""Guesses that are checked several at a time: the text is what it is without them, whatever is guessed."""

import random
from collections.abc import Callable
from functools import cache

import pytest

from auraflux.run.ngrams import NGrams
from auraflux.run.sampling import Sampling
from auraflux.run.scheduler import Scheduler
from auraflux.run.speculate import Draft, Speculation
from auraflux.run.writer import Writer
from tests.models.test_replay import MODELS
from tests.run.test_scheduler import CALIBRATED, finish, nothing_leaks, prompts_of, scheduler_for, submit

TOKENS = 40


class Told:
    """Guesses from somebody who knows the texts, and is right most of the time."""

    free, kind = True, 2

    def __init__(self, texts: list[list[int]], share: float = 0.8, seed: int = 0):
        self.texts, self.share, self.random = texts, share, random.Random(seed)

    def propose(self, tokens: list[int], count: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), [])
        return [self._changed(token) for token in text[len(tokens) : len(tokens) + count]]

    def _changed(self, token: int) -> int:
        return token if self.random.random() < self.share else (token + 1) % 64

    def close(self) -> None: ...


def eager(begin: Callable[[], Draft]) -> Speculation:
    """Speculation that thinks tokens are cheap, so that it guesses at every step."""
    made = Speculation(begin, 64)
    made.costs.ratio = lambda texts, more: 1.0  # type: ignore[method-assign]
    return made


def with_guesses(scheduler: Scheduler, begin: Callable[[], Draft]) -> Scheduler:
    scheduler.speculation = eager(begin)
    scheduler._writer = Writer(scheduler.engine, scheduler.speculation)
    return scheduler


def settings_of(temperature: float) -> Sampling:
    return Sampling(max_tokens=TOKENS, temperature=temperature, seed=3)


@cache
def plain(name: str, kv: str, temperature: float = 0.0) -> list[list[int]]:
    made = scheduler_for(name, kv)
    return finish(made, submit(made, prompts_of(name), settings_of(temperature)))


def told(name: str, kv: str, temperature: float = 0.0, share: float = 0.8) -> Callable[[], Draft]:
    texts = [[*prompt, *text] for prompt, text in zip(prompts_of(name), plain(name, kv, temperature), strict=True)]
    return lambda: Told(texts, share)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kv", ["k8v4", CALIBRATED])
@pytest.mark.parametrize("name", MODELS)
def test_a_text_is_what_it_is_without_guesses(name: str, kv: str, temperature: float):
    for begin in (told(name, kv, temperature), NGrams):
        made = with_guesses(scheduler_for(name, kv), begin)
        jobs = submit(made, prompts_of(name), settings_of(temperature))
        assert finish(made, jobs) == plain(name, kv, temperature)
        assert nothing_leaks(made)
