"""Calls with each argument between tags: Qwen3-Coder, Qwen3.5 and relatives, and with other tags GLM and MiniMax.

Strings are unquoted, other values are JSON; the tool's schema decides which.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from auraflux.serve.parse import json_text
from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.text import NoMatch, Steps, TextStream, collect, emit

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
KEY = re.compile(r'[^<>"\n]*')
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Tags:
    """Tags around an argument.

    before  before its name
    behind  after its name, with optional white space between the items
    end     after its value
    lines   whether values are on separate lines
    """

    before: str
    behind: tuple[str, ...]
    end: str
    lines: bool = False

    def opening(self, key: str) -> str:
        """Return the text before the value of `key`."""
        return self.before + key + "\n".join(self.behind) + ("\n" if self.lines else "")

    @property
    def closing(self) -> str:
        """Text after a value."""
        return ("\n" if self.lines else "") + self.end + "\n"


CODER_TAGS = Tags("<parameter=", (">",), "</parameter>", lines=True)


def function(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse a call from its function tag on."""
    if not (yield from text.accept(FUNCTION)):
        raise NoMatch
    yield from function_body(text, calls)


def function_body(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse a call from its name to its last tag."""
    name = yield from text.word()
    if not (yield from text.accept(">")):
        raise NoMatch
    # models sometimes leave the function tag open
    if (yield from arguments(text, calls, name, CODER_TAGS, (FUNCTION_END, CLOSE))) == FUNCTION_END:
        yield from text.space()
        yield from text.accept(CLOSE)


def arguments(text: TextStream, calls: ToolCalls, name: str, tags: Tags, ends: tuple[str, ...]) -> Steps[str]:
    """Parse a call's arguments and return the end tag that follows."""
    yield calls.begin(name)
    text.release()
    yield calls.arguments("{")
    separator = ""
    while True:
        yield from text.space()
        if (yield from text.accept(tags.before)):
            yield calls.arguments(separator)
            yield from _argument(text, calls, name, tags)
            separator = ", "
            continue
        for end in ends:
            if (yield from text.accept(end)):
                yield calls.arguments("}")
                return end
        raise NoMatch


def _argument(text: TextStream, calls: ToolCalls, name: str, tags: Tags) -> Steps[None]:
    key = yield from text.word(KEY)
    for part in tags.behind:
        yield from text.space()
        if not (yield from text.accept(part)):
            raise NoMatch
    if tags.lines:
        yield from text.accept("\n")
    yield calls.arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
    kinds = kinds_of(calls.properties(name).get(key.strip()), calls.tools.get(name, {}))
    value = text.until((f"\n{tags.end}", tags.end) if tags.lines else (tags.end,))
    if kinds == {"string"}:
        yield calls.arguments('"')
        if not (yield from emit(value, lambda chunk: calls.arguments(_quoted(chunk)[1:-1]))):
            raise NoMatch
        yield calls.arguments('"')
    else:
        yield calls.arguments(typed((yield from collect(value)), kinds))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def kinds_of(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not specify any."""
    if not isinstance(schema, dict) or depth > 8:
        return set()
    if "type" in schema:
        return {each for each in _list(schema["type"]) if isinstance(each, str)}
    if "const" in schema or "enum" in schema:
        return {KINDS[type(each)] for each in _list(schema.get("enum", [schema.get("const")])) if type(each) in KINDS}
    if isinstance(schema.get("$ref"), str):
        found: Any = root
        for part in schema["$ref"].removeprefix("#").strip("/").split("/"):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        return kinds_of(found, root, depth + 1)
    each = [kinds_of(one, root, depth + 1) for key in ("anyOf", "oneOf", "allOf") for one in _list(schema.get(key, []))]
    # one unspecified branch allows anything
    return set().union(*each) if all(each) else set()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def typed(raw: str, kinds: set[str]) -> str:
    """Return a tagged value as JSON: parsed if its type is allowed, else as a string."""
    stripped = raw.strip()
    literal = PYTHON.get(stripped, stripped)
    try:
        value = json_text.parse(literal)
    except NoMatch:
        return _quoted(raw)
    kind = KINDS[type(value)]
    allowed = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return literal if allowed or "string" not in kinds else _quoted(raw)
