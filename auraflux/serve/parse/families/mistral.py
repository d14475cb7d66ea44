"""Mistral's calls after [TOOL_CALLS]: a list of JSON objects, or in newer models name[ARGS]{...} each."""

import secrets
from dataclasses import replace

from auraflux.serve.parse.calls import ToolCalls, arguments
from auraflux.serve.parse.plain import call_list, call_objects, parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextStream
from auraflux.serve.parse.thinking import THINK

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
MISTRAL_THINK = ("[THINK]", "[/THINK]")


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse the calls after the marker."""
    yield from text.space()
    first = yield from text.peek()
    if first == "[":
        text.take()
        yield from call_list(text, calls)
    elif first == "{":
        yield from call_objects(text, calls)
    else:
        yield from _named(text, calls)


def _named(text: TextStream, calls: ToolCalls) -> Steps[None]:
    name = yield from text.word()
    if (yield from text.accept(CALL_ID)):
        yield from text.word()
    if not (yield from text.accept(ARGS)):
        raise NoMatch
    yield from text.space()
    yield from arguments(text, calls, name)


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {CALLS: call})


def short_id() -> str:
    """Return a tool call id as the templates require it: nine letters or digits."""
    return secrets.token_hex(5)[:9]


MISTRAL = Syntax(
    "mistral",
    parse,
    (CALLS, ARGS, CALL_ID),
    call_template=CallTemplate(opening=f"{CALLS}[", between=", ", closing="]"),
    think_tags=(THINK, MISTRAL_THINK),
    new_id=short_id,
)
MISTRAL_ARGS = replace(MISTRAL, name="mistral-args", call_template=CallTemplate(name=CALLS, arguments=ARGS, end="", between=""))
