"""Calls as JSON between tags: Hermes, Qwen2.5, Qwen3 and many others."""

from auraflux.serve.parse.argument_tags import CLOSE, OPEN, function
from auraflux.serve.parse.calls import ToolCalls, call_object
from auraflux.serve.parse.plain import parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import Steps, TextStream


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse a call after its opening tag; one that is not JSON is in Qwen3-Coder's syntax."""
    yield from text.space()
    if (yield from text.peek()) == "{":
        yield from call_object(text, calls)
        yield from text.space()
        yield from text.accept(CLOSE)
    else:
        yield from function(text, calls)


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {OPEN: call})


HERMES = Syntax(
    "hermes", parse, (OPEN, CLOSE), call_template=CallTemplate(name=f'{OPEN}\n{{"name": "', end=f"}}\n{CLOSE}", between="\n")
)
