"""The OpenAPI document, built from the routes' schemas."""

import re
from collections.abc import Iterable
from http.client import responses as PHRASES
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from auraflux import __version__
from auraflux.serve.openai.response_schema import ErrorBody
from auraflux.serve.operation import EVENTS, Operation

REF = "#/components/schemas/{model}"
# error statuses of any request, and of requests with a body
USUAL = (401, 403, 500)
WITH_BODY = (400, 404, 413, 429, 503)
PLACEHOLDER = re.compile(r"\{(\w+)(?::\w+)?\}")
Json = dict[str, Any]
EVENT: Json = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}, "required": ["data"]}


def document(routes: Iterable[BaseRoute]) -> Json:
    """Return the OpenAPI document of the operations among the routes."""
    operations = [route for route in routes if isinstance(route, Operation)]
    refs, schemas = _schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        path = PLACEHOLDER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "auraflux",
            "version": __version__,
            "description": "OpenAI, Anthropic and Ollama compatible API of a language model.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _schemas(operations: list[Operation]) -> tuple[dict[tuple[type[BaseModel], str], Json], Json]:
    """Return a reference to each schema, and the schemas by name."""
    found: dict[tuple[type[BaseModel], Any], None] = {(ErrorBody, "serialization"): None}
    for operation in operations:
        if operation.request is not None:
            found[operation.request, "validation"] = None
        for schema in (operation.response, operation.error):
            if isinstance(schema, type):
                found[schema, "serialization"] = None
    refs, schemas = models_json_schema(list(found), ref_template=REF)
    return {(model, mode): ref for (model, mode), ref in refs.items()}, schemas.get("$defs", {})  # type: ignore[misc]


def _described(operation: Operation, refs: dict[tuple[type[BaseModel], str], Json]) -> Json:
    content = _content(operation, refs)
    error = {"application/json": {"schema": refs[operation.error or ErrorBody, "serialization"]}}
    described: Json = {
        "summary": operation.summary,
        "operationId": f"{operation.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', operation.path).rstrip('_')}",
        "responses": {"200": {"description": "The response.", "content": content}},
    }
    also = WITH_BODY if operation.request is not None else ()
    for status in sorted({*USUAL, *also, *operation.statuses}):
        described["responses"][str(status)] = {"description": PHRASES.get(status, "Overloaded"), "content": error}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PLACEHOLDER.findall(operation.path)
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.request is not None:
        body = {"application/json": {"schema": refs[operation.request, "validation"]}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _content(operation: Operation, refs: dict[tuple[type[BaseModel], str], Json]) -> Json:
    if isinstance(operation.response, str):
        return {operation.response: {"schema": {"type": "string"}}}
    content: Json = {"application/json": {"schema": refs[operation.response, "serialization"]}}
    if operation.streams is not None:
        content[operation.streams] = {"schema": EVENT if operation.streams == EVENTS else {"type": "string"}}
    return content
