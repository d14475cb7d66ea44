"""Responses when a replica is lost: nothing twice, nothing missing, errors in each API's format."""

import asyncio
import json
from typing import Any

import pytest

from auraflux.serve.failures import Failure
from auraflux.serve.replicas.response_stream import ResponseStream, error_event_for
from auraflux.serve.transport.sse import ALIVE

CHAT = "/v1/chat/completions"
STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
JSON = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
GONE = Failure(503, "The replica was lost.", code="replica_gone")


def chunk(text: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": True}


def sent(*steps: Any, path: str = CHAT) -> tuple[list[Any], bool]:
    """Return what the client receives for a sequence of messages; None stands for a lost replica."""
    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message.get("body", message.get("status")))

    async def run() -> bool:
        stream = ResponseStream(send, path)
        for step in steps:
            if step is None:
                stream.reset()
            elif isinstance(step, Failure):
                await stream.fail(step, {"type": "http", "path": path})
            else:
                await stream.send(step)
        return stream.committed

    committed = asyncio.run(run())
    return found, committed


def test_stream_is_forwarded():
    assert sent(STREAM, chunk(b"open"), chunk(b"a"), chunk(b"b")) == ([200, b"open", b"a", b"b"], True)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_opening_event_is_held_back(path: str):
    assert sent(STREAM, chunk(b"open"), path=path) == ([], False)
    assert sent(STREAM, chunk(b"open"), None, STREAM, chunk(b"again"), chunk(b"a"), path=path) == ([200, b"again", b"a"], True)


def test_completions_stream_has_no_opening_event():
    assert sent(STREAM, chunk(b"a"), path="/v1/completions") == ([200, b"a"], True)


def test_keep_alive_comments_are_forwarded_before_output():
    assert sent(STREAM, chunk(b"open"), chunk(ALIVE), None, STREAM, chunk(b"again"), chunk(b"a")) == (
        [200, ALIVE, b"again", b"a"],
        True,
    )


def test_json_response_is_forwarded():
    assert sent(JSON, chunk(b"{}")) == ([200, b"{}"], True)
    assert sent(JSON, None, JSON, chunk(b"{}")) == ([200, b"{}"], True)


def test_failure_before_output_is_an_error_response():
    found, _ = sent(STREAM, chunk(b"open"), GONE)
    assert found[0] == 503
    assert json.loads(found[1])["error"]["code"] == "replica_gone"


def test_failure_after_output_ends_the_stream():
    found, _ = sent(STREAM, chunk(b"open"), chunk(b"a"), GONE)
    assert found[:3] == [200, b"open", b"a"]
    assert json.loads(found[3].removeprefix(b"data: "))["error"]["code"] == "replica_gone"


def test_failed_retry_of_a_started_stream():
    refused = {**JSON, "status": 429}
    found, _ = sent(STREAM, chunk(ALIVE), None, refused, chunk(b"{}"))
    assert found[:2] == [200, ALIVE]
    assert "429" in json.loads(found[2].removeprefix(b"data: "))["error"]["message"]


def test_errors_in_each_api_format():
    assert error_event_for(GONE, "/v1/messages").startswith(b"event: error\n")
    responses = error_event_for(GONE, "/v1/responses").decode()
    assert responses.startswith("event: error\n")
    assert json.loads(responses.partition("data: ")[2])["code"] == "replica_gone"
