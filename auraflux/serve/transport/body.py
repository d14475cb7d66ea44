"""Request bodies: read up to a size limit and validated against a schema."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from auraflux.serve.failures import Failure, failure_of
from auraflux.serve.limits import Limits

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M], limits: Limits) -> M:
    """Read a request's JSON body as a pydantic model; raise Failure if it is invalid."""
    raw = await read(request, limits.body_nbytes)
    try:
        # unlike `json`, it refuses NaN, lone surrogates and unbounded nesting
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as err:
        raise Failure(400, f"The body is not valid JSON: {err}.", code="invalid_json") from err
    if not isinstance(content, dict):
        raise Failure(400, "The body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(content)
    except ValidationError as err:
        raise failure_of(err) from err


async def read(request: Request, most: int) -> bytes:
    """Read a request's body; raise Failure 413 if it has more than `most` bytes."""
    too_large = Failure(413, f"The body is larger than the {most} bytes this server takes.", code="body_too_large")
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > most:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
    except ClientDisconnect as err:
        raise Failure(499, "The client disconnected before its request was read.") from err
    return b"".join(parts)
