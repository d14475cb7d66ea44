"""/v1/completions: OpenAI's Completions API."""

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from json.encoder import encode_basestring as quoted
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from auraflux.engine.request import TokenLogprob
from auraflux.errors import InputError
from auraflux.serve.auth import caller
from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.failures import check_finish
from auraflux.serve.limits import at_most
from auraflux.serve.openai.chat import error_chunk
from auraflux.serve.openai.chat_request import to_format, to_sampling
from auraflux.serve.openai.logprobs import completion_logprobs, echoed_logprobs, prompt_logprobs
from auraflux.serve.openai.response_schema import Completion
from auraflux.serve.openai.schema import CompletionRequest
from auraflux.serve.operation import EVENTS, Operation
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import DONE, EventStream, merge_outputs, run_until_disconnect
from auraflux.serve.usage import timings_of, usage_of

# OpenAI's default
MAX_TOKENS = 16
Prompt = str | list[int]


def routes(services: Services) -> list[Route]:
    """Return the completions route."""

    async def complete(request: Request) -> Response:
        body = await read_body(request, CompletionRequest, services.limits)
        service = await services.select(request, body.model)
        _check(body)
        prompts, count = _prompts(body), body.n or 1
        at_most("prompt", len(prompts), service.limits.prompts)
        defaults = service.prompts.default_sampling
        most = MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
        sampling = to_sampling(body, defaults, max_tokens=most, logprobs=body.logprobs)
        format = to_format(body.response_format, body.grammar)
        user = caller(request, body.user)
        echoes = _echoes(service, prompts) if body.echo else None
        scored = _scored(body)
        about: dict[str, Any] = {"user": user, "prompt_logprobs": scored, "suffix": body.suffix or ""}
        outputs = await service.complete(prompts, sampling, format=format, count=count, **about)
        completions = _CompletionOutputs(service, outputs, count, echoes, body)
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
    if body.suffix and (body.echo or body.prompt_logprobs is not None):
        raise InputError("echo and prompt_logprobs are not supported together with suffix: leave them out.")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise InputError(f"best_of={body.best_of} is not supported: all generated completions are returned, so use n instead.")
    if body.max_tokens == 0 and not body.echo and body.prompt_logprobs is None:
        raise InputError("max_tokens is 0, which needs echo or prompt_logprobs: nothing would be returned.")
    if body.stream and _scored(body) is not None:
        raise InputError("log probabilities of the prompt are not streamed: leave stream out.")


def _scored(body: CompletionRequest) -> int | None:
    """Return how many likely tokens to report with each prompt token; None to report nothing about them."""
    asked = [count for count in (body.logprobs if body.echo else None, body.prompt_logprobs) if count is not None]
    return max(asked, default=None)


def _prompts(body: CompletionRequest) -> list[Prompt]:
    """Return the prompts as a list, from any of the request's forms."""
    given = body.prompt
    if isinstance(given, str):
        return [given]
    if not given:
        raise InputError("prompt is an empty list; give at least one prompt.")
    return [given] if isinstance(given[0], int) else list(given)


def _echoes(service: Service, prompts: list[Prompt]) -> list[str]:
    return [prompt if isinstance(prompt, str) else service.prompts.tokenizer.decode(prompt) for prompt in prompts]


class _CompletionOutputs:
    """Completions of several prompts, `count` per prompt, in one response.

    echoes  text of each prompt, where it is returned too
    body    the request, which says what to return
    """

    def __init__(
        self, service: Service, outputs: list[ChatOutput], count: int, echoes: list[str] | None, body: CompletionRequest
    ):
        self._tokenizer, self._body = service.link.tokenizer, body
        self._outputs, self._count, self._echoes = outputs, count, echoes
        self._envelope = {
            "id": f"cmpl-{uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.prompts.facts.name,
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
            choices.append(self._scored_choice(number, text, logprobs, finish))
        usage, timings = usage_of(self._outputs, self._count), timings_of(self._outputs)
        if self._body.max_tokens == 0:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return {**self._envelope, "choices": choices, "usage": usage, "timings": timings}

    def _scored_choice(self, number: int, text: str, logprobs: dict[str, Any] | None, finish: str | None) -> dict[str, Any]:
        """Return a choice with what was asked about its prompt; without generated tokens where none are wanted."""
        echo, output = self._echo(number), self._outputs[number]
        if self._body.max_tokens == 0:
            text, logprobs, finish = "", None, "length"
        if echo and self._body.logprobs is not None:
            about = echoed_logprobs(self._tokenizer, output.scored_prompt or (), _cut(output, self._body.logprobs))
            shifted = {**(logprobs or {}), "text_offset": [at + len(echo) for at in (logprobs or {}).get("text_offset", ())]}
            logprobs = {name: [*values, *shifted.get(name, ())] for name, values in about.items()}
        choice = {"index": number, "text": echo + text, "logprobs": logprobs, "finish_reason": finish}
        if self._body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokenizer, _cut(output, self._body.prompt_logprobs))
        return choice

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


def _cut(output: ChatOutput, count: int) -> list[TokenLogprob]:
    """Return the log probabilities of a prompt's tokens with at most `count` likely tokens each."""
    return [replace(each, top=each.top[:count]) for each in output.prompt_logprobs]


def _choice(number: int, text: str, logprobs: dict[str, Any] | None = None, finish: str | None = None) -> str:
    encoded = "null" if logprobs is None else json.dumps(logprobs, ensure_ascii=False)
    reason = "null" if finish is None else f'"{finish}"'
    return f'{{"index":{number},"text":{quoted(text)},"logprobs":{encoded},"finish_reason":{reason}}}'
