"""DeepSeek's calls between special tokens: V3 and R1 with a fence around the arguments, V3.1 without."""

from dataclasses import replace

from auraflux.serve.parse.calls import ToolCalls, arguments, calls_until
from auraflux.serve.parse.plain import FENCE, parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextStream


def _token(words: str) -> str:
    """Spell a special token: full-width bars, and block characters for spaces."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


CALLS, CALLS_END = _token("tool calls begin"), _token("tool calls end")
CALL, CALL_END, SEPARATOR = _token("tool call begin"), _token("tool call end"), _token("tool sep")


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse one call after its opening token."""
    name = yield from text.word()
    if not (yield from text.accept(SEPARATOR)):
        raise NoMatch
    yield from text.space()
    if (yield from text.peek()) != "{":
        # the first word was the call's type
        name = yield from text.word()
        yield from text.space()
        yield from text.accept(f"{FENCE}json")
        yield from text.space()
    yield from arguments(text, calls, name)
    yield from text.space()
    yield from text.accept(FENCE)
    yield from text.space()
    yield from text.accept(CALL_END)


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {CALLS: calls_until(CALLS_END, CALL, call), CALL: call})


FENCED = CallTemplate(
    name=f"{CALL}function{SEPARATOR}",
    arguments=f"\n{FENCE}json\n",
    end=f"\n{FENCE}{CALL_END}",
    between="\n",
    opening=CALLS,
    closing=CALLS_END,
)
DEEPSEEK = Syntax("deepseek", parse, (CALLS, CALLS_END, CALL, CALL_END, SEPARATOR), call_template=FENCED)
DEEPSEEK_V31 = replace(
    DEEPSEEK,
    name="deepseek-v3.1",
    call_template=CallTemplate(name=CALL, arguments=SEPARATOR, end=CALL_END, between="", opening=CALLS, closing=CALLS_END),
)
