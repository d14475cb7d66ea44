"""What a client is sent when the replica that answers it is gone: nothing twice, nothing missing, and errors it understands."""

import asyncio
import json
from typing import Any

import pytest

from auraflux.serve.failures import Failure
from auraflux.serve.replicas.line import Line, in_band
from auraflux.serve.stream import ALIVE

CHAT = "/v1/chat/completions"
STREAM = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}
WHOLE = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
GONE = Failure(503, "The replica is gone.", code="replica_gone")


def part(text: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text, "more_body": True}


def sent(*steps: Any, path: str = CHAT) -> tuple[list[Any], bool]:
    """What goes to the client of messages; None for a replica that is gone, a failure for the last of them."""
    found: list[Any] = []

    async def send(message: Any) -> None:
        found.append(message.get("body", message.get("status")))

    async def run() -> bool:
        line = Line(send, path)
        for step in steps:
            if step is None:
                line.forget()
            elif isinstance(step, Failure):
                await line.fail(step, {"type": "http", "path": path})
            else:
                await line.take(step)
        return line.told

    told = asyncio.run(run())
    return found, told


def test_a_stream_is_passed_on():
    assert sent(STREAM, part(b"open"), part(b"a"), part(b"b")) == ([200, b"open", b"a", b"b"], True)


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses"])
def test_what_opens_a_stream_tells_nothing_of_the_answer(path: str):
    assert sent(STREAM, part(b"open"), path=path) == ([], False)
    assert sent(STREAM, part(b"open"), None, STREAM, part(b"again"), part(b"a"), path=path) == ([200, b"again", b"a"], True)


def test_completions_begin_with_the_answer():
    assert sent(STREAM, part(b"a"), path="/v1/completions") == ([200, b"a"], True)


def test_a_client_that_waits_is_told_that_the_server_is_alive():
    assert sent(STREAM, part(b"open"), part(ALIVE), None, STREAM, part(b"again"), part(b"a")) == (
        [200, ALIVE, b"again", b"a"],
        True,
    )


def test_whole_answers_are_passed_on():
    assert sent(WHOLE, part(b"{}")) == ([200, b"{}"], True)
    assert sent(WHOLE, None, WHOLE, part(b"{}")) == ([200, b"{}"], True)


def test_failures_have_a_status_before_anything_was_sent():
    found, _ = sent(STREAM, part(b"open"), GONE)
    assert found[0] == 503
    assert json.loads(found[1])["error"]["code"] == "replica_gone"


def test_failures_come_in_the_stream_afterwards():
    found, _ = sent(STREAM, part(b"open"), part(b"a"), GONE)
    assert found[:3] == [200, b"open", b"a"]
    assert json.loads(found[3].removeprefix(b"data: "))["error"]["code"] == "replica_gone"


def test_another_replica_may_refuse_what_had_begun():
    refused = {**WHOLE, "status": 429}
    found, _ = sent(STREAM, part(ALIVE), None, refused, part(b"{}"))
    assert found[:2] == [200, ALIVE]
    assert "429" in json.loads(found[2].removeprefix(b"data: "))["error"]["message"]


def test_errors_are_spelled_as_each_api_does():
    assert in_band(GONE, "/v1/messages").startswith(b"event: error\n")
    responses = in_band(GONE, "/v1/responses").decode()
    assert responses.startswith("event: error\n")
    assert json.loads(responses.partition("data: ")[2])["code"] == "replica_gone"
