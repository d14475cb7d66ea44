"""Needle test: recall of facts hidden in a long context.

A context holds all facts, one at each depth. The likelihood of a fact's value after its beginning is compared with the values
of the other facts, which are in the same context, so copying any value is not enough. Chance is 1 / facts.
"""

from dataclasses import dataclass

from auraflux.errors import InputError
from auraflux.eval.metrics import probability_among
from auraflux.eval.scorer import Scorer
from auraflux.eval.text import Text, shared_tokens
from auraflux.tokenizer.tokenizer import Tokenizer

DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)
PLACES = ("Harbour Street", "the Old Mill", "the North Gate", "Lake House", "the Clock Tower")
WORDS = ("copper", "violet", "marble", "falcon", "timber")


@dataclass(frozen=True)
class Haystack:
    """A context with hidden facts.

    prompt   the context
    endings  for each depth: the fact's beginning followed by each value
    shared   for each depth: number of leading tokens that its endings share
    right    for each depth: index of the right ending
    """

    prompt: tuple[int, ...]
    endings: tuple[tuple[tuple[int, ...], ...], ...]
    shared: tuple[int, ...]
    right: tuple[int, ...]


def haystack(text: Text, tokenizer: Tokenizer, length: int, rotation: int) -> Haystack:
    """Hide the facts in the beginning of a text, `length` tokens in total; `rotation` shifts the values among the places."""
    values = [WORDS[(i + rotation) % len(WORDS)] for i in range(len(WORDS))]
    facts = [
        tokenizer.encode(f" {sentence(place)} {value}.", special=False) for place, value in zip(PLACES, values, strict=True)
    ]
    room = length - len(text.prefix) - sum(len(fact) for fact in facts)
    if room < 1:
        raise InputError(f"a needle test of {length} tokens has no room for text: its facts need {length - room}.")
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
    """Return the beginning of a fact."""
    return f"The secret word of {place} is"


def recall(scorer: Scorer, hidden: Haystack) -> list[float]:
    """Return, for each depth, the probability of the right value among all values."""
    found = []
    for endings, shared, right in zip(hidden.endings, hidden.shared, hidden.right, strict=True):
        found.append(probability_among(scorer.likelihoods(hidden.prompt, endings, shared), right))
    return found
