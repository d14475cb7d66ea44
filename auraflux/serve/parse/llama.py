"""Calls as Llama 3.1 and later write them: bare JSON, or JSON or a Python call behind <|python_tag|>."""

from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.plain import answer, call_objects
from auraflux.serve.parse.python_calls import python_calls
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.text import Broken, Steps, Text, gathered

PYTHON = "<|python_tag|>"


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read what stands behind the tag."""
    yield from text.space()
    if (yield from text.peek()) == "{":
        yield from call_objects(text, calls)
        return
    name = yield from text.word()
    if name.removesuffix(".call") not in calls.tools or (yield from text.peek()) != "(":
        raise Broken
    yield from python_calls(name + (yield from gathered(text.until(()))), calls)


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {PYTHON: call})


LLAMA = Syntax("llama", read, (PYTHON,), form=Form(arguments='", "parameters": ', between="; "))
