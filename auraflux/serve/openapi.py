"""The OpenAPI document, made of the routes that say what they take and give."""

import re
from collections.abc import Iterable
from http.client import responses as PHRASES
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.routing import BaseRoute

from auraflux import __version__
from auraflux.serve.bodies import ErrorBody
from auraflux.serve.operation import Operation

REF = "#/components/schemas/{model}"
# statuses that any request may be answered with, and one whose body may be wrong or come at a wrong time
USUAL = (401, 403, 500)
WITH_BODY = (400, 404, 413, 429, 503)
PLACEHOLDER = re.compile(r"\{(\w+)(?::\w+)?\}")
Json = dict[str, Any]
EVENT: Json = {"type": "object", "properties": {"data": {"type": "string"}, "event": {"type": "string"}}, "required": ["data"]}


def document(routes: Iterable[BaseRoute]) -> Json:
    """Describe the operations among the routes."""
    operations = [route for route in routes if isinstance(route, Operation)]
    refs, schemas = _schemas(operations)
    paths: dict[str, Json] = {}
    for operation in operations:
        path = PLACEHOLDER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _described(operation, refs)
    return {
        "openapi": "3.1.0",
        "info": {"title": "auraflux", "version": __version__, "description": "A language model for the clients people have."},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
        "security": [{"key": []}, {}],
    }


def _schemas(operations: list[Operation]) -> tuple[dict[tuple[type[BaseModel], str], Json], Json]:
    """Give a reference to each model, and what they refer to."""
    found: dict[tuple[type[BaseModel], Any], None] = {(ErrorBody, "serialization"): None}
    for operation in operations:
        if operation.takes is not None:
            found[operation.takes, "validation"] = None
        for given in (operation.gives, operation.fails):
            if isinstance(given, type):
                found[given, "serialization"] = None
    refs, made = models_json_schema(list(found), ref_template=REF)
    return {(model, mode): ref for (model, mode), ref in refs.items()}, made.get("$defs", {})  # type: ignore[misc]


def _described(operation: Operation, refs: dict[tuple[type[BaseModel], str], Json]) -> Json:
    content = _content(operation, refs)
    error = {"application/json": {"schema": refs[operation.fails or ErrorBody, "serialization"]}}
    described: Json = {
        "summary": operation.about,
        "operationId": f"{operation.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', operation.path).rstrip('_')}",
        "responses": {"200": {"description": "The answer.", "content": content}},
    }
    also = WITH_BODY if operation.takes is not None else ()
    for status in sorted({*USUAL, *also, *operation.errors}):
        described["responses"][str(status)] = {"description": PHRASES.get(status, "Overloaded"), "content": error}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in PLACEHOLDER.findall(operation.path)
    ]
    if parameters:
        described["parameters"] = parameters
    if operation.takes is not None:
        body = {"application/json": {"schema": refs[operation.takes, "validation"]}}
        described["requestBody"] = {"required": True, "content": body}
    return described


def _content(operation: Operation, refs: dict[tuple[type[BaseModel], str], Json]) -> Json:
    if isinstance(operation.gives, str):
        return {operation.gives: {"schema": {"type": "string"}}}
    content: Json = {"application/json": {"schema": refs[operation.gives, "serialization"]}}
    if operation.streams:
        content["text/event-stream"] = {"schema": EVENT}
    return content
