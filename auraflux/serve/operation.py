"""A route that says what it takes and gives, so that the OpenAPI document can be made of it."""

from collections.abc import Awaitable, Callable

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

Endpoint = Callable[[Request], Awaitable[Response]]


class Operation(Route):
    """A route with one method.

    about    what it does, in a sentence
    takes    the model of the body; None for no body
    gives    the model of the answer in JSON, or the media type of another answer
    streams  whether the answer can be server-sent events, too
    errors   statuses it may answer with besides those of every route
    fails    the model of an error's body; None for OpenAI's
    """

    def __init__(
        self,
        path: str,
        endpoint: Endpoint,
        *,
        about: str,
        takes: type[BaseModel] | None = None,
        gives: type[BaseModel] | str,
        streams: bool = False,
        errors: tuple[int, ...] = (),
        fails: type[BaseModel] | None = None,
    ):
        method = "GET" if takes is None else "POST"
        super().__init__(path, endpoint, methods=[method])
        self.method, self.about, self.takes, self.gives, self.streams = method, about, takes, gives, streams
        self.errors, self.fails = errors, fails

    def __repr__(self) -> str:
        return f"Operation({self.method} {self.path})"
