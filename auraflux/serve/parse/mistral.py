"""Calls behind [TOOL_CALLS]: a list of JSON objects, or, newer, each as name[ARGS]{...}."""

import secrets
from dataclasses import replace

from auraflux.serve.parse.calls import Calls, arguments
from auraflux.serve.parse.plain import answer, call_list, call_objects
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.text import Broken, Steps, Text
from auraflux.serve.parse.thinking import THINK

CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
THINK_ALOUD = ("[THINK]", "[/THINK]")


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read what stands behind the marker."""
    yield from text.space()
    first = yield from text.peek()
    if first == "[":
        text.take()
        yield from call_list(text, calls)
    elif first == "{":
        yield from call_objects(text, calls)
    else:
        yield from _named(text, calls)


def _named(text: Text, calls: Calls) -> Steps[None]:
    name = yield from text.word()
    if (yield from text.takes(CALL_ID)):
        yield from text.word()
    if not (yield from text.takes(ARGS)):
        raise Broken
    yield from text.space()
    yield from arguments(text, calls, name)


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {CALLS: call})


def short_id() -> str:
    """Make an id as its templates want them: nine letters or digits."""
    return secrets.token_hex(5)[:9]


MISTRAL = Syntax(
    "mistral",
    read,
    (CALLS, ARGS, CALL_ID),
    form=Form(opening=f"{CALLS}[", between=", ", closing="]"),
    think=(THINK, THINK_ALOUD),
    new_id=short_id,
)
MISTRAL_ARGS = replace(MISTRAL, name="mistral-args", form=Form(name=CALLS, arguments=ARGS, end="", between=""))
