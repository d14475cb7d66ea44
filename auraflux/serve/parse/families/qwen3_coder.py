"""Syntax of Qwen3-Coder, Qwen3-Next, Qwen3.5 and relatives."""

from auraflux.serve.parse.argument_tags import CLOSE, CODER_TAGS, FUNCTION, FUNCTION_END, OPEN, function_body
from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.families.hermes import call
from auraflux.serve.parse.plain import parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import Steps, TextStream


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    # models sometimes omit the tag around a function
    yield from parse_answer(text, calls, {OPEN: call, FUNCTION: function_body})


CODER = Syntax(
    "coder",
    parse,
    (OPEN, CLOSE),
    call_template=CallTemplate(
        name=f"{OPEN}\n{FUNCTION}", arguments=">\n", end=f"{FUNCTION_END}\n{CLOSE}", between="\n", argument_tags=CODER_TAGS
    ),
)
