"""Syntax of GLM 4.5 and later: a call's name, then its arguments as pairs of tags."""

from auraflux.serve.parse.argument_tags import CLOSE, OPEN, Tags, arguments
from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.plain import parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextStream

KEY, VALUE = "<arg_key>", "<arg_value>"
TAGS = Tags(KEY, ("</arg_key>", VALUE), "</arg_value>")


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse a call after its opening tag."""
    yield from text.space()
    name = yield from text.word()
    begin = text.hold()
    yield from text.space()
    # without a tag, any word could be a name
    if not ((yield from text.accept(KEY)) or (yield from text.accept(CLOSE))):
        raise NoMatch
    text.release(begin)
    yield from arguments(text, calls, name, TAGS, (CLOSE,))


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {OPEN: call})


TOKENS = (OPEN, CLOSE, KEY, "</arg_key>", VALUE, "</arg_value>")
GLM = Syntax(
    "glm", parse, TOKENS, call_template=CallTemplate(name=OPEN, arguments="\n", end=CLOSE, between="\n", argument_tags=TAGS)
)
