"""/v1/messages: Anthropic's Messages API."""

import json
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from auraflux.serve.anthropic import messages_events as events
from auraflux.serve.anthropic.messages_request import to_conversation
from auraflux.serve.anthropic.messages_schema import CountReply, CountRequest, MessageError, MessageReply, MessagesRequest
from auraflux.serve.auth import caller
from auraflux.serve.failures import Failure
from auraflux.serve.limits import at_most
from auraflux.serve.operation import EVENTS, Operation
from auraflux.serve.service import Service
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read_body
from auraflux.serve.transport.sse import EventStream, run_until_disconnect

PATH = "/v1/messages"
# Anthropic's status for an overloaded server
OVERLOADED = 529
M = TypeVar("M", bound=CountRequest)


def routes(services: Services) -> list[Operation]:
    """Return the routes of Anthropic's API."""

    async def create(request: Request) -> Response:
        return await _create(services, request)

    async def count(request: Request) -> Response:
        service, body = await _read(services, request, CountRequest)
        conversation = to_conversation(body, caller(request), service.prompts.default_sampling)
        return JSONResponse({"input_tokens": await service.count_tokens(conversation)})

    summary = "Answer a conversation (Anthropic Messages)."
    counts = "Count the tokens of a conversation (Anthropic Messages)."
    errors: dict[str, Any] = {"statuses": (OVERLOADED,), "error": MessageError}
    return [
        Operation(PATH, create, summary=summary, request=MessagesRequest, response=MessageReply, streams=EVENTS, **errors),
        Operation(f"{PATH}/count_tokens", count, summary=counts, request=CountRequest, response=CountReply, **errors),
    ]


def error_response(failure: Failure, request_id: str | None) -> Response:
    """Return the HTTP response of a failure in Anthropic's format."""
    status = OVERLOADED if failure.status == 503 else failure.status
    return JSONResponse({**events.error(failure), "request_id": request_id}, status, failure.headers)


async def _create(services: Services, request: Request) -> Response:
    service, body = await _read(services, request, MessagesRequest)
    model = service.prompts.facts.name
    [output] = await service.chat(to_conversation(body, caller(request, body.user), service.prompts.default_sampling))
    if body.stream:
        chunks = events.stream(output.batches(), model, output.prompt_tokens)
        return EventStream(chunks, [output], events.error_event, service.limits.idle_s)
    message = await run_until_disconnect(request.receive, events.message(output.batches(), model), [output])
    # 499: the client has disconnected and reads nothing
    return Response(json.dumps(message), 200 if message else 499, media_type="application/json")


async def _read(services: Services, request: Request, model: type[M]) -> tuple[Service, M]:
    body = await read_body(request, model, services.limits)
    service = await services.select(request, body.model)
    for message in body.messages:
        blocks = len(message.content) if isinstance(message.content, list) else 1
        at_most("blocks of a message", blocks, services.limits.parts)
    return service, body
