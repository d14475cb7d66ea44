"""The ASGI application: all routes behind the authentication middleware."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route
from starlette.types import Scope

from auraflux.errors import AurafluxError
from auraflux.serve import page
from auraflux.serve.anthropic import messages
from auraflux.serve.auth import Access, AuthMiddleware, RequestIdMiddleware
from auraflux.serve.batch import routes as batch
from auraflux.serve.batch.batches import Batches
from auraflux.serve.failures import Failure, error_response, failure_of
from auraflux.serve.leases import LeaseMiddleware
from auraflux.serve.metrics import CONTENT_TYPE
from auraflux.serve.ollama import answers, embed
from auraflux.serve.ollama import models as managed
from auraflux.serve.openai import chat, completions, embeddings, models, rerank, responses
from auraflux.serve.openai.response_schema import State
from auraflux.serve.openapi import document
from auraflux.serve.operation import Operation
from auraflux.serve.services import Services

# paths without a key: health probes, and the page in which a user enters the key
PUBLIC = ("/", "/health", "/ready")
STATIC = "/static/"


def make_app(services: Services, access: Access | None = None, batches: Batches | None = None) -> Starlette:
    """Return the ASGI application of the models; `batches` keeps clients' files and runs their batches."""
    access = access or Access()
    api = [
        *chat.routes(services),
        *completions.routes(services),
        *embeddings.routes(services),
        *rerank.routes(services),
        *responses.routes(services),
        *messages.routes(services),
        *models.routes(services),
        *answers.routes(services),
        *embed.routes(services),
        *managed.routes(services, access.manage_models),
        *batch.routes(services, batches),
        *_state_routes(services),
    ]
    middleware = [Middleware(RequestIdMiddleware, error_response=error_response_for)]
    if access.origins:
        middleware.append(Middleware(CORSMiddleware, allow_origins=access.origins, allow_methods=["*"], allow_headers=["*"]))
    middleware.append(Middleware(AuthMiddleware, access=access, is_public=_is_public, error_response=error_response_for))
    middleware.append(Middleware(LeaseMiddleware))
    return _application([*api, _document_route(api), *page.routes()], middleware)


def make_inner_app(services: Services) -> Starlette:
    """Return the application for requests from within its process, such as those of a batch: without authentication."""
    api = [each.routes(services) for each in (chat, completions, embeddings, rerank, responses)]
    middleware = [Middleware(RequestIdMiddleware, error_response=error_response_for), Middleware(LeaseMiddleware)]
    return _application([route for routes in api for route in routes], middleware)


def _application(routes: list[BaseRoute], middleware: list[Middleware]) -> Starlette:
    handlers: dict[Any, Any] = {AurafluxError: _handle_error, HTTPException: _handle_error}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _state_routes(services: Services) -> list[Operation]:
    async def health(request: Request) -> Response:
        return JSONResponse({"status": "alive"})

    async def ready(request: Request) -> Response:
        services.check_ready()
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        return Response(services.metrics.text(), headers={"content-type": CONTENT_TYPE})

    return [
        Operation("/health", health, summary="Report that the process is alive.", response=State),
        Operation("/ready", ready, summary="Report whether the model accepts requests.", response=State, statuses=(503,)),
        Operation("/metrics", metrics, summary="Return Prometheus metrics.", response="text/plain"),
    ]


def _document_route(api: Sequence[BaseRoute]) -> Route:
    @cache
    def content() -> str:
        return json.dumps(document(api))

    async def openapi(request: Request) -> Response:
        return Response(content(), media_type="application/json")

    return Route("/openapi.json", openapi)


def _is_public(path: str) -> bool:
    return path in PUBLIC or path.startswith(STATIC)


def error_response_for(failure: Failure, scope: Scope) -> Response:
    """Return the response of a failure in the format of the path's API."""
    if scope["path"].startswith("/v1/messages"):
        return messages.error_response(failure, scope.get("state", {}).get("request_id"))
    if scope["path"].startswith("/api/"):
        return JSONResponse({"error": failure.message}, failure.status, failure.headers)
    return error_response(failure)


async def _handle_error(request: Request, err: Exception) -> Response:
    return error_response_for(failure_of(err), request.scope)
