"""The syntax of GLM 4.5 and its successors: a call's name, then its arguments as pairs of tags."""

from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.plain import answer
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.tagged import CLOSE, OPEN, Tags, arguments
from auraflux.serve.parse.text import Broken, Steps, Text

KEY, VALUE = "<arg_key>", "<arg_value>"
TAGS = Tags(KEY, ("</arg_key>", VALUE), "</arg_value>")


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read a call behind its opening tag."""
    yield from text.space()
    name = yield from text.word()
    begin = text.hold()
    yield from text.space()
    # a name alone may be any word
    if not ((yield from text.takes(KEY)) or (yield from text.takes(CLOSE))):
        raise Broken
    text.release(begin)
    yield from arguments(text, calls, name, TAGS, (CLOSE,))


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {OPEN: call})


MARKS = (OPEN, CLOSE, KEY, "</arg_key>", VALUE, "</arg_value>")
GLM = Syntax("glm", read, MARKS, form=Form(name=OPEN, arguments="\n", end=CLOSE, between="\n", tagged=TAGS))
