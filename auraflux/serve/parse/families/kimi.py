"""Syntax of Kimi K2: calls between special tokens, each named by its tool and index."""

import re

from auraflux.serve.parse.calls import ToolCalls, arguments, calls_until
from auraflux.serve.parse.plain import parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextStream

CALLS, CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
CALL, CALL_END, ARGUMENT = "<|tool_call_begin|>", "<|tool_call_end|>", "<|tool_call_argument_begin|>"
ID = re.compile(r"[^\s<]*")


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse one call after its opening token, such as functions.now:0."""
    yield from text.space()
    name = (yield from text.word(ID)).removeprefix("functions.").partition(":")[0]
    yield from text.space()
    if not name or not (yield from text.accept(ARGUMENT)):
        raise NoMatch
    yield from text.space()
    yield from arguments(text, calls, name)
    yield from text.space()
    yield from text.accept(CALL_END)


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {CALLS: calls_until(CALLS_END, CALL, call), CALL: call})


# a second call would need another index, which a template cannot express
FORM = CallTemplate(name=f"{CALL}functions.", arguments=f":0{ARGUMENT}", end=CALL_END, opening=CALLS, closing=CALLS_END)
KIMI = Syntax("kimi", parse, (CALLS, CALLS_END, CALL, CALL_END, ARGUMENT), call_template=FORM)
