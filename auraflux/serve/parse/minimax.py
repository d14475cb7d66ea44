"""The syntax of MiniMax M2: calls with arguments between tags, all of them within one."""

from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.plain import answer
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.tagged import Tags, arguments
from auraflux.serve.parse.text import Broken, Steps, Text

OPEN, CLOSE = "<minimax:tool_call>", "</minimax:tool_call>"
INVOKE, INVOKE_END = '<invoke name="', "</invoke>"
TAGS = Tags('<parameter name="', ('">',), "</parameter>")


def call_group(text: Text, calls: Calls) -> Steps[None]:
    """Read calls behind the tag that opens all of them."""
    count = calls.count
    while True:
        yield from text.space()
        if (yield from text.takes(INVOKE)):
            name = yield from text.word()
            if not (yield from text.takes('">')):
                raise Broken
            yield from arguments(text, calls, name, TAGS, (INVOKE_END,))
        elif (yield from text.takes(CLOSE)) or calls.count > count:
            return
        else:
            raise Broken


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {OPEN: call_group})


FORM = Form(name=INVOKE, arguments='">\n', end=INVOKE_END, between="\n", opening=f"{OPEN}\n", closing=f"\n{CLOSE}", tagged=TAGS)
MINIMAX = Syntax("minimax", read, (OPEN, CLOSE), form=FORM)
