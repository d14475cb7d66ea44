"""Speedup of speculative decoding, on outputs that repeat their prompt and on outputs that do not.

A task that repeats its prompt runs twice: with the model's own tokens, which may diverge, and forced to the expected output. A
draft model cannot predict random weights. There the output is forced, and draft tokens are right at a given acceptance rate
and take the draft model's time.
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
from auraflux.cache.prefix.radix import common_length
from auraflux.engine.device import to_device
from auraflux.engine.engine import Engine
from auraflux.errors import ContextError
from auraflux.loading.language_model import LanguageModel
from auraflux.scheduler.stats import Stats
from auraflux.speculative.draft_model import DraftModelProposer
from auraflux.speculative.draft_state import MAX_DRAFT_TOKENS, Proposer
from auraflux.speculative.speculation import Speculation, SpeculativeSequence
from auraflux.tokenizer import stop_strings

CHARACTERS = 2400  # of the document that is repeated
BEGUN = 300  # of them that the prompt has already repeated


@dataclass(frozen=True)
class Task:
    """A generation task; a temperature above 0 keeps a small model from repeating itself.

    dictated  output that the model is forced to; "" for its own tokens
    """

    name: str
    prompt: str
    temperature: float = 0.0
    dictated: str = ""


@dataclass(frozen=True)
class Gain:
    """Decode throughput with and without speculation, the best of all rounds, and the number of accepted draft tokens.

    same  both outputs were equal
    """

    task: str
    plain_rate: float
    rate: float
    tokens_per_step: float
    drafted: int
    accepted: int
    same: bool


def tasks() -> list[Task]:
    """Return the tasks: a document to quote, a file to edit, a story and a question."""
    speech = (resources.files("auraflux.eval") / "texts" / "1862-lincoln.txt").read_text("utf-8")[:CHARACTERS]
    code = getsource(stop_strings)[:CHARACTERS]
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
    """Return the first whole words of a text: half a word has other tokens."""
    return text[:BEGUN].rpartition(" ")[0]


def _rest(text: str) -> str:
    """Return the text after its first words."""
    return text[len(_words(text)) :]


def measure(model: LanguageModel, tokens: int, rounds: int, progress: Callable[[str], None]) -> Iterator[Gain]:
    """Run each task alternately with and without speculation, so that other load on the machine affects both."""
    speculation, scheduler = model.scheduler.speculation, model.scheduler
    try:
        for task in tasks():
            found: dict[bool, list[tuple[float, Stats, list[int]]]] = {False: [], True: []}
            for number in range(rounds):
                for speculating in (False, True):
                    progress(f"{task.name}, round {number + 1} of {rounds}")
                    scheduler.set_speculation(speculation if speculating else None)
                    found[speculating].append(_run(model, task, tokens))
            yield _gain(task.name, found[False], found[True])
    finally:
        scheduler.set_speculation(speculation)


class Forced(DraftModelProposer):
    """A draft model whose tokens are replaced by those of a known output, each with a probability."""

    def __init__(self, engine: Engine, vocab: int, output: list[int], chance: float):
        super().__init__(engine, vocab)
        self._output, self._chance, self._vocabulary, self._random = output, chance, vocab, random.Random(len(output))

    def _draft_token(self, likeliest: Tensor, position: int) -> Tensor:
        right = to_device([self._output[position]], likeliest.device) if position < len(self._output) else likeliest
        return right if self._random.random() < self._chance else (right + 1) % self._vocabulary


class Always(Speculation):
    """Speculation with a fixed number of draft tokens in every step."""

    def __init__(self, begin: Callable[[], Proposer], count: int):
        super().__init__(begin, count + 1)
        self._count = count

    def _counts(
        self, sequences: Sequence[SpeculativeSequence], is_captured: Callable[[int], bool] = lambda draft_tokens: True
    ) -> list[int]:
        # no step without speculation is needed for comparison
        self._verify_steps = 0
        return [min(self._count, max(sequence.room, 0)) for sequence in sequences]


@contextmanager
def dictated(engine: Engine, output: list[int]) -> Iterator[None]:
    """Force an engine's next tokens to those of a given output; for one sequence at a time."""
    decode, verify = engine.decode, engine.verify

    def preferred(scores: Tensor, batch: Batch) -> Tensor:
        end = batch.sequences[0].length
        following = output[end - len(scores) + 1 : end + 1]
        if following:
            rows = to_device(list(enumerate(following)), scores.device)
            scores[rows[:, 0], rows[:, 1]] = torch.inf
        return scores

    engine.decode = lambda batch, ids: preferred(decode(batch, ids), batch)  # type: ignore[method-assign]
    engine.verify = lambda batch, ids: preferred(verify(batch, ids), batch)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.decode, engine.verify


def measure_forced(
    model: LanguageModel, small: Engine, output: list[int], at: int, chance: float, rounds: int, progress: Callable[[str], None]
) -> Iterator[Gain]:
    """Decode an output from `at` on with 1 to 8 draft tokens a step and without; each is accepted with a probability."""
    scheduler, vocab, prompt = model.scheduler, model.engine.model.config.vocab, output[:at]
    with dictated(model.engine, output):
        for count in range(1, 9):
            speculation = Always(lambda: Forced(small, vocab, output, chance), min(count, MAX_DRAFT_TOKENS))
            found: dict[bool, list[tuple[float, Stats, list[int]]]] = {False: [], True: []}
            # the first round captures graphs and is not counted
            for number in range(rounds + 1):
                for speculating in (False, True):
                    progress(f"{count} draft tokens a step, round {number + 1} of {rounds + 1}")
                    scheduler.set_speculation(speculation if speculating else None)
                    found[speculating].append(_generate(model, prompt, len(output) - at))
            yield _gain(f"{count} draft tokens a step", found[False][1:], found[True][1:])
    scheduler.set_speculation(None)


def _generate(model: LanguageModel, ids: list[int], tokens: int, temperature: float = 0.0) -> tuple[float, Stats, list[int]]:
    if len(ids) + tokens > model.context:
        raise ContextError(f"a sequence of {len(ids) + tokens} tokens does not fit the context of {model.context}.")
    output = list(model.tokens(ids, max_tokens=tokens, temperature=temperature, seed=1, ignore_eos=True))
    return model.stats.decode_rate, model.stats, output


def _gain(name: str, plain: list[tuple[float, Stats, list[int]]], speculated: list[tuple[float, Stats, list[int]]]) -> Gain:
    """Compare the best rounds; the acceptance rate is that of the last one."""
    (_, stats, output), (_, _, wanted) = speculated[-1], plain[-1]
    best, faster = (max(rate for rate, _, _ in rounds) for rounds in (plain, speculated))
    return Gain(name, best, faster, stats.tokens_per_step, stats.drafted, stats.accepted, output == wanted)


def _run(model: LanguageModel, task: Task, tokens: int) -> tuple[float, Stats, list[int]]:
    assert model.tokenizer is not None, "text needs a tokenizer"
    prompt = model.tokenizer.encode(task.prompt)
    if not task.dictated:
        return _generate(model, prompt, tokens, task.temperature)
    output = model.tokenizer.encode(task.prompt + task.dictated)
    # at the boundary the same characters may have other tokens
    prompt = output[: common_length(prompt, output)]
    with dictated(model.engine, output):
        return _generate(model, prompt, min(tokens, len(output) - len(prompt)))
