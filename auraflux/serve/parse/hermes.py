"""Calls as JSON between tags, as Hermes, Qwen2.5, Qwen3 and many others write them."""

from auraflux.serve.parse.calls import Calls, call_object
from auraflux.serve.parse.plain import answer
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.tagged import CLOSE, OPEN, function
from auraflux.serve.parse.text import Steps, Text


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read a call behind its opening tag; the tags in it show that it is written as Qwen3-Coder does."""
    yield from text.space()
    if (yield from text.peek()) == "{":
        yield from call_object(text, calls)
        yield from text.space()
        yield from text.takes(CLOSE)
    else:
        yield from function(text, calls)


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {OPEN: call})


HERMES = Syntax("hermes", read, (OPEN, CLOSE), form=Form(name=f'{OPEN}\n{{"name": "', end=f"}}\n{CLOSE}", between="\n"))
