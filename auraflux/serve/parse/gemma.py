"""Calls as Gemma writes them when told of tools: JSON, a list of Python calls, or such calls fenced as tool_code.

FunctionGemma has tokens for them: <start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>.
"""

import json
from collections.abc import Callable

from auraflux.serve.parse import json_text
from auraflux.serve.parse.calls import Calls
from auraflux.serve.parse.plain import FENCE, answer
from auraflux.serve.parse.python_calls import python_calls
from auraflux.serve.parse.syntax import Form, Syntax
from auraflux.serve.parse.text import Broken, Pieces, Steps, Text, gathered, told

TOOL_CODE = f"{FENCE}tool_code"
CALL, CALL_END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def python_list(text: Text, calls: Calls) -> Steps[None]:
    """Read an answer that is a list of calls and nothing else."""
    yield from text.space()
    if not (yield from text.takes("[")):
        raise Broken
    yield from text.space()
    name = yield from text.word()
    if name not in calls.tools or (yield from text.peek()) != "(":
        raise Broken
    yield from python_calls(f"[{name}" + (yield from gathered(text.until(()))), calls)


def tool_code(text: Text, calls: Calls) -> Steps[None]:
    """Read calls behind the opening of a fence."""
    yield from python_calls((yield from gathered(text.until((FENCE,)))), calls)


def call(text: Text, calls: Calls) -> Steps[None]:
    """Read a call behind FunctionGemma's token."""
    if not (yield from text.takes("call:")):
        raise Broken
    name = yield from text.word()
    if (yield from text.peek()) != "{":
        raise Broken
    yield calls.begin(name)
    yield from told(_value(text, 0), calls.arguments)
    yield from text.takes(CALL_END)


def _value(text: Text, depth: int) -> Pieces[None]:
    first = yield from text.peek()
    if depth > json_text.DEEPEST:
        raise Broken
    if first == "{":
        yield from _items(text, "}", depth, _member)
    elif first == "[":
        yield from _items(text, "]", depth, _value)
    elif (yield from text.takes(QUOTE)):
        yield json.dumps((yield from gathered(text.until((QUOTE,)))), ensure_ascii=False)
    else:
        yield from json_text.value(text)


def _items(text: Text, close: str, depth: int, item: Callable[[Text, int], Pieces[None]]) -> Pieces[None]:
    yield text.take()
    if (yield from text.takes(close)):
        yield close
        return
    while True:
        yield from item(text, depth + 1)
        if (yield from text.takes(close)):
            yield close
            return
        if not (yield from text.takes(",")):
            raise Broken
        yield ", "
        yield from text.space()


def _member(text: Text, depth: int) -> Pieces[None]:
    yield json.dumps((yield from text.word()), ensure_ascii=False)
    if not (yield from text.takes(":")):
        raise Broken
    yield ": "
    yield from _value(text, depth)


def read(text: Text, calls: Calls) -> Steps[None]:
    yield from answer(text, calls, {CALL: call, TOOL_CODE: tool_code}, python_list)


GEMMA = Syntax("gemma", read, (CALL, CALL_END, QUOTE), form=Form(arguments='", "parameters": '))
