"""Calls as bare JSON without any content: one object, several, or a list, fenced or not."""

from auraflux.serve.parse.calls import CallParser, ToolCalls, call_object, parse_content, try_parse
from auraflux.serve.parse.text import NoMatch, Steps, TextStream

FENCE = "```"
FENCED = ("", "json", "tool_call", "tool_calls")


def bare_json_calls(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse calls at the start of the text."""
    yield from text.space()
    fenced = yield from text.accept(FENCE)
    if fenced:
        language = "" if (yield from text.peek()).isspace() else (yield from text.word())
        if language not in FENCED:
            raise NoMatch
        yield from text.space()
    if (yield from text.accept("[")):
        yield from call_list(text, calls, allow_unknown=False)
    else:
        yield from call_objects(text, calls, allow_unknown=False)
    if fenced:
        yield from text.space()
        yield from text.accept(FENCE)


def call_list(text: TextStream, calls: ToolCalls, allow_unknown: bool = True) -> Steps[None]:
    """Parse a list of calls, after its opening bracket."""
    while True:
        yield from text.space()
        yield from call_object(text, calls, allow_unknown)
        yield from text.space()
        if (yield from text.accept("]")):
            return
        if not (yield from text.accept(",")):
            raise NoMatch


def call_objects(text: TextStream, calls: ToolCalls, allow_unknown: bool = True) -> Steps[None]:
    """Parse consecutive calls, optionally separated by semicolons."""
    while True:
        yield from call_object(text, calls, allow_unknown)
        begin = text.hold()
        yield from text.space()
        if (yield from text.accept(";")):
            yield from text.space()
        if (yield from text.peek()) != "{":
            text.release(begin)
            return


def parse_answer(text: TextStream, calls: ToolCalls, parsers: dict[str, CallParser], *first: CallParser) -> Steps[None]:
    """Parse an answer: calls at its start (bare JSON, or one of `first`), then content with the calls of `parsers`."""
    if calls.tools:
        for parser in (bare_json_calls, *first):
            if (yield from try_parse(text, calls, parser)):
                break
    yield from parse_content(text, calls, parsers if calls.tools else {})


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse an answer of a model without a tool call syntax."""
    yield from parse_answer(text, calls, {})
