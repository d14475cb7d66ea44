"""Tool calls of one output: their indices and ids, and the two forms most syntaxes share."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from auraflux.serve.chat.deltas import Content, ToolCallArguments, ToolCallBegin
from auraflux.serve.parse import json_text
from auraflux.serve.parse.text import NoMatch, Steps, TextStream, Wait, collect, emit

ARGUMENTS = ("arguments", "parameters")
# other keys that a call in bare JSON may have
OTHER_KEYS = ("type", "id")


class ToolCalls:
    """Tool calls of one output, and the tools that may be called.

    tools  JSON schema of each tool's arguments, by tool name
    count  calls begun
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] | None, new_id: Callable[[], str]):
        functions = [tool.get("function") or {} for tool in tools or ()]
        self.tools = {str(each.get("name")): _dict(each.get("parameters")) for each in functions}
        self.count = 0
        self._new_id = new_id

    def properties(self, name: str) -> dict[str, Any]:
        """Return the schema of each argument of a tool, by name."""
        return _dict(self.tools.get(name, {}).get("properties"))

    def begin(self, name: str) -> ToolCallBegin:
        self.count += 1
        return ToolCallBegin(self.count - 1, self._new_id(), name)

    def arguments(self, text: str) -> ToolCallArguments:
        return ToolCallArguments(self.count - 1, text)


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


CallParser = Callable[[TextStream, ToolCalls], Steps[None]]


def try_parse(text: TextStream, calls: ToolCalls, parser: CallParser) -> Steps[bool]:
    """Return whether `parser` found calls; rewind the text if it failed before it emitted any."""
    begin, count = text.hold(), calls.count
    try:
        yield from parser(text, calls)
    except NoMatch:
        if calls.count == count:
            text.release(begin)
            return False
    text.release()
    return True


def parse_content(text: TextStream, calls: ToolCalls, parsers: Mapping[str, CallParser]) -> Steps[None]:
    """Parse content to the end of the text, with the calls behind each marker."""
    while not calls.count or (yield from _more_than_space(text)):
        marker = yield from emit(text.until(tuple(parsers), trim=True), Content)
        while marker and not (yield from try_parse(text, calls, parsers[marker.lstrip()])):
            yield Content(marker)
            marker = yield from emit(text.until(tuple(parsers), trim=True), Content)
        if not marker:
            return


def _more_than_space(text: TextStream) -> Wait[bool]:
    """Return whether more than white space follows; consume the white space if not."""
    begin = text.hold()
    yield from text.space()
    more = yield from text.peek()
    text.release(begin if more else None)
    return bool(more)


def calls_until(end: str, opening: str, call: CallParser) -> CallParser:
    """Make a parser of a section of calls: each begins with `opening`, `end` closes the section."""

    def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
        count = calls.count
        while True:
            yield from text.space()
            if (yield from text.accept(opening)):
                yield from call(text, calls)
            elif (yield from text.accept(end)) or calls.count > count:
                return
            else:
                raise NoMatch

    return parse


def arguments(text: TextStream, calls: ToolCalls, name: str) -> Steps[None]:
    """Parse a call whose arguments come next, as a JSON object."""
    if (yield from text.peek()) != "{":
        raise NoMatch
    yield calls.begin(name)
    # emitted deltas cannot be taken back
    text.release()
    yield from emit(json_text.value(text), calls.arguments)


def call_object(text: TextStream, calls: ToolCalls, allow_unknown: bool = True) -> Steps[None]:
    """Parse {"name": ..., "arguments": {...}}; without `allow_unknown`, the name must be that of a known tool."""
    if not (yield from text.accept("{")):
        raise NoMatch
    name: str | None = None
    buffered: str | None = None
    begun = False
    while True:
        yield from text.space()
        key = yield from json_text.read_string(text)
        if not allow_unknown and key not in ("name", *ARGUMENTS, *OTHER_KEYS):
            raise NoMatch
        yield from text.space()
        if not (yield from text.accept(":")):
            raise NoMatch
        yield from text.space()
        if key == "name":
            name = yield from json_text.read_string(text)
            if not allow_unknown and name not in calls.tools:
                raise NoMatch
        if key in ARGUMENTS and name and not begun and (yield from text.peek()) == "{":
            begun = True
            yield from arguments(text, calls, name)
        elif key != "name":
            other = yield from collect(json_text.value(text))
            buffered = other if key in ARGUMENTS else buffered
        yield from text.space()
        if (yield from text.accept("}")):
            break
        if not (yield from text.accept(",")):
            raise NoMatch
    if not begun:
        if not name or (buffered is None and not allow_unknown):
            raise NoMatch
        complete = _object(buffered)
        yield calls.begin(name)
        yield calls.arguments(complete)


def _object(given: str | None) -> str:
    """Return complete arguments as a JSON object; some models wrap it in a string."""
    value = json_text.parse(given or "null")
    if isinstance(value, str):
        given = value.strip()
        value = json_text.parse(given or "null")
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise NoMatch
    return given or "{}"
