"""What a client is told when there is no answer: a status, and a body in OpenAI's shape."""

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from auraflux.errors import AurafluxError, BusyError, ContextError, FormatError, InputError, SettingsError, TemplateError
from auraflux.serve.deltas import Finish

FINAL = {"x-should-retry": "false"}
LATER = {"retry-after": "1"}
LONGEST = 1000  # characters of a message: it may quote the request
KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
KIND = re.compile(r"str|[A-Z]\w*|(list|dict|literal)\[.*")  # as pydantic calls what a field may be
# two or more folders, as paths have and prose has not; the routes of the API are no secret
PATH = re.compile(r"(?!/v1/)(?:/[\w.@+~-]+){2,}/?")


class Failure(AurafluxError):
    """What a client is told instead of an answer.

    status   of the response, or what it would be if it had not begun
    code     a word for programs
    param    the field that is wrong
    headers  that tell when to try again, or not to
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
        """The error's type as OpenAI calls it."""
        return KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")


def failure_of(err: BaseException) -> Failure:
    """Say what a client is told of an exception; of one that nobody expected, nothing."""
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
    return Failure(500, "The server failed; its log has the reason under this request id.", code="internal_error")


def failure_of_finish(finish: Finish) -> Failure | None:
    """Say what a client is told of an answer that did not come to its end; None for one that did."""
    if finish.reason == "error":
        return Failure(500, without_paths(finish.error or "The model failed."), code="generation_failed")
    if finish.reason == "cancelled":
        return Failure(503, "The answer was stopped by the server.", code="stopped", headers=LATER)
    return None


def check_finish(finish: Finish) -> None:
    """Raise the failure of an answer that did not come to its end."""
    failure = failure_of_finish(finish)
    if failure is not None:
        raise failure


def not_ready(message: str) -> Failure:
    return Failure(503, message, code="not_ready", headers=LATER)


def body_of(failure: Failure) -> dict[str, Any]:
    """Spell a failure as OpenAI does."""
    error = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
    return {"error": error}


def response_of(failure: Failure) -> Response:
    """Make the response of a failure."""
    content = json.dumps(body_of(failure))
    return Response(content, failure.status, failure.headers, media_type="application/json")


def sentence(err: BaseException) -> str:
    """Give an exception's message on one line, without paths."""
    return without_paths(" ".join(str(err).split()) or "The request cannot be answered.")


def without_paths(message: str) -> str:
    """Leave out where files are on this machine."""
    return PATH.sub("a file", message)


def _invalid(err: ValidationError) -> Failure:
    """Name the first field that is wrong, and what it may be."""
    found = err.errors(include_url=False, include_input=False, include_context=False)
    first = found[0]["loc"]
    field = first[: next((at for at, part in enumerate(first) if _is_kind(part)), len(first))]
    # of several kinds that a field may be of, the one that is wrong further inside was meant
    meant = max((_place(each["loc"]) for each in found if each["loc"][: len(field)] == field), key=len)
    told = " or ".join(dict.fromkeys(each["msg"] for each in found if _place(each["loc"]) == meant))
    message = told.replace(" or Input should be ", " or ").removeprefix("Value error, ").rstrip(".")
    where = ".".join(map(str, meant))
    return Failure(400, f"{where}: {message}." if where else f"{message}.", code="invalid_value", param=where or None)


def _is_kind(part: str | int) -> bool:
    """Whether it is no field of the request but a kind that pydantic tried for one."""
    return isinstance(part, str) and KIND.fullmatch(part) is not None


def _place(loc: tuple[str | int, ...]) -> tuple[str | int, ...]:
    return tuple(part for part in loc if not _is_kind(part))


def _of_routing(err: HTTPException) -> Failure:
    told = {404: "There is nothing at this path.", 405: "This path does not take this method."}
    return Failure(err.status_code, told.get(err.status_code, str(err.detail)), headers=err.headers)
