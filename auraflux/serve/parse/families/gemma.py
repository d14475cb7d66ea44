"""Gemma's calls: JSON, a list of Python calls, or Python calls fenced as tool_code.

FunctionGemma has special tokens: <start_function_call>call:NAME{key:<escape>text<escape>,other:1}<end_function_call>.
"""

import json
from collections.abc import Callable

from auraflux.serve.parse import json_text
from auraflux.serve.parse.calls import ToolCalls
from auraflux.serve.parse.plain import FENCE, parse_answer
from auraflux.serve.parse.python_calls import python_calls
from auraflux.serve.parse.syntax import CallTemplate, Syntax
from auraflux.serve.parse.text import NoMatch, Steps, TextChunks, TextStream, collect, emit

TOOL_CODE = f"{FENCE}tool_code"
CALL, CALL_END, QUOTE = "<start_function_call>", "<end_function_call>", "<escape>"


def python_list(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse an answer that is only a list of calls."""
    yield from text.space()
    if not (yield from text.accept("[")):
        raise NoMatch
    yield from text.space()
    name = yield from text.word()
    if name not in calls.tools or (yield from text.peek()) != "(":
        raise NoMatch
    yield from python_calls(f"[{name}" + (yield from collect(text.until(()))), calls)


def tool_code(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse calls after the opening of a fence."""
    yield from python_calls((yield from collect(text.until((FENCE,)))), calls)


def call(text: TextStream, calls: ToolCalls) -> Steps[None]:
    """Parse a call after FunctionGemma's token."""
    if not (yield from text.accept("call:")):
        raise NoMatch
    name = yield from text.word()
    if (yield from text.peek()) != "{":
        raise NoMatch
    yield calls.begin(name)
    yield from emit(_value(text, 0), calls.arguments)
    yield from text.accept(CALL_END)


def _value(text: TextStream, depth: int) -> TextChunks[None]:
    first = yield from text.peek()
    if depth > json_text.DEEPEST:
        raise NoMatch
    if first == "{":
        yield from _items(text, "}", depth, _member)
    elif first == "[":
        yield from _items(text, "]", depth, _value)
    elif (yield from text.accept(QUOTE)):
        yield json.dumps((yield from collect(text.until((QUOTE,)))), ensure_ascii=False)
    else:
        yield from json_text.value(text)


def _items(text: TextStream, close: str, depth: int, item: Callable[[TextStream, int], TextChunks[None]]) -> TextChunks[None]:
    yield text.take()
    if (yield from text.accept(close)):
        yield close
        return
    while True:
        yield from item(text, depth + 1)
        if (yield from text.accept(close)):
            yield close
            return
        if not (yield from text.accept(",")):
            raise NoMatch
        yield ", "
        yield from text.space()


def _member(text: TextStream, depth: int) -> TextChunks[None]:
    yield json.dumps((yield from text.word()), ensure_ascii=False)
    if not (yield from text.accept(":")):
        raise NoMatch
    yield ": "
    yield from _value(text, depth)


def parse(text: TextStream, calls: ToolCalls) -> Steps[None]:
    yield from parse_answer(text, calls, {CALL: call, TOOL_CODE: tool_code}, python_list)


GEMMA = Syntax("gemma", parse, (CALL, CALL_END, QUOTE), call_template=CallTemplate(arguments='", "parameters": '))
