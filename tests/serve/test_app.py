"""The server around the APIs: authentication, invalid bodies, disconnects, metrics, readiness."""

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from starlette.types import ASGIApp

from auraflux.serve.app import make_app
from auraflux.serve.auth import LOOPBACK, Access
from auraflux.serve.limits import Limits
from auraflux.serve.service import Service
from auraflux.serve.transport import sse
from tests.serve.fake_link import FakeLink, Script, serving

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "the secret word is xylophone"}]}
STALL = Script(("Hel", "lo"), None)


def client_of(link: FakeLink | None = None, access: Access | None = None, limits: Limits | None = None) -> TestClient:
    return TestClient(make_app(Service(link or FakeLink(), limits), access))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
        b'{"seed": ' + b"9" * 400_000 + b"}",
        b"[" * 100_000,
        b'{"messages": ' + b'{"a":' * 50_000,
    ],
    ids=lambda body: repr(body[:70]),
)
def test_invalid_body_is_refused(body: bytes):
    for path in (
        CHAT,
        "/v1/completions",
        "/v1/responses",
        "/v1/messages",
        "/tokenize",
        "/detokenize",
        "/v1/experts/placement",
        "/v1/experts/deal",
    ):
        answer = client_of().post(path, content=body)
        assert answer.status_code == 400, path
        assert answer.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("field", "value"), [("temperature", b"1e999"), ("seed", b"9" * 4000), ("max_tokens", b"9" * 20), ("n", b"1.5")]
)
def test_out_of_range_number_is_refused(field: str, value: bytes):
    body = b'{"messages": [{"role": "user", "content": "x"}], "prompt": "x", "%s": %s}' % (field.encode(), value)
    for path in (CHAT, "/v1/completions"):
        answer = client_of().post(path, content=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


@pytest.mark.parametrize(
    ("path", "field", "value", "message"),
    [
        (CHAT, "stop", 3, "stop: Input should be a valid string or a valid list."),
        (CHAT, "stop", ["a", 3], "stop.1: Input should be a valid string."),
        (CHAT, "messages", [{"role": "user", "content": [{"text": "x"}]}], "messages.0.content.0.type: Field required."),
        (CHAT, "tool_choice", {"type": "function"}, "tool_choice.function: Field required."),
        ("/v1/completions", "prompt", None, "prompt: Input should be a valid string or a valid list."),
    ],
)
def test_union_field_error_names_the_field(path: str, field: str, value: Any, message: str):
    error = client_of().post(path, json={**HELLO, "prompt": "x", field: value}).json()["error"]
    assert (error["message"], error["param"]) == (message, message.split(":")[0])


def test_missing_model_name_selects_the_served_model():
    bodies = {CHAT: HELLO, "/v1/completions": {"prompt": "x"}, "/v1/responses": {"input": "x"}}
    bodies |= {"/v1/messages": {**HELLO, "max_tokens": 5}, "/v1/messages/count_tokens": HELLO}
    for path, body in bodies.items():
        assert client_of().post(path, json=body).status_code == 200, path


def test_large_body_is_refused_before_it_is_read():
    read = 0

    def parts() -> Iterator[bytes]:
        nonlocal read
        for _ in range(1000):
            read += 1
            yield b"x" * 1000

    client = client_of(limits=Limits(body_nbytes=5000))
    assert client.post(CHAT, content=b"x" * 5001).status_code == 413
    answer = client.post(CHAT, content=parts())
    assert answer.status_code == 413
    assert "5000 bytes" in answer.json()["error"]["message"]


def test_unknown_paths_and_methods():
    client = client_of()
    assert client.get("/v2/nothing").json()["error"]["type"] == "not_found_error"
    answer = client.get(CHAT)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert "error" in answer.json()
    assert client.get("/v1/messages").json()["type"] == "error"


def test_unexpected_exception_reveals_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    def broken(*given: Any) -> None:
        raise KeyError("/srv/secret")

    monkeypatch.setattr("auraflux.serve.chat.prompts.grammar_for", broken)
    for path, body in ((CHAT, HELLO), ("/v1/messages", {**HELLO, "model": "toy/model", "max_tokens": 5})):
        caplog.clear()
        answer = client_of().post(path, json=body)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.headers["x-request-id"] in caplog.text
        assert "KeyError" in caplog.text


def test_request_id_and_log_without_prompts(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    client = client_of()
    answer = client.post(CHAT, json=HELLO, headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"
    assert "mine-1" in caplog.text
    odd = client.post(CHAT, json=HELLO, headers={"x-request-id": "no\tgood id"}).headers["x-request-id"]
    assert len(odd) == 32
    assert client.get("/nothing").headers["x-request-id"]
    assert "xylophone" not in caplog.text


def test_key_is_required_except_on_public_paths():
    client = client_of(access=Access(keys=("first", "schlüssel")))
    for path in ("/health", "/ready", "/"):
        assert client.get(path).status_code == 200
    for path in ("/v1/models", "/metrics", "/openapi.json", "/nothing"):
        assert client.get(path).status_code == 401
    refused = client.post(CHAT, json=HELLO, headers={"authorization": "Bearer wrong"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
    assert client.post("/v1/messages", json={}).json()["error"]["type"] == "authentication_error"
    assert client.get("/v1/models", headers={"authorization": "bearer first"}).status_code == 200
    assert client.get("/v1/models", headers={"x-api-key": "first"}).status_code == 200
    assert client.get("/v1/models", headers={"authorization": "Basic first"}).status_code == 401


def test_callers_are_separate_users_of_the_queue():
    link = FakeLink()
    client = client_of(link, Access(keys=("one", "two")))
    for key, user in (("one", None), ("two", None), ("two", "ann")):
        client.post(CHAT, json={**HELLO, "user": user}, headers={"authorization": f"Bearer {key}"})
    users = [request.user for request in link.requests]
    assert len(set(users)) == 3
    assert users[2] == f"{users[1]}/ann"
    assert not any(key in user for key in ("one", "two") for user in users)


@pytest.mark.parametrize(
    ("host", "status"), [("localhost:80", 200), ("127.0.0.1", 200), ("[::1]:8000", 200), ("evil.test", 403)]
)
def test_loopback_server_checks_the_host_header(host: str, status: int):
    assert client_of(access=Access(hosts=LOOPBACK)).get("/health", headers={"host": host}).status_code == status


def test_cors_only_for_configured_origins():
    preflight = {"origin": "https://chat.test", "access-control-request-method": "POST"}
    assert client_of().options(CHAT, headers=preflight).status_code == 405
    assert "access-control-allow-origin" not in client_of().get("/health", headers=preflight).headers
    client = client_of(access=Access(keys=("k",), origins=("https://chat.test",)))
    assert client.options(CHAT, headers=preflight).headers["access-control-allow-origin"] == "https://chat.test"
    assert client.get("/v1/models", headers=preflight).headers["access-control-allow-origin"] == "https://chat.test"
    assert client.options(CHAT, headers={**preflight, "origin": "https://evil.test"}).status_code == 400


def test_health_and_readiness_while_loading():
    link = FakeLink(ready=False)
    client = client_of(link)
    assert client.get("/health").status_code == 200
    for answer in (client.get("/ready"), client.post(CHAT, json=HELLO), client.get("/v1/models")):
        assert answer.status_code == 503
        assert answer.headers["retry-after"] == "1"
        assert "loaded" in answer.json()["error"]["message"]
    assert client.get("/metrics").status_code == 200
    link.load()
    assert client.get("/ready").status_code == 200


def test_http_process_does_not_import_torch():
    code = "import sys, auraflux.serve.app; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"


def test_metric_names():
    client = client_of(FakeLink("one two three"))
    client.post(CHAT, json=HELLO)
    text = client.get("/metrics").text
    label = '{model_name="toy/model"}'
    for line in (
        f"auraflux:num_requests_running{label} 1.0",
        f"auraflux:num_requests_waiting{label} 2.0",
        f"auraflux:kv_cache_usage_perc{label} 0.25",
        f"auraflux:prefix_cache_queries_total{label} 100.0",
        f"auraflux:prefix_cache_hits_total{label} 40.0",
        f"auraflux:num_preemptions_total{label} 5.0",
        f"auraflux:time_to_first_token_seconds_count{label} 1.0",
        f"auraflux:e2e_request_latency_seconds_count{label} 1.0",
        f"auraflux:request_queue_time_seconds_sum{label} 0.25",
        'auraflux:request_success_total{finished_reason="stop",model_name="toy/model"} 1.0',
        f"auraflux:spec_decode_num_draft_tokens_total{label} 20.0",
        f"auraflux:spec_decode_num_accepted_tokens_total{label} 15.0",
        f"auraflux:expert_cache_hits_total{label} 6.0",
    ):
        assert line in text
    tokens = next(line for line in text.splitlines() if line.startswith("auraflux:generation_tokens_total"))
    between = next(line for line in text.splitlines() if line.startswith("auraflux:inter_token_latency_seconds_count"))
    # tokens in the first output have no inter-token latency
    first = len(FakeLink().tokenizer.encode("one"))
    assert float(tokens.split()[-1]) - first == float(between.split()[-1]) > 0


async def drive(app: ASGIApp, body: dict[str, Any], send: Callable[[Any], Awaitable[None]], left: asyncio.Event) -> None:
    """Call the application as a server does, for a client that disconnects when `left` is set."""
    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "headers": [], "query_string": b""}
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    await asyncio.wait_for(app(scope, receive, send), 10)


@pytest.mark.parametrize("more", [{}, {"stream": True}, {"stream": True, "n": 2}], ids=str)
def test_disconnect_cancels_requests(more: dict[str, Any]):
    link = FakeLink(STALL)
    service = Service(link)

    async def run() -> None:
        left = asyncio.Event()

        async def send(message: Any) -> None:
            pass

        async def leave() -> None:
            while not left.is_set():
                await asyncio.sleep(0.001)
                if link.streams and all(stream.outputs == 2 for stream in link.streams):
                    left.set()

        leaving = asyncio.ensure_future(leave())
        await drive(make_app(service), {**HELLO, **more}, send, left)
        await leaving

    asyncio.run(run())
    assert len(link.streams) == more.get("n", 1)
    assert all(stream.cancelled for stream in link.streams)
    assert service.active == 0


def test_stalled_client_is_dropped():
    link = FakeLink(Script(tuple("x" * 1000)))
    service = Service(link, Limits(idle_s=0.05))
    sent = []

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) > 5:
            await asyncio.Event().wait()

    asyncio.run(drive(make_app(service), {**HELLO, "stream": True}, send, asyncio.Event()))
    assert link.streams[0].cancelled
    # output that nobody reads is not generated
    assert link.streams[0].outputs < 10
    assert service.active == 0


def test_keep_alive_comments(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sse, "ALIVE_S", 0.01)
    left = asyncio.Event()

    async def send(message: Any) -> None:
        if message.get("body") == sse.ALIVE:
            left.set()

    asyncio.run(drive(make_app(Service(FakeLink(STALL))), {**HELLO, "stream": True}, send, left))
    assert left.is_set()


def test_drain_finishes_running_requests_and_refuses_new_ones():
    link = FakeLink(STALL)
    service = Service(link)
    app = make_app(service)
    bodies: list[bytes] = []

    async def send(message: Any) -> None:
        bodies.append(message.get("body", b""))

    async def run() -> None:
        running = asyncio.ensure_future(drive(app, {**HELLO, "stream": True}, send, asyncio.Event()))
        while not link.streams or link.streams[0].outputs < 2:
            await asyncio.sleep(0.001)
        draining = asyncio.ensure_future(service.drain(0.02))
        await asyncio.sleep(0)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            refused = await client.post(CHAT, json=HELLO)
            assert (refused.status_code, (await client.get("/ready")).status_code) == (503, 503)
            assert (await client.get("/health")).status_code == 200
        await draining
        await running

    asyncio.run(run())
    assert service.active == 0
    assert b"stopped by the server" in b"".join(bodies)


def test_disconnect_over_a_real_connection():
    link = FakeLink(STALL)
    service = Service(link)
    with serving(make_app(service)) as url:
        with httpx.stream("POST", url + CHAT, json={**HELLO, "stream": True}) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
        for _ in range(1000):
            if link.streams[0].cancelled and not service.active:
                break
            httpx.get(url + "/health")
    assert link.streams[0].cancelled
    assert service.active == 0


def test_error_message_is_truncated():
    parts = [{"type": "x" * 5000, "text": "hi"}]
    answer = client_of().post(CHAT, json={"messages": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert len(answer.json()["error"]["message"]) < 1100
