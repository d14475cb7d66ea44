"""gpt-oss messages: the channel separates reasoning from content, a recipient makes a message a tool call."""

import re
from functools import partial

from auraflux.serve.chat.deltas import Content, Reasoning
from auraflux.serve.parse.calls import ToolCalls, arguments, try_parse
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import Steps, TextStream, collect, emit

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
PREFIX = "functions."


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse messages to the end of the text."""
    emitted: set[type] = set()
    while True:
        header = yield from _header(text)
        if not (yield from text.peek()):
            return
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", header)
        recipient = re.search(r"to=([^\s<]+)", header)
        delta: type[Content] | type[Reasoning] = Reasoning if channel and channel[1] == "analysis" else Content
        if calls.tools and recipient and recipient[1].startswith(PREFIX):
            name = recipient[1].removeprefix(PREFIX)
            if (yield from try_parse(text, calls, partial(_call, name=name))):
                continue
        if delta in emitted:
            yield delta("\n\n")
        emitted.add(delta)
        yield from emit(text.until(ENDS), delta)


def _header(text: TextStream) -> Steps[str]:
    """Consume the header of a message; "" if the text begins without one."""
    begin = text.hold()
    yield from text.space()
    for first in (START, CHANNEL, "to="):
        if (yield from text.accept(first)):
            text.release()
            return first + (yield from collect(text.until((MESSAGE,))))
    text.release(begin)
    return ""


def _call(text: TextStream, calls: ToolCalls, name: str) -> Steps[None]:
    yield from text.space()
    if (yield from text.peek()) in ("", "<"):
        yield calls.begin(name)
        yield calls.arguments("{}")
    else:
        yield from arguments(text, calls, name)
    yield from text.space()
    for end in ENDS:
        if (yield from text.accept(end)):
            return


HARMONY = Syntax(
    "harmony",
    parse,
    (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL),
    non_stop_tokens=(END,),
    call_template=CallTemplate(name=f"{CHANNEL}commentary to={PREFIX}", arguments=f" {CONSTRAIN}json{MESSAGE}", end=""),
    think_tags=(),
    reply_header=f"{START}assistant",
    think_end=END,
    reply_channels=(
        f"{CHANNEL}analysis{MESSAGE}",
        f"{END}{START}assistant{CHANNEL}final{MESSAGE}",
        f"{CHANNEL}final{MESSAGE}",
    ),
)
