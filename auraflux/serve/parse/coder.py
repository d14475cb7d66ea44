"""The syntax of Qwen3-Coder, Qwen3-Next, Qwen3.5 and their like."""

from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.hermes import call
from auraflux.serve.parse.plain import answer
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.tagged import CLOSE, CODER_TAGS, FUNCTION, FUNCTION_END, OPEN, named
from auraflux.serve.parse.text import Steps, Text


def read(text: Text, calls: Calls) -> Steps[None]:
    # the tag around a function is sometimes forgotten
    yield from answer(text, calls, {OPEN: call, FUNCTION: named})


CODER = Syntax(
    "coder",
    read,
    (OPEN, CLOSE),
    form=Form(name=f"{OPEN}\n{FUNCTION}", arguments=">\n", end=f"{FUNCTION_END}\n{CLOSE}", between="\n", tagged=CODER_TAGS),
)
