"""The syntax of Kimi K2: calls between special tokens, each named by its tool and its number."""

import re

from auraflux.serve.parse.calls import Calls, arguments, calls_until
from auraflux.serve.parse.plain import answer
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.text import Broken, Steps, Text

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENT = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
ID = re.compile(r"[^\s<]*")


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read one call behind its opening token, such as functions.now:0."""
    yield from text.space()
    name = (yield from text.word(ID)).removeprefix("functions.").partition(":")[0]
    yield from text.space()
    if not name or not (yield from text.takes(ARGUMENT)):
        raise Broken
    yield from text.space()
    yield from arguments(text, calls, name)
    yield from text.space()
    yield from text.takes(CALL_END)


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {CALLS: calls_until(CALLS_END, CALL, call), CALL: call})


# the number of a second call would be another, which a form cannot say
FORM = Form(name=f"{CALL}functions.", arguments=f":0{ARGUMENT}", end=CALL_END, opening=CALLS, closing=CALLS_END)
KIMI = Syntax("kimi", read, (CALLS, CALLS_END, CALL, CALL_END, ARGUMENT), form=FORM)
