"""Random JSON schemas, and random text that a grammar allows."""

import random
from collections.abc import Callable
from typing import Any

import torch

from auraflux.tokenizer.grammar import GrammarCompiler
from auraflux.tokenizer.tokenizer import Tokenizer

WORDS = ["a", "city", "größe", "x-1", 'q"t', "n\\m", "two words"]
# tokens after which the walk heads for the end
LONG = 120


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema; nested ones are simpler."""
    simple: list[Callable[[random.Random], dict[str, Any]]] = [_string, _number, _choice]
    made = rng.choice(simple if depth > 2 else [*simple, _array, _array, _object, _object, _any_of, _tree])
    return made(rng) if made in simple else made(rng, depth)  # type: ignore[call-arg]


def _string(rng: random.Random) -> dict[str, Any]:
    more: list[dict[str, Any]] = [
        {},
        {"minLength": rng.randint(1, 5), "maxLength": rng.randint(5, 9)},
        {"pattern": rng.choice(["^[a-z]{2,4}$", "^x", "[0-9]+-[0-9]", "^(ab|cd)*$"])},
        {"format": rng.choice(["date", "time", "date-time", "uuid", "email", "ipv4"])},
    ]
    return {"type": "string", **rng.choice(more)}


def _number(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-1000, 1000)
    more: list[dict[str, Any]] = [
        {},
        {"minimum": low, "maximum": low + rng.randint(0, 5000)},
        {"exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(2, 30)},
    ]
    return {"type": rng.choice(["integer", "number"]), **rng.choice(more)}


def _choice(rng: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"enum": [*rng.sample(WORDS, 3), 1, None, True]},
        {"const": {"a": [1, "b"]}},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {},
    ]
    return rng.choice(kinds)


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    least = rng.randint(0, 2)
    more: list[dict[str, Any]] = [
        {"items": random_schema(rng, depth + 1), "minItems": least, "maxItems": least + rng.randint(0, 2)},
        {"prefixItems": [random_schema(rng, depth + 1) for _ in range(2)], "items": False, "minItems": 1},
    ]
    return {"type": "array", **rng.choice(more)}


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(0, 4))
    made = {
        "type": "object",
        "properties": {name: random_schema(rng, depth + 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
    }
    more: list[dict[str, Any]] = [{}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}}]
    return {**made, **rng.choice(more)}


def _any_of(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}


def _tree(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth:
        return _object(rng, depth)
    node = {
        "type": "object",
        "properties": {"value": random_schema(rng, 2), "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def short_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random schema whose texts are all short, so that also a random model ends them."""
    kind = rng.choice(["string", "integer", "boolean", "enum"] if depth > 1 else ["object", "object", "array"])
    if kind == "string":
        return {"type": "string", "maxLength": rng.randint(1, 6)}
    if kind == "integer":
        return {"type": "integer", "minimum": rng.randint(-99, 0), "maximum": rng.randint(1, 999)}
    if kind == "boolean":
        return {"type": "boolean"}
    if kind == "enum":
        return {"enum": [*rng.sample(WORDS, 2), 1, None]}
    if kind == "array":
        return {"type": "array", "items": short_schema(rng, depth + 1), "maxItems": 2}
    names = rng.sample(WORDS, rng.randint(1, 3))
    properties = {name: short_schema(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


class Walker:
    """Generator of random text under a grammar."""

    def __init__(self, tokenizer: Tokenizer, ends: tuple[int, ...]):
        self.tokenizer, self.ends = tokenizer, ends
        self._grammars = GrammarCompiler(tokenizer, tokenizer.vocab_size, ends)
        # closing tokens, most effective first; inside a string only a quote closes
        self._quote, self._letter, *self._closing = (tokenizer.encode(text, special=False)[0] for text in '"z}]":')
        self._ink = {token for token in range(tokenizer.vocab_size) if tokenizer.piece(token).strip()}

    def walk(self, grammar: str, rng: random.Random, most: int = 400, last: tuple[int, ...] = ()) -> str | None:
        """Return random text that the grammar allows, or None if it did not end in time; `last` are further closing tokens."""
        matcher, text = self._grammars.matcher(grammar), []
        for step in range(most):
            if matcher.done:
                break
            bits = matcher.mask().view(torch.uint8)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1
            allowed = bits.flatten().nonzero().flatten().tolist()
            token = self._next(allowed, last, rng) if step > LONG else rng.choice(allowed)
            matcher.take(token)
            if token in self.ends:
                break
            text.append(token)
        else:
            return None
        return self.tokenizer.decode(text, special=True)

    def _next(self, allowed: list[int], last: tuple[int, ...], rng: random.Random) -> int:
        """Return the best closing token, else a random one that is not white space."""
        closing = [self._quote] if self._letter in allowed else self._closing
        closing = [token for token in (*self.ends, *last, *closing) if token in allowed]
        return closing[0] if closing else rng.choice([token for token in allowed if token in self._ink] or allowed)
