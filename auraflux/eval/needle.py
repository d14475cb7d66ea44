"""Facts hidden in a long text: does the model still know which belongs to which?

One text holds all facts, one at each depth. A fact's value is scored by its likelihood after the fact's beginning, beside the
values of the other facts, which stand in the same text: copying any value is not enough. Chance is 1 / facts.
"""

from dataclasses import dataclass

from auraflux.errors import InputError
from auraflux.eval.metrics import share
from auraflux.eval.reader import Reader
from auraflux.eval.text import Text, shared_tokens
from auraflux.run.tokenizer import Tokenizer

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
PLACES = ("Harbour Street", "the Old Mill", "the North Gate", "Lake House", "the Clock Tower")
WORDS = ("copper", "violet", "marble", "falcon", "timber")


@dataclass(frozen=True)
class Haystack:
    """A text with facts in it.

    prompt   the text
    endings  for each depth: every value after the beginning of that depth's fact
    shared   for each depth: tokens that its endings have in common
    right    for each depth: which ending is true
    """

    prompt: tuple[int, ...]
    endings: tuple[tuple[tuple[int, ...], ...], ...]
    shared: tuple[int, ...]
    right: tuple[int, ...]


def haystack(text: Text, tokenizer: Tokenizer, length: int, turn: int) -> Haystack:
    """Hide the facts in the beginning of a text, `length` tokens with them; `turn` says which value belongs to which place."""
    values = [WORDS[(i + turn) % len(WORDS)] for i in range(len(WORDS))]
    facts = [
        tokenizer.encode(f" {sentence(place)} {value}.", special=False) for place, value in zip(PLACES, values, strict=True)
    ]
    room = length - len(text.prefix) - sum(len(fact) for fact in facts)
    if room < 1:
        raise InputError(f"a needle test of {length} tokens has no room for text: its facts take {length - room}.")
    if room > len(text.ids):
        raise InputError(f"a needle test of {length} tokens needs {room} tokens of text, and {text.name} has {len(text.ids)}.")
    prompt, at = list(text.prefix), 0
    for depth, fact in zip(DEPTHS, facts, strict=True):
        upto = round(depth * room)
        prompt += [*text.ids[at:upto], *fact]
        at = upto
    prompt += text.ids[at:room]
    questions = [[tuple(tokenizer.encode(f" {sentence(place)} {word}", special=False)) for word in values] for place in PLACES]
    shared = [shared_tokens(endings) for endings in questions]
    return Haystack(tuple(prompt), tuple(map(tuple, questions)), tuple(shared), tuple(range(len(PLACES))))


def sentence(place: str) -> str:
    """The beginning of a fact."""
    return f"The secret word of {place} is"


def recall(reader: Reader, hidden: Haystack) -> list[float]:
    """Give, for each depth, the probability of the right value among all values."""
    found = []
    for endings, shared, right in zip(hidden.endings, hidden.shared, hidden.right, strict=True):
        found.append(share(reader.likelihoods(hidden.prompt, endings, shared), right))
    return found
