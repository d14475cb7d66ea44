"""/v1/messages: what Anthropic's clients speak."""

import json
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from auraflux.serve import messages_events as events
from auraflux.serve.body import read_body
from auraflux.serve.failures import Failure
from auraflux.serve.guard import caller
from auraflux.serve.limits import at_most
from auraflux.serve.messages_ask import to_ask
from auraflux.serve.messages_schema import CountReply, CountRequest, MessageError, MessageReply, MessagesRequest
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service
from auraflux.serve.stream import EventStream, attended

PATH = "/v1/messages"
# Anthropic's own status for a server that cannot take more
OVERLOADED = 529
M = TypeVar("M", bound=CountRequest)


def routes(service: Service) -> list[Operation]:
    """Give the routes of Anthropic's API."""

    async def answer(request: Request) -> Response:
        return await _answer(service, request)

    async def count(request: Request) -> Response:
        asked = await _read(service, request, CountRequest)
        return JSONResponse({"input_tokens": await service.count_tokens(to_ask(asked, caller(request)))})

    about = "Answer a conversation as Anthropic's API does."
    counts = "Count the tokens of a conversation as Anthropic's API does."
    told: dict[str, Any] = {"errors": (OVERLOADED,), "fails": MessageError}
    return [
        Operation(PATH, answer, about=about, takes=MessagesRequest, gives=MessageReply, streams=True, **told),
        Operation(f"{PATH}/count_tokens", count, about=counts, takes=CountRequest, gives=CountReply, **told),
    ]


def response_of(failure: Failure, request_id: str | None) -> Response:
    """Make the response of a failure, in Anthropic's shape."""
    status = OVERLOADED if failure.status == 503 else failure.status
    return JSONResponse({**events.error(failure), "request_id": request_id}, status, failure.headers)


async def _answer(service: Service, request: Request) -> Response:
    asked = await _read(service, request, MessagesRequest)
    model = service.facts.name
    [answer] = await service.answer(to_ask(asked, caller(request, asked.user)))
    if asked.stream:
        parts = events.stream(answer.batches(), model, answer.prompt_tokens)
        return EventStream(parts, [answer], events.error_event, service.limits.idle_s)
    message = await attended(request.receive, events.message(answer.batches(), model), [answer])
    # nobody reads what is told to a client that has left
    return Response(json.dumps(message), 200 if message else 499, media_type="application/json")


async def _read(service: Service, request: Request, model: type[M]) -> M:
    asked = await read_body(request, model, service.limits)
    service.check_ready()
    service.check_model(asked.model)
    for turn in asked.messages:
        at_most("blocks of a message", len(turn.content) if isinstance(turn.content, list) else 1, service.limits.parts)
    return asked
