"""/v1/completions: texts that go on."""

import json
import time
from collections.abc import AsyncIterator
from json.encoder import encode_basestring as quoted
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from auraflux.errors import InputError
from auraflux.serve.answer import Answer
from auraflux.serve.bodies import Completion
from auraflux.serve.body import read_body
from auraflux.serve.chat import failed
from auraflux.serve.chat_ask import to_format, to_sampling
from auraflux.serve.deltas import Content, Delta, Finish, Logprobs
from auraflux.serve.failures import check_finish
from auraflux.serve.guard import caller
from auraflux.serve.limits import at_most
from auraflux.serve.logprobs import spelled_lists
from auraflux.serve.operation import Operation
from auraflux.serve.schema import CompletionRequest
from auraflux.serve.service import Service
from auraflux.serve.stream import DONE, EventStream, attended, merged
from auraflux.serve.usage import timings_of, usage_of

# OpenAI's default; clients that want more say so
MAX_TOKENS = 16
Prompt = str | list[int]


def routes(service: Service) -> list[Route]:
    """Give the route of completions."""

    async def complete(request: Request) -> Response:
        asked = await read_body(request, CompletionRequest, service.limits)
        service.check_ready()
        service.check_model(asked.model)
        _check(asked)
        prompts, count = _prompts(asked), asked.n or 1
        at_most("prompt", len(prompts), service.limits.prompts)
        sampling = to_sampling(asked, max_tokens=asked.max_tokens or MAX_TOKENS, logprobs=asked.logprobs)
        format = to_format(asked.response_format, asked.grammar)
        user = caller(request, asked.user)
        echoes = _echoes(service, prompts) if asked.echo else None
        answers = await service.complete(prompts, sampling, format=format, count=count, user=user)
        writing = _Writing(service, answers, count, echoes)
        if asked.stream:
            told = bool(asked.stream_options and asked.stream_options.include_usage)
            return EventStream(writing.stream(told), answers, failed, service.limits.idle_s)
        body = await attended(request.receive, writing.whole(), answers)
        # nobody reads what is told to a client that has left
        return Response(json.dumps(body), 499 if body is None else 200, media_type="application/json")

    about = "Go on with a text, or with several."
    return [Operation("/v1/completions", complete, about=about, takes=CompletionRequest, gives=Completion, streams=True)]


def _check(asked: CompletionRequest) -> None:
    if asked.suffix:
        raise InputError("suffix is not supported: texts are only written from left to right.")
    if asked.best_of is not None and asked.best_of != (asked.n or 1):
        raise InputError(
            f"best_of={asked.best_of} is not supported: every text that is written is given, so ask for n instead."
        )
    if asked.echo and asked.logprobs is not None:
        raise InputError("echo with logprobs is not supported: probabilities are only told of tokens that were written.")


def _prompts(asked: CompletionRequest) -> list[Prompt]:
    """Give the prompts one by one, whatever form they came in."""
    given = asked.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InputError("prompt is an empty list; give it at least one text.")
    return [given] if isinstance(given[0], int) else list(given)


def _echoes(service: Service, prompts: list[Prompt]) -> list[str]:
    return [prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt) for prompt in prompts]


class _Writing:
    """Answers to prompts, `count` to each, that are spelled together.

    echoes  the prompts' texts, where they are given back
    """

    def __init__(self, service: Service, answers: list[Answer], count: int, echoes: list[str] | None):
        self._tokenizer = service.link.tokenizer
        self._answers, self._count, self._echoes = answers, count, echoes
        self._about = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.facts.name,
        }

    async def stream(self, told: bool) -> AsyncIterator[bytes]:
        head = f'data: {json.dumps(self._about)[:-1]},"choices":['
        tail = ',"usage":null}\n\n' if told else "}\n\n"
        lengths, left = [0] * len(self._answers), len(self._answers)
        if self._echoes:
            numbers = range(len(self._answers))
            yield "".join(f"{head}{_choice(number, self._echo(number))}]{tail}" for number in numbers).encode()
        async for number, deltas in merged(self._answers):
            text, scored, finish = self._joined(deltas, lengths[number])
            lengths[number] += len(text)
            parts = f"{head}{_choice(number, text, scored, finish)}]{tail}"
            if finish is not None:
                left -= 1
                if not left:
                    parts += (f'{head}],"usage":{self._usage()}}}\n\n' if told else "") + DONE.decode()
            yield parts.encode(errors="replace")

    async def whole(self) -> dict[str, Any]:
        parts: list[list[Delta]] = [[] for _ in self._answers]
        async for number, deltas in merged(self._answers):
            parts[number] += deltas
            if type(deltas[-1]) is Finish:
                check_finish(deltas[-1])
        choices = []
        for number, deltas in enumerate(parts):
            text, scored, finish = self._joined(deltas, 0)
            echo = self._echo(number)
            choices.append({"index": number, "text": echo + text, "logprobs": scored, "finish_reason": finish})
        usage, timings = usage_of(self._answers, self._count), timings_of(self._answers)
        return {**self._about, "choices": choices, "usage": usage, "timings": timings}

    def _joined(self, deltas: list[Delta], offset: int) -> tuple[str, dict[str, Any] | None, str | None]:
        """Give text, probabilities and reason of what came together."""
        end = deltas[-1]
        text = "".join(delta.text for delta in deltas if type(delta) is Content)
        told = [delta.scored for delta in deltas if type(delta) is Logprobs]
        scored = spelled_lists(self._tokenizer, [each for some in told for each in some], offset) if told else None
        if type(end) is not Finish:
            return text, scored, None
        check_finish(end)
        return text, scored, end.reason

    def _echo(self, number: int) -> str:
        return self._echoes[number // self._count] if self._echoes else ""

    def _usage(self) -> str:
        return f'{json.dumps(usage_of(self._answers, self._count))},"timings":{json.dumps(timings_of(self._answers))}'


def _choice(number: int, text: str, scored: dict[str, Any] | None = None, finish: str | None = None) -> str:
    logprobs = "null" if scored is None else json.dumps(scored, ensure_ascii=False)
    reason = "null" if finish is None else f'"{finish}"'
    return f'{{"index":{number},"text":{quoted(text)},"logprobs":{logprobs},"finish_reason":{reason}}}'
