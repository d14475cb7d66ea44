"""Calls with each argument between tags, as Qwen3-Coder, Qwen3.5 and their like write them, and GLM and MiniMax with others.

Strings stand there as they are, other values as JSON: the tool's schema says which is which.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from auraflux.serve.parse import json_text
from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.text import Broken, Steps, Text, gathered, told

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
KEY = re.compile(r'[^<>"\n]*')
KINDS = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object", type(None): "null"}
PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class Tags:
    """What stands around an argument.

    before  its name
    behind  its name, maybe with white space between the parts
    end     of its value
    lines   whether a value stands on lines of its own
    """

    before: str
    behind: tuple[str, ...]
    end: str
    lines: bool = False

    def opening(self, key: str) -> str:
        """What is written before a value."""
        return self.before + key + "\n".join(self.behind) + ("\n" if self.lines else "")

    @property
    def closing(self) -> str:
        """What is written behind a value."""
        return ("\n" if self.lines else "") + self.end + "\n"


CODER_TAGS = Tags("<parameter=", (">",), "</parameter>", lines=True)


def function(text: Text, calls: Calls) -> Steps[None]:
    """Read a call from its function tag on."""
    if not (yield from text.takes(FUNCTION)):
        raise Broken
    yield from named(text, calls)


def named(text: Text, calls: Calls) -> Steps[None]:
    """Read a call from its name on, to the last tag that belongs to it."""
    name = yield from text.word()
    if not (yield from text.takes(">")):
        raise Broken
    # the second is behind a function tag that was not closed
    if (yield from arguments(text, calls, name, CODER_TAGS, (FUNCTION_END, CLOSE))) == FUNCTION_END:
        yield from text.space()
        yield from text.takes(CLOSE)


def arguments(text: Text, calls: Calls, name: str, tags: Tags, ends: tuple[str, ...]) -> Steps[str]:
    """Read a call's arguments and one of the ends behind them, which is returned."""
    yield calls.begin(name)
    text.release()
    yield calls.arguments("{")
    separator = ""
    while True:
        yield from text.space()
        if (yield from text.takes(tags.before)):
            yield calls.arguments(separator)
            yield from _argument(text, calls, name, tags)
            separator = ", "
            continue
        for end in ends:
            if (yield from text.takes(end)):
                yield calls.arguments("}")
                return end
        raise Broken


def _argument(text: Text, calls: Calls, name: str, tags: Tags) -> Steps[None]:
    key = yield from text.word(KEY)
    for part in tags.behind:
        yield from text.space()
        if not (yield from text.takes(part)):
            raise Broken
    if tags.lines:
        yield from text.takes("\n")
    yield calls.arguments(f"{json.dumps(key.strip(), ensure_ascii=False)}: ")
    kinds = kinds_of(calls.properties(name).get(key.strip()), calls.tools.get(name, {}))
    value = text.until((f"\n{tags.end}", tags.end) if tags.lines else (tags.end,))
    if kinds == {"string"}:
        yield calls.arguments('"')
        if not (yield from told(value, lambda piece: calls.arguments(_quoted(piece)[1:-1]))):
            raise Broken
        yield calls.arguments('"')
    else:
        yield calls.arguments(typed((yield from gathered(value)), kinds))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def kinds_of(schema: Any, root: dict[str, Any], depth: int = 0) -> set[str]:
    """The JSON types a schema allows; none where it does not say."""
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
    # where one of them does not say, anything may be meant
    return set().union(*each) if all(each) else set()


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def typed(raw: str, kinds: set[str]) -> str:
    """Give the JSON of a value between tags: what it says as JSON if its type is allowed, or else a string."""
    written = raw.strip()
    written = PYTHON.get(written, written)
    try:
        said = json_text.parse(written)
    except Broken:
        return _quoted(raw)
    kind = KINDS[type(said)]
    allowed = not kinds or kind in kinds or (kind == "integer" and "number" in kinds)
    return written if allowed or "string" not in kinds else _quoted(raw)
