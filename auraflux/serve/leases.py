"""Leases: a request keeps the models that it uses loaded until its response has been sent."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

KEY = "auraflux.leases"


class LeaseMiddleware:
    """Middleware that ends a request's leases when its response has been sent, or its client has left."""

    def __init__(self, app: ASGIApp):
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        releases: list[Callable[[], None]] = []
        scope[KEY] = releases
        try:
            await self._app(scope, receive, send)
        finally:
            for release in releases:
                release()


def lease(request: Request, release: Callable[[], None]) -> None:
    """Call `release` when the response to a request has been sent."""
    request.scope[KEY].append(release)
