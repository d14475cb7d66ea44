"""The body of a request: read within a limit, and checked against its model."""

from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import ClientDisconnect, Request

from auraflux.serve.failures import Failure, failure_of
from auraflux.serve.limits import Limits

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M], limits: Limits) -> M:
    """Read a request's JSON as that model; a Failure says what is wrong with it."""
    raw = await read(request, limits.body_nbytes)
    try:
        # unlike Python's own, this reader refuses NaN, halves of characters and nesting without end
        content = from_json(raw, allow_inf_nan=False)
    except ValueError as err:
        raise Failure(400, f"The body is not JSON that can be read: {err}.", code="invalid_json") from err
    if not isinstance(content, dict):
        raise Failure(400, "The body must be a JSON object.", code="invalid_json")
    try:
        return model.model_validate(content)
    except ValidationError as err:
        raise failure_of(err) from err


async def read(request: Request, most: int) -> bytes:
    """Read a request's body; Failure 413 where it is larger than that."""
    too_large = Failure(413, f"The body is larger than the {most} bytes this server takes.", code="body_too_large")
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told[:20]) > most:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
    except ClientDisconnect as err:
        raise Failure(499, "The client left before its request was read.") from err
    return b"".join(parts)
