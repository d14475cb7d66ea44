"""A chat's answer spelled as OpenAI's chunks.

Thousands are made each second, so what does not change in a stream is spelled once and only the text is escaped.
"""

import json
import time
from collections.abc import Callable
from json.encoder import encode_basestring as quoted
from typing import Any

from auraflux.run.tokenizer import Tokenizer
from auraflux.serve.deltas import CallArguments, CallBegin, Content, Delta, Finish, Logprobs, Reasoning
from auraflux.serve.logprobs import spelled


class Chunks:
    """Spells what comes of one choice.

    told   whether usage comes in a chunk of its own at the end, so that the others say null
    """

    def __init__(self, id: str, model: str, number: int, tokenizer: Tokenizer, told: bool):
        self._tokenizer = tokenizer
        created = f'"created":{int(time.time())},"model":{quoted(model)}'
        self._open = f'data: {{"id":{quoted(id)},"object":"chat.completion.chunk",{created},"choices":['
        self._null = ',"usage":null' if told else ""
        self._head = f'{self._open}{{"index":{number},"delta":{{'
        self._tail = f'}},"logprobs":null,"finish_reason":null}}]{self._null}}}\n\n'
        self._spellings: dict[type, Callable[[Any], str]] = {
            Content: lambda delta: f'"content":{quoted(delta.text)}',
            Reasoning: _reasoning,
            CallBegin: _call_begin,
            CallArguments: lambda delta: _call(delta.index, f'"function":{{"arguments":{quoted(delta.text)}}}'),
        }

    def begin(self) -> str:
        """Spell the first chunk."""
        return f'{self._head}"role":"assistant","content":""{self._tail}'

    def spell(self, deltas: list[Delta]) -> str:
        """Spell what came together."""
        delta = deltas[0]
        if len(deltas) == 1 and type(delta) is Content:
            return f'{self._head}"content":{quoted(delta.text)}{self._tail}'
        parts, tail = [], self._tail
        for scores in deltas:
            if type(scores) is Logprobs:
                tail = self._scored(scores)
        for delta in deltas:
            if spell := self._spellings.get(type(delta)):
                parts.append(f"{self._head}{spell(delta)}{tail}")
                # probabilities go with the first part of the text they made
                tail = self._tail
        if tail is not self._tail:
            parts.append(f'{self._head}"content":""{tail}')
        if type(deltas[-1]) is Finish:
            parts.append(self._end(deltas[-1].reason))
        return "".join(parts)

    def usage(self, usage: dict[str, Any], timings: dict[str, Any]) -> str:
        """Spell the chunk that tells what the answers took."""
        return f'{self._open}],"usage":{json.dumps(usage)},"timings":{json.dumps(timings)}}}\n\n'

    def _end(self, reason: str) -> str:
        return f'{self._head}}},"logprobs":null,"finish_reason":"{reason}"}}]{self._null}}}\n\n'

    def _scored(self, delta: Logprobs) -> str:
        content = json.dumps([spelled(self._tokenizer, each) for each in delta.scored], ensure_ascii=False)
        return f'}},"logprobs":{{"content":{content},"refusal":null}},"finish_reason":null}}]{self._null}}}\n\n'


def _reasoning(delta: Reasoning) -> str:
    text = quoted(delta.text)
    return f'"reasoning":{text},"reasoning_content":{text}'


def _call_begin(delta: CallBegin) -> str:
    function = f'{{"name":{quoted(delta.name)},"arguments":""}}'
    return _call(delta.index, f'"id":{quoted(delta.id)},"type":"function","function":{function}')


def _call(index: int, rest: str) -> str:
    return f'"tool_calls":[{{"index":{index},{rest}}}]'
