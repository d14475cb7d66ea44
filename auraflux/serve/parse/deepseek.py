"""Calls between special tokens, as DeepSeek writes them: V3 and R1 with a fence around the arguments, V3.1 without."""

from dataclasses import replace

from auraflux.serve.parse.calls import Calls, arguments, calls_until
from auraflux.serve.parse.plain import FENCE, answer
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.text import Broken, Steps, Text


def _token(words: str) -> str:
    """The tokens have bars of full width, and blocks for spaces."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


CALLS, CALLS_END = _token("tool calls begin"), _token("tool calls end")
CALL, CALL_END, SEPARATOR = _token("tool call begin"), _token("tool call end"), _token("tool sep")


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read one call behind its opening token."""
    name = yield from text.word()
    if not (yield from text.takes(SEPARATOR)):
        raise Broken
    yield from text.space()
    if (yield from text.peek()) != "{":
        # what stood there was its type
        name = yield from text.word()
        yield from text.space()
        yield from text.takes(f"{FENCE}json")
        yield from text.space()
    yield from arguments(text, calls, name)
    yield from text.space()
    yield from text.takes(FENCE)
    yield from text.space()
    yield from text.takes(CALL_END)


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {CALLS: calls_until(CALLS_END, CALL, call), CALL: call})


FENCED = Form(
    name=f"{CALL}function{SEPARATOR}",
    arguments=f"\n{FENCE}json\n",
    end=f"\n{FENCE}{CALL_END}",
    between="\n",
    opening=CALLS,
    closing=CALLS_END,
)
DEEPSEEK = Syntax("deepseek", read, (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR), form=FENCED)
DEEPSEEK_V31 = replace(
    DEEPSEEK,
    name="deepseek-v3.1",
    form=Form(name=CALL, arguments=SEPARATOR, end=CALL_END, between="", opening=CALLS, closing=CALLS_END),
)
