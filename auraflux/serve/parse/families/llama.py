"""Calls of Llama 3.1 and later: bare JSON, or JSON or a Python call after <|python_tag|>."""

from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.plain import call_objects, parse_answer
from auraflux.serve.parse.python_calls import python_calls
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextStream, collect

PYTHON = "<|python_tag|>"


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse the calls after the tag."""
    yield from text.space()
    if (yield from text.peek()) == "{":
        yield from call_objects(text, calls)
        return
    name = yield from text.word()
    if name.removesuffix(".call") not in calls.tools or (yield from text.peek()) != "(":
        raise NoMatch
    yield from python_calls(name + (yield from collect(text.until(()))), calls)


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {PYTHON: call})


LLAMA = Syntax("llama", parse, (PYTHON,), call_template=CallTemplate(arguments='", "parameters": ', between="; "))
