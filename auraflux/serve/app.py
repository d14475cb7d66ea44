"""The HTTP application: every route, behind the guard."""

import json
from collections.abc import Sequence
from functools import cache

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from auraflux.errors import AurafluxError
from auraflux.serve import chat, completions, messages, models, page, responses
from auraflux.serve.bodies import State
from auraflux.serve.failures import Failure, failure_of, response_of
from auraflux.serve.guard import Access, Keys, Names
from auraflux.serve.metrics import CONTENT_TYPE
from auraflux.serve.openapi import document
from auraflux.serve.operation import Operation
from auraflux.serve.service import Service

# these must answer those who have no key: what watches the process, and the page that asks for one
FREE = ("/", "/health", "/ready")
STATIC = "/static/"


def make_app(service: Service, access: Access | None = None) -> Starlette:
    """Make the application that answers for this service."""
    access = access or Access()
    api = [
        *chat.routes(service),
        *completions.routes(service),
        *responses.routes(service),
        *messages.routes(service),
        *models.routes(service),
        *_state_routes(service),
    ]
    guard = [Middleware(Names, answering=answering)]
    if access.origins:
        guard.append(Middleware(CORSMiddleware, allow_origins=access.origins, allow_methods=["*"], allow_headers=["*"]))
    guard.append(Middleware(Keys, access=access, free=_free, answering=answering))
    return Starlette(
        routes=[*api, _document_route(api), *page.routes()],
        middleware=guard,
        exception_handlers={AurafluxError: _handled, HTTPException: _handled},
    )


def _state_routes(service: Service) -> list[Operation]:
    async def health(request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(request: Request) -> Response:
        service.check_ready()
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    return [
        Operation("/health", health, about="Say that the process is alive.", gives=State),
        Operation("/ready", ready, about="Say whether questions are answered.", gives=State, errors=(503,)),
        Operation("/metrics", metrics, about="Give figures for Prometheus.", gives="text/plain"),
    ]


def _document_route(api: Sequence[BaseRoute]) -> Route:
    @cache
    def made() -> str:
        return json.dumps(document(api))

    async def openapi(request: Request) -> Response:
        return Response(made(), media_type="application/json")

    return Route("/openapi.json", openapi)


def _free(path: str) -> bool:
    return path in FREE or path.startswith(STATIC)


def answering(failure: Failure, scope: Scope) -> Response:
    """Spell a failure as the clients of that path expect it."""
    if scope["path"].startswith("/v1/messages"):
        return messages.response_of(failure, scope.get("state", {}).get("request_id"))
    return response_of(failure)


async def _handled(request: Request, err: Exception) -> Response:
    return answering(failure_of(err), request.scope)
