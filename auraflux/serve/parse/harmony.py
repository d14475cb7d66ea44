"""The messages of gpt-oss: a channel says whether one is thought or said, a recipient that it is a call."""

import re
from functools import partial

from auraflux.serve.deltas import Content, Reasoning
from auraflux.serve.parse.calls import Calls, arguments, attempt
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.text import Steps, Text, gathered, told

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
END, RETURN, CALL = "<|end|>", "<|return|>", "<|call|>"
ENDS = (END, RETURN, CALL)
PREFIX = "functions."


def read(text: Text, calls: Calls) -> Steps[None]:
    """Read messages to the end of the text."""
    told_before: set[type] = set()
    while True:
        header = yield from _header(text)
        if not (yield from text.peek()):
            return
        channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", header)
        recipient = re.search(r"to=([^\s<]+)", header)
        say: type[Content] | type[Reasoning] = Reasoning if channel and channel[1] == "analysis" else Content
        if calls.tools and recipient and recipient[1].startswith(PREFIX):
            name = recipient[1].removeprefix(PREFIX)
            if (yield from attempt(text, calls, partial(_call, name=name))):
                continue
        if say in told_before:
            yield say("\n\n")
        told_before.add(say)
        yield from told(text.until(ENDS), say)


def _header(text: Text) -> Steps[str]:
    """Take what stands before a message; nothing where the text begins without."""
    begin = text.hold()
    yield from text.space()
    for first in (START, CHANNEL, "to="):
        if (yield from text.takes(first)):
            text.release()
            return first + (yield from gathered(text.until((MESSAGE,))))
    text.release(begin)
    return ""


def _call(text: Text, calls: Calls, name: str) -> Steps[None]:
    yield from text.space()
    if (yield from text.peek()) in ("", "<"):
        yield calls.begin(name)
        yield calls.arguments("{}")
    else:
        yield from arguments(text, calls, name)
    yield from text.space()
    for end in ENDS:
        if (yield from text.takes(end)):
            return


HARMONY = Syntax(
    "harmony",
    read,
    (START, CHANNEL, MESSAGE, CONSTRAIN, END, RETURN, CALL),
    goes_on=(END,),
    form=Form(name=f"{CHANNEL}commentary to={PREFIX}", arguments=f" {CONSTRAIN}json{MESSAGE}", end=""),
    think=(),
    begins=f"{START}assistant",
)
