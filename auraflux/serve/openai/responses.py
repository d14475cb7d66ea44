"""/v1/responses: OpenAI's Responses API, which Codex uses. The server is stateless between requests."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from auraflux.errors import InputError
from auraflux.serve.auth import caller
from auraflux.serve.chat.conversation import Conversation
from auraflux.serve.chat.output import ChatOutput
from auraflux.serve.limits import at_most
from auraflux.serve.openai.logprobs import chat_logprob
from auraflux.serve.openai.responses_events import ResponseEvents
from auraflux.serve.openai.responses_request import functions, to_conversation
from auraflux.serve.openai.responses_schema import ResponseReply, ResponsesRequest
from auraflux.serve.operation import EVENTS, Operation
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import EventStream, run_until_disconnect


def routes(services: Services) -> list[Operation]:
    """Return the Responses route."""

    async def respond(request: Request) -> Response:
        return await _respond(services, request)

    summary = "Answer a conversation (OpenAI Responses); each request carries the complete history."
    return [
        Operation("/v1/responses", respond, summary=summary, request=ResponsesRequest, response=ResponseReply, streams=EVENTS)
    ]


async def _respond(services: Services, request: Request) -> Response:
    body = await read_body(request, ResponsesRequest, services.limits)
    service = await services.select(request, body.model)
    if isinstance(body.input, list):
        at_most("items of input", len(body.input), service.limits.messages)
    conversation = to_conversation(body, caller(request, body.named), service.prompts.default_sampling)
    initial = initial_response(body, conversation, service.prompts.facts.name)
    [output] = await service.chat(conversation)
    events = ResponseEvents(initial, lambda logprob: chat_logprob(service.prompts.tokenizer, logprob))
    if body.stream:
        return EventStream(_stream(events, output), [output], events.fail, service.limits.idle_s)
    response = await run_until_disconnect(request.receive, _full_response(events, output), [output])
    # 499: the client has disconnected and reads nothing
    return Response(json.dumps(response), 200 if response else 499, media_type="application/json")


async def _stream(events: ResponseEvents, output: ChatOutput) -> AsyncIterator[bytes]:
    yield events.first()
    async for deltas in output.batches():
        yield events.encode(deltas, output.reasoning_tokens)


async def _full_response(events: ResponseEvents, output: ChatOutput) -> dict[str, Any]:
    async for deltas in output.batches():
        events.encode(deltas, output.reasoning_tokens)
    return events.response


def initial_response(request: ResponsesRequest, conversation: Conversation, model: str) -> dict[str, Any]:
    """Return the response before any output: the request's settings, as far as the server honours them."""
    format = request.text.format if request.text else None
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
        "parallel_tool_calls": conversation.parallel_tool_calls,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort if request.reasoning else None, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": conversation.sampling.temperature,
        "text": {"format": format.model_dump(by_alias=True, exclude_none=True) if format else {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": functions(request),
        "top_logprobs": request.top_logprobs or 0,
        "top_p": conversation.sampling.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": request.user,
    }
    try:
        json.dumps(response, allow_nan=False)
    except ValueError as err:
        raise InputError("A number of the request is too large for JSON.") from err
    return response
