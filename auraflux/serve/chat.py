"""/v1/chat/completions: OpenAI's chat."""

import json
import time
from collections.abc import AsyncIterator
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from auraflux.serve.answer import Answer
from auraflux.serve.bodies import ChatCompletion
from auraflux.serve.body import read_body
from auraflux.serve.chat_ask import to_ask
from auraflux.serve.chat_chunks import Chunks
from auraflux.serve.deltas import CallArguments, CallBegin, Content, Delta, Finish, Logprobs, Reasoning
from auraflux.serve.failures import Failure, body_of, check_finish
from auraflux.serve.guard import caller
from auraflux.serve.logprobs import spelled
from auraflux.serve.operation import Operation
from auraflux.serve.schema import ChatRequest
from auraflux.serve.service import Service
from auraflux.serve.stream import DONE, EventStream, attended, merged, sse
from auraflux.serve.usage import timings_of, usage_of


def routes(service: Service) -> list[Route]:
    """Give the route of the chat."""

    async def chat(request: Request) -> Response:
        asked = await read_body(request, ChatRequest, service.limits)
        service.check_ready()
        service.check_model(asked.model)
        answers = await service.answer(to_ask(asked, service.limits, caller(request, asked.user)))
        if asked.stream:
            told = bool(asked.stream_options and asked.stream_options.include_usage)
            return EventStream(_stream(service, answers, told), answers, failed, service.limits.idle_s)
        body = await attended(request.receive, _whole(service, answers), answers)
        # nobody reads what is told to a client that has left
        return Response(json.dumps(body), 499 if body is None else 200, media_type="application/json")

    about = "Answer a conversation."
    return [Operation("/v1/chat/completions", chat, about=about, takes=ChatRequest, gives=ChatCompletion, streams=True)]


def failed(failure: Failure) -> bytes:
    """Spell an error that comes after the first byte."""
    return sse(body_of(failure))


async def _stream(service: Service, answers: list[Answer], told: bool) -> AsyncIterator[bytes]:
    id, name, tokenizer = _id(), service.facts.name, service.tokenizer
    chunks = [Chunks(id, name, number, tokenizer, told) for number in range(len(answers))]
    yield "".join(chunk.begin() for chunk in chunks).encode()
    last, left = b"", len(answers)
    async for number, deltas in merged(answers):
        end = deltas[-1]
        if type(end) is Finish:
            check_finish(end)
            left -= 1
            if not left:
                usage = chunks[0].usage(usage_of(answers, len(answers)), timings_of(answers)) if told else ""
                last = usage.encode() + DONE
        yield chunks[number].spell(deltas).encode(errors="replace") + last


async def _whole(service: Service, answers: list[Answer]) -> dict[str, Any]:
    choices: list[dict[str, Any]] = [{} for _ in answers]
    parts: list[list[Delta]] = [[] for _ in answers]
    async for number, deltas in merged(answers):
        parts[number] += deltas
        end = deltas[-1]
        if type(end) is Finish:
            check_finish(end)
            choices[number] = _choice(service, number, parts[number], end)
    return {
        "id": _id(),
        "object": "chat.completion",
        "created": int(time.time()),
        "model": service.facts.name,
        "choices": choices,
        "usage": usage_of(answers, len(answers)),
        "timings": timings_of(answers),
    }


def _choice(service: Service, number: int, deltas: list[Delta], finish: Finish) -> dict[str, Any]:
    content = "".join(delta.text for delta in deltas if type(delta) is Content)
    thought = "".join(delta.text for delta in deltas if type(delta) is Reasoning)
    calls = _calls(deltas)
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None, "refusal": None}
    if thought:
        message |= {"reasoning": thought, "reasoning_content": thought}
    if calls:
        message["tool_calls"] = calls
    scored = [spelled(service.tokenizer, each) for delta in deltas if type(delta) is Logprobs for each in delta.scored]
    asked = any(type(delta) is Logprobs for delta in deltas)
    logprobs = {"content": scored, "refusal": None} if asked else None
    return {"index": number, "message": message, "logprobs": logprobs, "finish_reason": finish.reason}


def _calls(deltas: list[Delta]) -> list[dict[str, Any]]:
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        if type(delta) is CallBegin:
            calls[delta.index] = {"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}}
        elif type(delta) is CallArguments:
            calls[delta.index]["function"]["arguments"] += delta.text
    return list(calls.values())


def _id() -> str:
    return f"chatcmpl-{uuid4().hex}"
