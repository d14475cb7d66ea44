"""Syntax of MiniMax M2: calls with arguments between tags, all calls inside one tag."""

from auraflux.serve.parse.argument_tags import Tags, arguments
from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.plain import parse_answer
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextStream

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
TAGS = Tags('<parameter name="', ('">',), "</parameter>")


def call_group(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse calls after the tag that opens the group."""
    count = calls.count
    while True:
        yield from text.space()
        if (yield from text.accept(INVOKE)):
            name = yield from text.word()
            if not (yield from text.accept('">')):
                raise NoMatch
            yield from arguments(text, calls, name, TAGS, (INVOKE_END,))
        elif (yield from text.accept(CLOSE)) or calls.count > count:
            return
        else:
            raise NoMatch


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {OPEN: call_group})


FORM = CallTemplate(
    name=INVOKE, arguments='">\n', end=INVOKE_END, between="\n", opening=f"{OPEN}\n", closing=f"\n{CLOSE}", argument_tags=TAGS
)
MINIMAX = Syntax("minimax", parse, (OPEN, CLOSE), call_template=FORM)
