"""What guesses are worth: texts that repeat what they were given, and texts that do not, written with guesses and without.

What repeats is written in the model's own words, which may wander off, and dictated, so that it is what was asked for. A
model of random weights says nothing that a smaller one could guess. There the text is dictated, guesses are right as often as
they are told to be, and take the smaller model's time.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import resources
from inspect import getsource

import torch
from torch import Tensor

from auraflux.cache import Batch
from auraflux.cache.radix import common_length
from auraflux.errors import ContextError
from auraflux.run import stops
from auraflux.run.device import sent
from auraflux.run.draft_model import ModelDraft
from auraflux.run.engine import Engine
from auraflux.run.language import LanguageModel
from auraflux.run.speculate import MOST, Draft, Speculation, Text
from auraflux.run.stats import Stats

LETTERS = 2400  # of what is repeated
BEGUN = 300  # of them that the prompt repeats already


@dataclass(frozen=True)
class Task:
    """Something to write; a temperature above 0 keeps a small model from going in circles.

    dictated  how the prompt goes on, whatever the model says; "" for its own words
    """

    name: str
    prompt: str
    temperature: float = 0.0
    dictated: str = ""


@dataclass(frozen=True)
class Gain:
    """Tokens per second with guesses and without, the best of all rounds, and what became of the guesses.

    same  whether the text was the same
    """

    task: str
    plain_rate: float
    rate: float
    tokens_per_step: float
    drafted: int
    accepted: int
    same: bool


def tasks() -> list[Task]:
    """A document to quote, a file to rename things in, a story and a question."""
    speech = (resources.files("auraflux.eval") / "texts" / "1862-lincoln.txt").read_text("utf-8")[:LETTERS]
    code = getsource(stops)[:LETTERS]
    renamed = code.replace("StopStrings", "Stops")
    quoting = f"The address:\n\n{speech}\n\nThe address once more:\n\n{_words(speech)}"
    editing = f"```python\n{code}\n```\n\nWith StopStrings renamed to Stops"
    begun = f":\n\n```python\n{_words(renamed)}"
    return [
        Task("quote a document", quoting),
        Task("the same, dictated", quoting, dictated=_rest(speech)),
        Task("edit code", editing + begun),
        Task(
            "edit more, dictated", f"{editing} and _steps to _edges{begun}", dictated=_rest(renamed.replace("_steps", "_edges"))
        ),
        Task("tell a story", "Once upon a time, there was a little girl who", 1.0),
        Task("explain", "The three primary colors are", 1.0),
    ]


def _words(text: str) -> str:
    """How a text begins: a word that is cut would be another one to a model."""
    return text[:BEGUN].rpartition(" ")[0]


def _rest(text: str) -> str:
    """What follows the words a text begins with."""
    return text[len(_words(text)) :]


def measure(model: LanguageModel, tokens: int, rounds: int, tell: Callable[[str], None]) -> Iterator[Gain]:
    """Write each text with guesses and without by turns, so that a busy machine is busy for both."""
    speculation, scheduler = model.scheduler.speculation, model.scheduler
    try:
        for task in tasks():
            found: dict[bool, list[tuple[float, Stats, list[int]]]] = {False: [], True: []}
            for number in range(rounds):
                for guessing in (False, True):
                    tell(f"{task.name}, round {number + 1} of {rounds}")
                    scheduler.speculate(speculation if guessing else None)
                    found[guessing].append(_write(model, task, tokens))
            yield _gain(task.name, found[False], found[True])
    finally:
        scheduler.speculate(speculation)


class Forced(ModelDraft):
    """A small model that takes its time, but says the tokens of a known text, each of them with a chance."""

    def __init__(self, engine: Engine, vocab: int, text: list[int], chance: float):
        super().__init__(engine, vocab)
        self._text, self._chance, self._vocabulary, self._random = text, chance, vocab, random.Random(len(text))

    def _say(self, likeliest: Tensor, place: int) -> Tensor:
        right = sent([self._text[place]], likeliest.device) if place < len(self._text) else likeliest
        return right if self._random.random() < self._chance else (right + 1) % self._vocabulary


class Always(Speculation):
    """Guesses at so many tokens in every step, whatever that is worth."""

    def __init__(self, begin: Callable[[], Draft], count: int):
        super().__init__(begin, count + 1)
        self._count = count

    def _counts(self, texts: Sequence[Text], is_known: Callable[[int], bool] = lambda more: True) -> list[int]:
        # no plain step is needed to compare with
        self._steps = 0
        return [min(self._count, max(text.room, 0)) for text in texts]


@contextmanager
def dictated(engine: Engine, text: list[int]) -> Iterator[None]:
    """Have an engine prefer the next token of a text, whatever its model makes of those before; for one sequence at a time."""
    decode, verify = engine.decode, engine.verify

    def preferred(scores: Tensor, batch: Batch) -> Tensor:
        end = batch.sequences[0].length
        following = text[end - len(scores) + 1 : end + 1]
        if following:
            rows = sent(list(enumerate(following)), scores.device)
            scores[rows[:, 0], rows[:, 1]] = torch.inf
        return scores

    engine.decode = lambda batch, ids: preferred(decode(batch, ids), batch)  # type: ignore[method-assign]
    engine.verify = lambda batch, ids: preferred(verify(batch, ids), batch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.decode, engine.verify


def measure_forced(
    model: LanguageModel, small: Engine, text: list[int], at: int, chance: float, rounds: int, tell: Callable[[str], None]
) -> Iterator[Gain]:
    """Write a text from a place on with 1 to 8 guesses in every step and without, by turns; each is right with a chance."""
    scheduler, vocab, prompt = model.scheduler, model.engine.model.config.vocab, text[:at]
    with dictated(model.engine, text):
        for count in range(1, 9):
            guessing = Always(lambda: Forced(small, vocab, text, chance), min(count, MOST))
            found: dict[bool, list[tuple[float, Stats, list[int]]]] = {False: [], True: []}
            # one more than is asked for: the first records steps
            for number in range(rounds + 1):
                for with_guesses in (False, True):
                    tell(f"{count} guesses a step, round {number + 1} of {rounds + 1}")
                    scheduler.speculate(guessing if with_guesses else None)
                    found[with_guesses].append(_written(model, prompt, len(text) - at))
            yield _gain(f"{count} guesses a step", found[False][1:], found[True][1:])
    scheduler.speculate(None)


def _written(model: LanguageModel, ids: list[int], tokens: int, temperature: float = 0.0) -> tuple[float, Stats, list[int]]:
    if len(ids) + tokens > model.context:
        raise ContextError(f"a text of {len(ids) + tokens} tokens does not fit the context of {model.context}.")
    text = list(model.tokens(ids, max_tokens=tokens, temperature=temperature, seed=1, endless=True))
    return model.stats.decode_rate, model.stats, text


def _gain(name: str, plain: list[tuple[float, Stats, list[int]]], guessed: list[tuple[float, Stats, list[int]]]) -> Gain:
    """Compare the best of some rounds; what became of guesses is told of the last."""
    (_, stats, text), (_, _, wanted) = guessed[-1], plain[-1]
    best, faster = (max(rate for rate, _, _ in rounds) for rounds in (plain, guessed))
    return Gain(name, best, faster, stats.tokens_per_step, stats.drafted, stats.accepted, text == wanted)


def _write(model: LanguageModel, task: Task, tokens: int) -> tuple[float, Stats, list[int]]:
    assert model.tokenizer is not None, "text needs a tokenizer"
    prompt = model.tokenizer.encode(task.prompt)
    if not task.dictated:
        return _written(model, prompt, tokens, task.temperature)
    text = model.tokenizer.encode(task.prompt + task.dictated)
    # where they meet, other tokens may stand for the same letters
    prompt = text[: common_length(prompt, text)]
    with dictated(model.engine, text):
        return _written(model, prompt, min(tokens, len(text) - len(prompt)))
