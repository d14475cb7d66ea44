"""/v1/responses: what Codex speaks. Nothing is kept between requests."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from auraflux.errors import InputError
from auraflux.serve.answer import Answer
from auraflux.serve.ask import Ask
from auraflux.serve.body import read_body
from auraflux.serve.guard import caller
from auraflux.serve.limits import at_most
from auraflux.serve.logprobs import spelled
from auraflux.serve.operation import Operation
from auraflux.serve.responses_ask import functions, to_ask
from auraflux.serve.responses_events import ResponseEvents
from auraflux.serve.responses_schema import ResponseReply, ResponsesRequest
from auraflux.serve.service import Service
from auraflux.serve.stream import EventStream, attended


def routes(service: Service) -> list[Operation]:
    """Give the routes of OpenAI's Responses."""

    async def answer(request: Request) -> Response:
        return await _answer(service, request)

    about = "Answer a conversation as OpenAI's Responses do; the whole of it is sent each time."
    return [Operation("/v1/responses", answer, about=about, takes=ResponsesRequest, gives=ResponseReply, streams=True)]


async def _answer(service: Service, request: Request) -> Response:
    asked = await read_body(request, ResponsesRequest, service.limits)
    service.check_ready()
    service.check_model(asked.model)
    if isinstance(asked.input, list):
        at_most("items of input", len(asked.input), service.limits.messages)
    ask = to_ask(asked, caller(request, asked.named))
    begun = blank(asked, ask, service.facts.name)
    [answer] = await service.answer(ask)
    events = ResponseEvents(begun, lambda scored: spelled(service.tokenizer, scored))
    if asked.stream:
        return EventStream(_stream(events, answer), [answer], events.fail, service.limits.idle_s)
    response = await attended(request.receive, _whole(events, answer), [answer])
    # nobody reads what is told to a client that has left
    return Response(json.dumps(response), 200 if response else 499, media_type="application/json")


async def _stream(events: ResponseEvents, answer: Answer) -> AsyncIterator[bytes]:
    yield events.begin()
    async for deltas in answer.batches():
        yield events.take(deltas, answer.reasoning_tokens)


async def _whole(events: ResponseEvents, answer: Answer) -> dict[str, Any]:
    async for deltas in answer.batches():
        events.take(deltas, answer.reasoning_tokens)
    return events.response


def blank(request: ResponsesRequest, ask: Ask, model: str) -> dict[str, Any]:
    """Give the response before anything is answered: what was asked for, as far as it is honoured."""
    wanted = request.text.format if request.text else None
    response = {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": None,
        "metadata": request.metadata or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": ask.parallel,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": ask.sampling.temperature,
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True) if wanted else {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": functions(request),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": ask.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
    try:
        json.dumps(response, allow_nan=False)
    except ValueError as err:
        raise InputError("A number of the request is too large for JSON.") from err
    return response
