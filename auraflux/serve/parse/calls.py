"""The calls of one answer: their numbers and ids, and the two shapes most syntaxes share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from auraflux.serve.deltas import CallArguments, CallBegin, Content
from auraflux.serve.parse import json_text
from auraflux.serve.parse.text import Broken, Steps, Text, Wait, gathered, told

ARGUMENTS = ("arguments", "parameters")
# what stands beside name and arguments in a call that is bare JSON
BESIDE = ("type", "id")


class Calls:
    """Begins calls, and knows the tools there are.

    tools  the JSON schemas of their arguments by name
    count  of calls begun
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None, new_id: Callable[[], str]):
        functions = [tool.get("function") or {} for tool in tools or ()]
        self.tools = {str(each.get("name")): _dict(each.get("parameters")) for each in functions}
        self.count = 0
        self._new_id = new_id

    def properties(self, name: str) -> dict[str, Any]:
        """Give the schemas of a tool's arguments by their names."""
        return _dict(self.tools.get(name, {}).get("properties"))

    def begin(self, name: str) -> CallBegin:
        self.count += 1
        return CallBegin(self.count - 1, self._new_id(), name)

    def arguments(self, text: str) -> CallArguments:
        return CallArguments(self.count - 1, text)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


Reader = Callable[[Text, Calls], Steps[None]]


def attempt(text: Text, calls: Calls, reader: Reader) -> Steps[bool]:
    """Read calls; where there turn out to be none, and none was told, read the text again as something else."""
    begin, count = text.hold(), calls.count
    try:
        yield from reader(text, calls)
    except Broken:
        if calls.count == count:
            text.release(begin)
            return False
    text.release()
    return True


def content(text: Text, calls: Calls, readers: Mapping[str, Reader]) -> Steps[None]:
    """Tell content up to the end, and where a marker stands the calls behind it, if they are calls."""
    while not calls.count or (yield from _more_than_space(text)):
        marker = yield from told(text.until(tuple(readers), trim=True), Content)
        while marker and not (yield from attempt(text, calls, readers[marker.lstrip()])):
            yield Content(marker)
            marker = yield from told(text.until(tuple(readers), trim=True), Content)
        if not marker:
            return


def _more_than_space(text: Text) -> Wait[bool]:
    """Whether anything but white space follows; that is taken only if not."""
    begin = text.hold()
    yield from text.space()
    more = yield from text.peek()
    text.release(begin if more else None)
    return bool(more)


def calls_until(end: str, opening: str, call: Reader) -> Reader:
    """Make a reader of calls behind the token that opens all of them: each has an opening of its own."""

    def read(text: Text, calls: Calls) -> Steps[None]:
        count = calls.count
        while True:
            yield from text.space()
            if (yield from text.takes(opening)):
                yield from call(text, calls)
            elif (yield from text.takes(end)) or calls.count > count:
                return
            else:
                raise Broken

    return read


def arguments(text: Text, calls: Calls, name: str) -> Steps[None]:
    """Read a call whose arguments come next, as a JSON object."""
    if (yield from text.peek()) != "{":
        raise Broken
    yield calls.begin(name)
    # what was told is not read again
    text.release()
    yield from told(json_text.value(text), calls.arguments)


def call_object(text: Text, calls: Calls, sure: bool = True) -> Steps[None]:
    """Read {"name": ..., "arguments": {...}}; where it is not sure to be a call, it must be one of a tool there is."""
    if not (yield from text.takes("{")):
        raise Broken
    name: str | None = None
    given: str | None = None
    begun = False
    while True:
        yield from text.space()
        key = yield from json_text.read_string(text)
        if not sure and key not in ("name", *ARGUMENTS, *BESIDE):
            raise Broken
        yield from text.space()
        if not (yield from text.takes(":")):
            raise Broken
        yield from text.space()
        if key == "name":
            name = yield from json_text.read_string(text)
            if not sure and name not in calls.tools:
                raise Broken
        if key in ARGUMENTS and name and not begun and (yield from text.peek()) == "{":
            begun = True
            yield from arguments(text, calls, name)
        elif key != "name":
            other = yield from gathered(json_text.value(text))
            given = other if key in ARGUMENTS else given
        yield from text.space()
        if (yield from text.takes("}")):
            break
        if not (yield from text.takes(",")):
            raise Broken
    if not begun:
        if not name or (given is None and not sure):
            raise Broken
        whole = _object(given)
        yield calls.begin(name)
        yield calls.arguments(whole)


def _object(given: str | None) -> str:
    """Arguments that were read whole, as a JSON object; some models write it into a string."""
    said = json_text.parse(given or "null")
    if isinstance(said, str):
        given = said.strip()
        said = json_text.parse(given or "null")
    if said is None:
        return "{}"
    if not isinstance(said, dict):
        raise Broken
    return given or "{}"
