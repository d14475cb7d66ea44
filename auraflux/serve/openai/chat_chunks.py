"""Chat Completions stream chunks.

Thousands are made per second, so the constant text of a stream is formatted once and only the deltas are escaped.
"""

import json
import time
from collections.abc import Callable
from json.encoder import encode_basestring as quoted
from typing import Any

from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.openai.logprobs import chat_logprob
from auraflux.tokenizer.tokenizer import Tokenizer


class Chunks:
    """Encoder of one choice's deltas.

    include_usage  whether a final chunk carries the usage, so that the others have null
    """

    def __init__(self, id: str, model: str, number: int, tokenizer: Tokenizer, include_usage: bool):
        self._tokenizer = tokenizer
        created = f'"created":{int(time.time())},"model":{quoted(model)}'
        self._open = f'data: {{"id":{quoted(id)},"object":"chat.completion.chunk",{created},"choices":['
        self._null = ',"usage":null' if include_usage else ""
        self._head = f'{self._open}{{"index":{number},"delta":{{'
        self._tail = f'}},"logprobs":null,"finish_reason":null}}]{self._null}}}\n\n'
        self._encoders: dict[type, Callable[[Any], str]] = {
            Content: lambda delta: f'"content":{quoted(delta.text)}',
            Reasoning: _reasoning,
            ToolCallBegin: _call_begin,
            ToolCallArguments: lambda delta: _call(delta.index, f'"function":{{"arguments":{quoted(delta.text)}}}'),
        }

    def first(self) -> str:
        """Return the first chunk."""
        return f'{self._head}"role":"assistant","content":""{self._tail}'

    def encode(self, deltas: list[Delta]) -> str:
        """Return the chunks of deltas that arrived together."""
        delta = deltas[0]
        if len(deltas) == 1 and type(delta) is Content:
            return f'{self._head}"content":{quoted(delta.text)}{self._tail}'
        parts, tail = [], self._tail
        for logprobs in deltas:
            if type(logprobs) is Logprobs:
                tail = self._logprobs_tail(logprobs)
        for delta in deltas:
            if encoder := self._encoders.get(type(delta)):
                parts.append(f"{self._head}{encoder(delta)}{tail}")
                # logprobs go with the first chunk of their text
                tail = self._tail
        if tail is not self._tail:
            parts.append(f'{self._head}"content":""{tail}')
        if type(deltas[-1]) is Finish:
            parts.append(self._end(deltas[-1].reason))
        return "".join(parts)

    def usage(self, usage: dict[str, Any], timings: dict[str, Any]) -> str:
        """Return the chunk with usage and timings."""
        return f'{self._open}],"usage":{json.dumps(usage)},"timings":{json.dumps(timings)}}}\n\n'

    def _end(self, reason: str) -> str:
        return f'{self._head}}},"logprobs":null,"finish_reason":"{reason}"}}]{self._null}}}\n\n'

    def _logprobs_tail(self, delta: Logprobs) -> str:
        content = json.dumps([chat_logprob(self._tokenizer, each) for each in delta.tokens], ensure_ascii=False)
        return f'}},"logprobs":{{"content":{content},"refusal":null}},"finish_reason":null}}]{self._null}}}\n\n'


def _reasoning(delta: Reasoning) -> str:
    text = quoted(delta.text)
    return f'"reasoning":{text},"reasoning_content":{text}'


def _call_begin(delta: ToolCallBegin) -> str:
    function = f'{{"name":{quoted(delta.name)},"arguments":""}}'
    return _call(delta.index, f'"id":{quoted(delta.id)},"type":"function","function":{function}')


def _call(index: int, rest: str) -> str:
    return f'"tool_calls":[{{"index":{index},{rest}}}]'
