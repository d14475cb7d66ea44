"""Streaming JSON parser. Its output is valid JSON even where the model's is not quite."""

import json
import re
from collections.abc import Callable

from auraflux.serve.parse.text import NoMatch, TextChunks, TextStream, Wait, collect

# nesting of lists and objects
DEEPEST = 64
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"[-+.\w]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def value(text: TextStream, depth: int = 0) -> TextChunks[None]:
    """Parse one value; raise NoMatch if there is none."""
    first = yield from text.peek()
    if depth > DEEPEST:
        raise NoMatch
    if first == "{":
        yield from _items(text, "}", depth, _member)
    elif first == "[":
        yield from _items(text, "]", depth, value)
    elif first == '"':
        yield from string(text)
    else:
        yield from _scalar(text)


def string(text: TextStream) -> TextChunks[None]:
    """Parse a string; escape control characters that the model left unescaped."""
    if not (yield from text.accept('"')):
        raise NoMatch
    yield '"'
    while True:
        yield text.run(PLAIN)
        char = yield from text.peek()
        if char == '"':
            yield text.take()
            return
        if char == "\\":
            yield from _escape(text)
        elif not char:
            raise NoMatch
        elif char < " ":
            yield json.dumps(text.take())[1:-1]


def _escape(text: TextStream) -> TextChunks[None]:
    pair = yield from text.peek(2)
    if len(pair) < 2:
        raise NoMatch
    if pair[1] == "u":
        escape = yield from text.peek(6)
        if re.fullmatch(r"\\u[0-9a-fA-F]{4}", escape):
            yield text.take(6)
            return
    elif pair[1] in '"\\/bfnrt':
        yield text.take(2)
        return
    # an escape unknown to JSON is a literal backslash
    text.take()
    yield "\\\\"


def _scalar(text: TextStream) -> TextChunks[None]:
    taken = text.run(SCALAR)
    while (yield from text.peek()) and (more := text.run(SCALAR)):
        taken += more
    if taken not in LITERALS and not NUMBER.fullmatch(taken):
        raise NoMatch
    yield LITERALS.get(taken, taken)


def _items(text: TextStream, close: str, depth: int, item: Callable[[TextStream, int], TextChunks[None]]) -> TextChunks[None]:
    yield text.take()
    yield (yield from text.space())
    if (yield from text.accept(close)):
        yield close
        return
    while True:
        yield from item(text, depth + 1)
        yield (yield from text.space())
        char = yield from text.peek()
        if char not in (",", close):
            raise NoMatch
        yield text.take()
        if char == close:
            return
        yield (yield from text.space())


def _member(text: TextStream, depth: int) -> TextChunks[None]:
    yield from string(text)
    yield (yield from text.space())
    if not (yield from text.accept(":")):
        raise NoMatch
    yield ":"
    yield (yield from text.space())
    yield from value(text, depth)


def read_string(text: TextStream) -> Wait[str]:
    """Parse a complete string and return its value."""
    return json.loads((yield from collect(string(text))))


def parse(text: str) -> object:
    """Return the value of a JSON text; raise NoMatch if it is invalid, or has NaN or infinities."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as err:
        raise NoMatch from err


def _refuse(constant: str) -> object:
    raise ValueError(constant)
