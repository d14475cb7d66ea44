"""What guesses are worth: texts that repeat what they were given, and texts that do not, written with guesses and without."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from inspect import getsource

from auraflux.errors import ContextError
from auraflux.run import stops
from auraflux.run.language import LanguageModel
from auraflux.run.stats import Stats

LETTERS = 2400  # of what is repeated
BEGUN = 300  # of them that the prompt repeats already


@dataclass(frozen=True)
class Task:
    """Something to write; a temperature above 0 keeps a small model from going in circles."""

    name: str
    prompt: str
    temperature: float = 0.0


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
    """A document to quote, a file to rename a class in, a story and a question."""
    speech = (resources.files("auraflux.eval") / "texts" / "1862-lincoln.txt").read_text("utf-8")[:LETTERS]
    code = getsource(stops)[:LETTERS]
    again = code.replace("StopStrings", "Stops")[:BEGUN]
    return [
        Task("quote a document", f"The address:\n\n{speech}\n\nThe address once more:\n\n{speech[:BEGUN]}"),
        Task("edit code", f"```python\n{code}\n```\n\nWith StopStrings renamed to Stops:\n\n```python\n{again}"),
        Task("tell a story", "Once upon a time, there was a little girl who", 1.0),
        Task("explain", "The three primary colors are", 1.0),
    ]


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
            (_, stats, text), plain = found[True][-1], found[False]
            best, faster = (max(rate for rate, _, _ in found[guessing]) for guessing in (False, True))
            same = text == plain[-1][2]
            yield Gain(task.name, best, faster, stats.tokens_per_step, stats.drafted, stats.accepted, same)
    finally:
        scheduler.speculate(speculation)


def _write(model: LanguageModel, task: Task, tokens: int) -> tuple[float, Stats, list[int]]:
    assert model.tokenizer is not None, "text needs a tokenizer"
    ids = model.tokenizer.encode(task.prompt)
    if len(ids) + tokens > model.context:
        raise ContextError(f"a text of {len(ids) + tokens} tokens does not fit the context of {model.context}.")
    text = list(model.tokens(ids, max_tokens=tokens, temperature=task.temperature, seed=1, endless=True))
    return model.stats.decode_rate, model.stats, text
