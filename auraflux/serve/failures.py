"""Errors as HTTP responses: a status, and a body in OpenAI's format."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from auraflux.errors import AurafluxError, BusyError, ContextError, FormatError, InputError, SettingsError, TemplateError
from auraflux.serve.chat.deltas import Finish

FINAL = {"x-should-retry": "false"}
LATER = {"retry-after": "1"}
LONGEST = 1000  # characters of a message, which may quote the request
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
KIND = re.compile(r"str|[A-Z]\w*|(list|dict|literal)\[.*")  # names that pydantic gives to the branches of a union
# file paths: two or more components; the API's routes may be shown
PATH = re.compile(r"(?!/v1/)(?:/[\w.@+~-]+){2,}/?")


class Failure(AurafluxError):
    """An error response.

    status   HTTP status, also of an error within a stream
    code     machine-readable error code
    param    name of the invalid field
    headers  extra headers, such as retry-after
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        message = message if len(message) <= LONGEST else f"{message[:LONGEST]}..."
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = dict(FINAL if status in (400, 401, 403, 404, 405, 413) else {}) | dict(headers or {})

    @property
    def kind(self) -> str:
        """OpenAI's error type."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def failure_of(err: BaseException) -> Failure:
    """Return the error response of an exception; an unexpected one reveals nothing."""
    if isinstance(err, Failure):
        return err
    if isinstance(err, BusyError):
        return Failure(429, sentence(err), code="queue_full", headers=LATER)
    if isinstance(err, ContextError):
        return Failure(400, sentence(err), code="context_length_exceeded", param="messages")
    if isinstance(err, InputError | TemplateError | FormatError | SettingsError):
        return Failure(400, sentence(err), code="invalid_value")
    if isinstance(err, ValidationError):
        return _invalid(err)
    if isinstance(err, HTTPException):
        return _of_routing(err)
    return Failure(500, "Internal server error; the server's log has the cause under this request id.", code="internal_error")


def failure_of_finish(finish: Finish) -> Failure | None:
    """Return the failure of an answer that was interrupted; None for a complete one."""
    if finish.reason == "error":
        return Failure(500, without_paths(finish.error or "The model failed."), code="generation_failed")
    if finish.reason == "cancelled":
        return Failure(503, "The answer was stopped by the server.", code="stopped", headers=LATER)
    return None


def check_finish(finish: Finish) -> None:
    """Raise the failure of an answer that was interrupted."""
    failure = failure_of_finish(finish)
    if failure is not None:
        raise failure


def not_ready(message: str) -> Failure:
    return Failure(503, message, code="not_ready", headers=LATER)


def error_body(failure: Failure) -> dict[str, Any]:
    """Return a failure in OpenAI's format."""
    error = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return {"error": error}


def error_response(failure: Failure) -> Response:
    """Return the HTTP response of a failure."""
    content = json.dumps(error_body(failure))
    return Response(content, failure.status, failure.headers, media_type="application/json")


def sentence(err: BaseException) -> str:
    """Return an exception's message on one line, without file paths."""
    return without_paths(" ".join(str(err).split()) or "The request failed.")


def without_paths(message: str) -> str:
    """Replace file paths, which would reveal the machine's layout."""
    return PATH.sub("a file", message)


def _invalid(err: ValidationError) -> Failure:
    """Name the first invalid field and its allowed values."""
    found = err.errors(include_url=False, include_input=False, include_context=False)
    first = found[0]["loc"]
    field = first[: next((at for at, part in enumerate(first) if _is_kind(part)), len(first))]
    # of several union branches, the one that fails deepest is the one the client meant
    meant = max((_field_path(each["loc"]) for each in found if each["loc"][: len(field)] == field), key=len)
    messages = " or ".join(dict.fromkeys(each["msg"] for each in found if _field_path(each["loc"]) == meant))
    message = messages.replace(" or Input should be ", " or ").removeprefix("Value error, ").rstrip(".")
    where = ".".join(map(str, meant))
    return Failure(400, f"{where}: {message}." if where else f"{message}.", code="invalid_value", param=where or None)


def _is_kind(part: str | int) -> bool:
    """Return whether a path component is a union branch of pydantic rather than a field."""
    return isinstance(part, str) and KIND.fullmatch(part) is not None


def _field_path(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return tuple(part for part in loc if not _is_kind(part))


def _of_routing(err: HTTPException) -> Failure:
    messages = {404: "Unknown path.", 405: "Method not allowed for this path."}
    return Failure(err.status_code, messages.get(err.status_code, str(err.detail)), headers=err.headers)
