"""JSON that is read while it comes. What is told of it is JSON to the last character, also where the model was careless."""

import json
import re
from collections.abc import Callable

from auraflux.serve.parse.text import Broken, Pieces, Text, Wait, gathered

# of lists and objects in each other
DEEPEST = 64
PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
SCALAR = re.compile(r"[-+.\w]*")
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}


def value(text: Text, depth: int = 0) -> Pieces[None]:
    """Read one value. Broken where there is none."""
    first = yield from text.peek()
    if depth > DEEPEST:
        raise Broken
    if first == "{":
        yield from _items(text, "}", depth, _member)
    elif first == "[":
        yield from _items(text, "]", depth, value)
    elif first == '"':
        yield from string(text)
    else:
        yield from _scalar(text)


def string(text: Text) -> Pieces[None]:
    """Read a string; characters that must be escaped and are not become so."""
    if not (yield from text.takes('"')):
        raise Broken
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
            raise Broken
        elif char < " ":
            yield json.dumps(text.take())[1:-1]


def _escape(text: Text) -> Pieces[None]:
    pair = yield from text.peek(2)
    if len(pair) < 2:
        raise Broken
    if pair[1] == "u":
        whole = yield from text.peek(6)
        if re.fullmatch(r"\\u[0-9a-fA-F]{4}", whole):
            yield text.take(6)
            return
    elif pair[1] in '"\\/bfnrt':
        yield text.take(2)
        return
    # an escape that JSON does not know is meant as a backslash
    text.take()
    yield "\\\\"


def _scalar(text: Text) -> Pieces[None]:
    taken = text.run(SCALAR)
    while (yield from text.peek()) and (more := text.run(SCALAR)):
        taken += more
    if taken not in LITERALS and not NUMBER.fullmatch(taken):
        raise Broken
    yield LITERALS.get(taken, taken)


def _items(text: Text, close: str, depth: int, item: Callable[[Text, int], Pieces[None]]) -> Pieces[None]:
    yield text.take()
    yield (yield from text.space())
    if (yield from text.takes(close)):
        yield close
        return
    while True:
        yield from item(text, depth + 1)
        yield (yield from text.space())
        char = yield from text.peek()
        if char not in (",", close):
            raise Broken
        yield text.take()
        if char == close:
            return
        yield (yield from text.space())


def _member(text: Text, depth: int) -> Pieces[None]:
    yield from string(text)
    yield (yield from text.space())
    if not (yield from text.takes(":")):
        raise Broken
    yield ":"
    yield (yield from text.space())
    yield from value(text, depth)


def read_string(text: Text) -> Wait[str]:
    """Read a string whole and give what it says."""
    return json.loads((yield from gathered(string(text))))


def parse(text: str) -> object:
    """Give what a JSON text says. Broken where it is none, or says what JSON cannot: NaN, infinities."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as err:
        raise Broken from err


def _refuse(constant: str) -> object:
    raise ValueError(constant)
