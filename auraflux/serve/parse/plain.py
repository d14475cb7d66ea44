"""Calls that are the whole answer, as bare JSON: one object, several, or a list of them, fenced or not."""

from auraflux.serve.parse.calls import Calls, Reader, attempt, call_object, content
from auraflux.serve.parse.text import Broken, Steps, Text

FENCE = "```"
FENCED = ("", "json", "tool_call", "tool_calls")


def alone(text: Text, calls: Calls) -> Steps[None]:
    """Read calls at the beginning of an answer."""
    yield from text.space()
    fenced = yield from text.takes(FENCE)
    if fenced:
        language = "" if (yield from text.peek()).isspace() else (yield from text.word())
        if language not in FENCED:
            raise Broken
        yield from text.space()
    if (yield from text.takes("[")):
        yield from call_list(text, calls, sure=False)
    else:
        yield from call_objects(text, calls, sure=False)
    if fenced:
        yield from text.space()
        yield from text.takes(FENCE)


def call_list(text: Text, calls: Calls, sure: bool = True) -> Steps[None]:
    """Read calls in a list, behind its opening bracket."""
    while True:
        yield from text.space()
        yield from call_object(text, calls, sure)
        yield from text.space()
        if (yield from text.takes("]")):
            return
        if not (yield from text.takes(",")):
            raise Broken


def call_objects(text: Text, calls: Calls, sure: bool = True) -> Steps[None]:
    """Read calls that follow each other, maybe with semicolons between them."""
    while True:
        yield from call_object(text, calls, sure)
        begin = text.hold()
        yield from text.space()
        if (yield from text.takes(";")):
            yield from text.space()
        if (yield from text.peek()) != "{":
            text.release(begin)
            return


def answer(text: Text, calls: Calls, readers: dict[str, Reader], *first: Reader) -> Steps[None]:
    """Read an answer: calls as `first` may find them at its beginning, or else content and what `readers` find in it."""
    if calls.tools:
        for reader in (alone, *first):
            if (yield from attempt(text, calls, reader)):
                break
    yield from content(text, calls, readers if calls.tools else {})


def read(text: Text, calls: Calls) -> Steps[None]:
    """Read an answer of a model that has no syntax of its own."""
    yield from answer(text, calls, {})
