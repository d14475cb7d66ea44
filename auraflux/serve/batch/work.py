"""`run_lines`: the requests of a batch, several at once, each response in a journal when it is complete."""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp

from auraflux.serve.batch.inner_request import call
from auraflux.serve.batch.journal import Journal
from auraflux.serve.batch.lines import BatchLine
from auraflux.serve.transport.pipe import ENDED

# statuses after which a request is tried again: the queue is full, or the model is being loaded. The same holds where its
# process has ended: it may be loaded again, and else the server stops
AGAIN = (429, 503)
WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


async def run_lines(
    app: ASGIApp,
    lines: Iterable[BatchLine],
    *,
    outputs: Journal,
    errors: Journal,
    caller: str,
    at_once: int,
    on_done: Callable[[], None] = lambda: None,
) -> None:
    """Run the requests that no journal has.

    outputs, errors  of successful and of failed requests; may be the same
    """
    left = iter([line for line in lines if line.id not in outputs.done and line.id not in errors.done])

    async def worker() -> None:
        for line in left:
            status, request_id, body = await _answer(app, line, line.body, caller)
            response = {"status_code": status, "request_id": request_id, "body": body}
            entry = {"id": f"batch_req_{uuid4().hex}", "custom_id": line.id, "response": response, "error": None}
            (outputs if status == 200 else errors).append(line.id, entry)
            on_done()

    workers = [asyncio.ensure_future(worker()) for _ in range(at_once)]
    try:
        await asyncio.gather(*workers)
    finally:
        for each in workers:
            each.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


async def _answer(app: ASGIApp, line: BatchLine, body: dict[str, Any], caller: str) -> tuple[int, str, Any]:
    """Return the response to a request; try again while the server is busy."""
    wait_s = WAIT_S
    while True:
        status, request_id, found = await call(app, line.url, body, caller)
        if not _may_succeed(status, found):
            return status, request_id, found
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)


def _may_succeed(status: int, found: Any) -> bool:
    """Return whether a refused request may succeed later; not where a model can never be loaded."""
    error = found.get("error") or {} if isinstance(found, dict) else {}
    return (status in AGAIN and error.get("code") != "no_memory") or (status == 500 and error.get("message") == ENDED)
