"""/v1/files and /v1/batches: OpenAI's Files and Batch APIs."""

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from auraflux.serve.batch.batches import Batches
from auraflux.serve.batch.multipart import parse_form
from auraflux.serve.batch.schema import BatchList, BatchRequest, BatchState, DeletedFile, FileList, StoredFile
from auraflux.serve.failures import Failure
from auraflux.serve.operation import Endpoint, Operation
from auraflux.serve.services import Services
from auraflux.serve.transport.body import read, read_body

BLOCK = 1 << 16
PURPOSES = ("batch", "user_data", "assistants", "fine-tune", "vision", "evals")
Handler = Callable[[Batches, Request], Any]


def routes(services: Services, batches: Batches | None) -> list[Route]:
    """Return the routes; without `batches` they tell how to enable them."""

    async def upload(batches: Batches, request: Request) -> Response:
        body = await read(request, services.limits.file_nbytes)
        form = parse_form(request.headers.get("content-type", ""), body)
        purpose = form.fields.get("purpose", "")
        if form.content is None or purpose not in PURPOSES:
            raise Failure(400, f"A file and a purpose are needed; purposes: {', '.join(PURPOSES)}.", code="invalid_value")
        about = await asyncio.to_thread(batches.files.add, _owner(request), form.filename, purpose, form.content)
        return JSONResponse(about)

    async def list_files(batches: Batches, request: Request) -> Response:
        found = await asyncio.to_thread(batches.files.listed, _owner(request))
        purpose = request.query_params.get("purpose")
        return _page(request, [each for each in found if purpose in (None, each["purpose"])])

    async def about_file(batches: Batches, request: Request) -> Response:
        return JSONResponse(batches.files.about(_owner(request), request.path_params["file_id"]))

    async def content(batches: Batches, request: Request) -> Response:
        path = batches.files.content(_owner(request), request.path_params["file_id"])
        return StreamingResponse(_blocks(path), media_type="application/octet-stream")

    async def delete(batches: Batches, request: Request) -> Response:
        id = request.path_params["file_id"]
        await asyncio.to_thread(batches.files.delete, _owner(request), id)
        return JSONResponse({"id": id, "object": "file", "deleted": True})

    async def create(batches: Batches, request: Request) -> Response:
        body = await read_body(request, BatchRequest, services.limits)
        arguments = (body.input_file_id, body.endpoint, body.completion_window, body.metadata or {})
        return JSONResponse(await asyncio.to_thread(batches.create, _owner(request), *arguments))

    async def list_batches(batches: Batches, request: Request) -> Response:
        return _page(request, await asyncio.to_thread(batches.listed, _owner(request)))

    async def about_batch(batches: Batches, request: Request) -> Response:
        return JSONResponse(batches.get(_owner(request), request.path_params["batch_id"]))

    async def cancel(batches: Batches, request: Request) -> Response:
        return JSONResponse(batches.cancel(_owner(request), request.path_params["batch_id"]))

    def enabled(handler: Handler) -> Endpoint:
        async def endpoint(request: Request) -> Response:
            if batches is None:
                message = "This server keeps no files: start it with --files FOLDER for /v1/files and /v1/batches."
                raise Failure(404, message, code="files_disabled")
            return await handler(batches, request)

        return endpoint

    operation = partial(_operation, enabled)
    return [
        # a form has no schema here
        Route("/v1/files", enabled(upload), methods=["POST"]),
        operation("GET", "/v1/files", list_files, "List files.", FileList),
        operation("GET", "/v1/files/{file_id}", about_file, "Describe a file.", StoredFile),
        operation("GET", "/v1/files/{file_id}/content", content, "Return the content of a file.", "application/octet-stream"),
        operation("DELETE", "/v1/files/{file_id}", delete, "Delete a file.", DeletedFile),
        operation("POST", "/v1/batches", create, "Run the requests of a file.", BatchState, BatchRequest),
        operation("GET", "/v1/batches", list_batches, "List batches.", BatchList),
        operation("GET", "/v1/batches/{batch_id}", about_batch, "Describe a batch.", BatchState),
        operation("POST", "/v1/batches/{batch_id}/cancel", cancel, "Stop a batch.", BatchState),
    ]


def _operation(
    enabled: Callable[[Handler], Endpoint],
    method: str,
    path: str,
    handler: Handler,
    summary: str,
    response: Any,
    request: Any = None,
) -> Operation:
    about: dict[str, Any] = {"summary": summary, "response": response, "request": request, "statuses": (400, 404)}
    return Operation(path, enabled(handler), method=method, **about)


def _owner(request: Request) -> str:
    """Return whose files these are: those of an API key, or of everybody where the server has none."""
    return str(request.scope.get("state", {}).get("caller", ""))


def _page(request: Request, found: list[dict[str, Any]]) -> Response:
    """Return a page of a list, as `limit` and `after` ask for."""
    limit, after = request.query_params.get("limit", "100"), request.query_params.get("after")
    if not (limit.isascii() and limit.isdecimal() and 1 <= int(limit[:9]) <= 10_000):
        raise Failure(400, f"limit is {limit[:40]!r}; give a number from 1 to 10,000.", code="invalid_value", param="limit")
    ids = [each["id"] for each in found]
    if after is not None:
        found = found[ids.index(after) + 1 :] if after in ids else []
    page = found[: int(limit)]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(page) < len(found)})


async def _blocks(path: Path) -> AsyncIterator[bytes]:
    with path.open("rb") as file:
        while block := await asyncio.to_thread(file.read, BLOCK):
            yield block
