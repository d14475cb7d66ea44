"""/v1/completions: OpenAI's Completions API."""

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
from auraflux.serve.auth import caller
from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.failures import check_finish
from auraflux.serve.limits import at_most
from auraflux.serve.openai.chat import error_chunk
from auraflux.serve.openai.chat_request import to_format, to_sampling
from auraflux.serve.openai.logprobs import completion_logprobs
from auraflux.serve.openai.response_schema import Completion
from auraflux.serve.openai.schema import CompletionRequest
from auraflux.serve.operation import EVENTS, Operation
from auraflux.serve.service import Service
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import DONE, EventStream, merge_outputs, run_until_disconnect
from auraflux.serve.usage import timings_of, usage_of

# OpenAI's default
MAX_TOKENS = 16
Prompt = str | list[int]


def routes(service: Service) -> list[Route]:
    """Return the completions route."""

    async def complete(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, service.limits)
        service.check_ready()
        service.check_model(body.model)
        _check(body)
        prompts, count = _prompts(body), body.n or 1
        at_most("prompt", len(prompts), service.limits.prompts)
        defaults = service.default_sampling
        sampling = to_sampling(body, defaults, max_tokens=body.max_tokens or MAX_TOKENS, logprobs=body.logprobs)
        format = to_format(body.response_format, body.grammar)
        user = caller(request, body.user)
        echoes = _echoes(service, prompts) if body.echo else None
        outputs = await service.complete(prompts, sampling, format=format, count=count, user=user)
        completions = _CompletionOutputs(service, outputs, count, echoes)
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(completions.stream(include_usage), outputs, error_chunk, service.limits.idle_s)
        response = await run_until_disconnect(request.receive, completions.full_response(), outputs)
        # 499: the client has disconnected and reads nothing
        return Response(json.dumps(response), 499 if response is None else 200, media_type="application/json")

    summary = "Complete one or more prompts."
    return [
        Operation("/v1/completions", complete, summary=summary, request=CompletionRequest, response=Completion, streams=EVENTS)
    ]


def _check(body: CompletionRequest) -> None:
    if body.suffix:
        raise InputError("suffix is not supported: generation is left to right only.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InputError(f"best_of={body.best_of} is not supported: all generated completions are returned, so use n instead.")
    if body.echo and body.logprobs is not None:
        raise InputError("echo with logprobs is not supported: logprobs exist only for generated tokens.")


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts as a list, from any of the request's forms."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InputError("prompt is an empty list; give at least one prompt.")
    return [given] if isinstance(given[0], int) else list(given)


def _echoes(service: Service, prompts: list[Prompt]) -> list[str]:
    return [prompt if isinstance(prompt, str) else service.tokenizer.decode(prompt) for prompt in prompts]


class _CompletionOutputs:
    """Completions of several prompts, `count` per prompt, in one response.

    echoes  text of each prompt, where it is returned too
    """

    def __init__(self, service: Service, outputs: list[ChatOutput], count: int, echoes: list[str] | None):
        self._tokenizer = service.link.tokenizer
        self._outputs, self._count, self._echoes = outputs, count, echoes
        self._envelope = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.facts.name,
        }

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        head = f'data: {json.dumps(self._envelope)[:-1]},"choices":['
        tail = ',"usage":null}\n\n' if include_usage else "}\n\n"
        lengths, running = [0] * len(self._outputs), len(self._outputs)
        if self._echoes:
            numbers = range(len(self._outputs))
            yield "".join(f"{head}{_choice(number, self._echo(number))}]{tail}" for number in numbers).encode()
        async for number, deltas in merge_outputs(self._outputs):
            text, logprobs, finish = self._join(deltas, lengths[number])
            lengths[number] += len(text)
            parts = f"{head}{_choice(number, text, logprobs, finish)}]{tail}"
            if finish is not None:
                running -= 1
                if not running:
                    parts += (f'{head}],"usage":{self._usage()}}}\n\n' if include_usage else "") + DONE.decode()
            yield parts.encode(errors="replace")

    async def full_response(self) -> dict[str, Any]:
        parts: list[list[Delta]] = [[] for _ in self._outputs]
        async for number, deltas in merge_outputs(self._outputs):
            parts[number] += deltas
            if type(deltas[-1]) is Finish:
                check_finish(deltas[-1])
        choices = []
        for number, deltas in enumerate(parts):
            text, logprobs, finish = self._join(deltas, 0)
            echo = self._echo(number)
            choices.append({"index": number, "text": echo + text, "logprobs": logprobs, "finish_reason": finish})
        usage, timings = usage_of(self._outputs, self._count), timings_of(self._outputs)
        return {**self._envelope, "choices": choices, "usage": usage, "timings": timings}

    def _join(self, deltas: list[Delta], offset: int) -> tuple[str, dict[str, Any] | None, str | None]:
        """Return the text, logprobs and finish reason of deltas that arrived together."""
        end = deltas[-1]
        text = "".join(delta.text for delta in deltas if type(delta) is Content)
        found = [delta.tokens for delta in deltas if type(delta) is Logprobs]
        tokens = [token for batch in found for token in batch]
        logprobs = completion_logprobs(self._tokenizer, tokens, offset) if found else None
        if type(end) is not Finish:
            return text, logprobs, None
        check_finish(end)
        return text, logprobs, end.reason

    def _echo(self, number: int) -> str:
        return self._echoes[number // self._count] if self._echoes else ""

    def _usage(self) -> str:
        return f'{json.dumps(usage_of(self._outputs, self._count))},"timings":{json.dumps(timings_of(self._outputs))}'


def _choice(number: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None) -> str:
    encoded = "null" if logprobs is None else json.dumps(logprobs, ensure_ascii=False)
    reason = "null" if finish is None else f'"{finish}"'
    return f'{{"index":{number},"text":{quoted(text)},"logprobs":{encoded},"finish_reason":{reason}}}'
