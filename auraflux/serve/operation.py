"""A route with its request and response schemas, from which the OpenAPI document is built."""

from collections.abc import Awaitable, Callable

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

# the media type of server-sent events
EVENTS = "text/event-stream"
Endpoint = Callable[[Request], Awaitable[Response]]


class Operation(Route):
    """A route with one method.

    summary   one sentence for the OpenAPI document
    request   schema of the body; None for no body
    response  schema of the JSON response, or the media type of another response
    streams   media type of the response as a stream; None if it is never one
    statuses  error statuses in addition to those of every route
    error     schema of an error's body; None for OpenAI's
    method    None for POST with a body and GET without
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        summary: str,
        request: type[BaseModel] | None = None,
        response: type[BaseModel] | str,
        streams: str | None = None,
        statuses: tuple[int, ...] = (),
        error: type[BaseModel] | None = None,
        method: str | None = None,
    ):
        self.method = method or ("GET" if request is None else "POST")
        super().__init__(path, endpoint, methods=[self.method])
        self.summary, self.request, self.response = summary, request, response
        self.streams, self.statuses, self.error = streams, statuses, error

    def __repr__(self) -> str:
        return f"Operation({self.method} {self.path})"
