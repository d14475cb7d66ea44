"""/v1/chat/completions: OpenAI's Chat Completions API."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from auraflux.serve.auth import caller
from auraflux.serve.chat.deltas import Content, Delta, Finish, Logprobs, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.failures import Failure, check_finish, error_body
from auraflux.serve.openai.chat_chunks import Chunks
from auraflux.serve.openai.chat_request import to_conversation
from auraflux.serve.openai.logprobs import chat_logprob
from auraflux.serve.openai.response_schema import ChatCompletion
from auraflux.serve.openai.schema import ChatCompletionRequest
from auraflux.serve.operation import EVENTS, Operation
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import DONE, EventStream, merge_outputs, run_until_disconnect, sse
from auraflux.serve.usage import timings_of, usage_of


def routes(services: Services) -> list[Route]:
    """Return the chat completions route."""

    async def chat(request: Request) -> Response:
        body = await read_body(request, ChatCompletionRequest, services.limits)
        service = await services.select(request, body.model)
        user, defaults = caller(request, body.user), service.prompts.default_sampling
        outputs = await service.chat(to_conversation(body, service.limits, user, defaults))
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(_stream(service, outputs, include_usage), outputs, error_chunk, service.limits.idle_s)
        response = await run_until_disconnect(request.receive, _full_response(service, outputs), outputs)
        # 499: the client has disconnected and reads nothing
        return Response(json.dumps(response), 499 if response is None else 200, media_type="application/json")

    return [
        Operation(
            "/v1/chat/completions",
            chat,
            summary="Answer a conversation.",
            request=ChatCompletionRequest,
            response=ChatCompletion,
            streams=EVENTS,
        )
    ]


def error_chunk(failure: Failure) -> bytes:
    """Return the event for an error after the first byte."""
    return sse(error_body(failure))


async def _stream(service: Service, outputs: list[ChatOutput], include_usage: bool) -> AsyncIterator[bytes]:
    id, name, tokenizer = _id(), service.prompts.facts.name, service.prompts.tokenizer
    chunks = [Chunks(id, name, number, tokenizer, include_usage) for number in range(len(outputs))]
    yield "".join(chunk.first() for chunk in chunks).encode()
    last, running = b"", len(outputs)
    async for number, deltas in merge_outputs(outputs):
        end = deltas[-1]
        if type(end) is Finish:
            check_finish(end)
            running -= 1
            if not running:
                usage = chunks[0].usage(usage_of(outputs, len(outputs)), timings_of(outputs)) if include_usage else ""
                last = usage.encode() + DONE
        yield chunks[number].encode(deltas).encode(errors="replace") + last


async def _full_response(service: Service, outputs: list[ChatOutput]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [{} for _ in outputs]
    parts: list[list[Delta]] = [[] for _ in outputs]
    async for number, deltas in merge_outputs(outputs):
        parts[number] += deltas
        end = deltas[-1]
        if type(end) is Finish:
            check_finish(end)
            choices[number] = _choice(service, number, parts[number], end)
    return {
        "id": _id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.prompts.facts.name,
        "choices": choices,
        "usage": usage_of(outputs, len(outputs)),
        "timings": timings_of(outputs),
    }


def _choice(service: Service, number: int, deltas: list[Delta], finish: Finish) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas if type(delta) is Content)
    reasoning = "".join(delta.text for delta in deltas if type(delta) is Reasoning)
    calls = _calls(deltas)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if reasoning:
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    if calls:
        message["tool_calls"] = calls
    tokens = [
        chat_logprob(service.prompts.tokenizer, each) for delta in deltas if type(delta) is Logprobs for each in delta.tokens
    ]
    requested = any(type(delta) is Logprobs for delta in deltas)
    logprobs = {"content": tokens, "refusal": None} if requested else None
    return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": finish.reason}


def _calls(deltas: list[Delta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if type(delta) is ToolCallBegin:
            calls[delta.index] = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        elif type(delta) is ToolCallArguments:
            calls[delta.index]["function"]["arguments"] += delta.text
    return list(calls.values())


def _id() -> str:
    return f"chatcmpl-{uuid4().hex}"
