"""The requests of a batch: one JSON object per line, as in OpenAI's Batch API."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from auraflux.errors import InputError

ENDPOINTS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/rerank")
MAX_LINES = 50_000
MAX_ID = 512
MAX_LINE_NBYTES = 8 << 20


@dataclass(frozen=True)
class BatchLine:
    """A request.

    number  of its line, from 1
    id      given by the client, unique in the file
    """

    number: int
    id: str
    url: str
    body: dict[str, Any]


def read_lines(lines: Iterable[bytes], endpoint: str | None = None) -> Iterator[BatchLine]:
    """Yield the requests; refuse a file with an invalid line, naming it.

    endpoint  that all requests must have; None for any
    """
    seen: set[str] = set()
    for number, raw in enumerate(lines, 1):
        if not raw.strip():
            continue
        line = _parse(number, raw, endpoint)
        if line.id in seen:
            raise InputError(f"line {number} repeats the custom_id {line.id!r:.80}; give every request its own.")
        seen.add(line.id)
        if len(seen) > MAX_LINES:
            raise InputError(f"the file has more than {MAX_LINES:,} requests; split it.")
        yield line
    if not seen:
        raise InputError("the file has no requests. Write one JSON object per line: custom_id, method, url and body.")


def _parse(number: int, raw: bytes, endpoint: str | None) -> BatchLine:
    if len(raw) > MAX_LINE_NBYTES:
        raise InputError(f"line {number} has {len(raw):,} bytes; the limit is {MAX_LINE_NBYTES:,}.")
    try:
        found = from_json(raw, allow_inf_nan=False)
    except ValueError as err:
        raise InputError(f"line {number} is not valid JSON: {err}.") from err
    if not isinstance(found, dict):
        raise InputError(f"line {number} is not a JSON object.")
    id, url, body = found.get("custom_id"), found.get("url"), found.get("body")
    if not isinstance(id, str) or not 0 < len(id) <= MAX_ID:
        raise InputError(f"line {number} has no custom_id of 1 to {MAX_ID} characters.")
    if found.get("method", "POST") != "POST":
        raise InputError(f"line {number}: method is {found['method']!r:.40}; it must be POST.")
    if url not in ENDPOINTS:
        raise InputError(f"line {number}: url is {url!r:.80}; it may be {', '.join(ENDPOINTS)}.")
    if endpoint is not None and url != endpoint:
        raise InputError(f"line {number}: url is {url}, and the batch's endpoint is {endpoint}.")
    if not isinstance(body, dict):
        raise InputError(f"line {number} has no body, which is an object: the request.")
    if body.get("stream"):
        raise InputError(f"line {number} asks for a stream; a batch returns complete responses.")
    return BatchLine(number, id, str(url), body)
