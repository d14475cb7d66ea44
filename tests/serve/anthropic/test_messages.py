"""/v1/messages: conversations in, events and messages out, through Anthropic's own client."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic, AsyncAnthropic
from starlette.testclient import TestClient

from auraflux.engine.sampling import Sampling
from auraflux.errors import BusyError, ContextError, InputError
from auraflux.serve.anthropic.messages_events import stream
from auraflux.serve.anthropic.messages_request import to_conversation
from auraflux.serve.anthropic.messages_schema import MessagesRequest
from auraflux.serve.app import make_app
from auraflux.serve.chat.conversation import Format, NamedTool
from auraflux.serve.chat.deltas import Content, Delta, ToolCallArguments, ToolCallBegin
from auraflux.serve.failures import not_ready
from auraflux.serve.service import Service
from tests.serve.fake_link import DEFAULTS, NAME, FakeLink
from tests.serve.fake_service import CALLS, HELLO, THOUGHT, FakeService, end, served

WEATHER = {
    "name": "weather",
    "description": "Tell the weather.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
KEY = {"x-api-key": "k"}
HI = [{"role": "user", "content": "hi"}]


def request(**fields: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"model": "tiny", "max_tokens": 50, "messages": HI, **fields})


def messages_of(*messages: dict[str, Any], **fields: Any) -> list[dict[str, Any]]:
    return to_conversation(request(messages=list(messages), **fields), "me", DEFAULTS).messages


def test_tool_use_becomes_template_messages() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}}
    other = {"type": "tool_use", "id": "t2", "name": "clock", "input": {}}
    messages = messages_of(
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look.", "signature": ""},
                {"type": "redacted_thinking", "data": "xx"},
                {"type": "text", "text": "I look.", "cache_control": {"type": "ephemeral"}},
                call,
                other,
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "Here:"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "stopped", "is_error": True},
                {"type": "text", "text": "So?"},
            ],
        },
    )
    assert messages == [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
                {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "t2", "name": "clock", "content": "Error: stopped"},
        {"role": "user", "content": "Here:\nSo?"},
    ]


def test_billing_line_is_dropped() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2; cch=1a2b3;"}
    blocks = [billing, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert messages_of(*HI, system=blocks)[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(*HI, system=f"{billing['text']}\nBe brief.")[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(*HI, system=[billing]) == HI


def test_consecutive_messages_of_one_role_are_merged() -> None:
    messages = messages_of(
        *HI,
        {"role": "user", "content": [{"type": "text", "text": "there"}]},
        {"role": "assistant", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]},
        {"role": "system", "content": "Now in French."},
        {"role": "user", "content": "go"},
    )
    assert [(message["role"], message["content"]) for message in messages] == [
        ("user", "hi\nthere"),
        ("assistant", "a"),
        ("system", "Now in French."),
        ("user", "go"),
    ]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["t"]


def test_request_settings() -> None:
    plain = to_conversation(request(), "me", DEFAULTS)
    assert plain.sampling == Sampling(temperature=0.2, top_k=9, max_tokens=50)
    assert (plain.tools, plain.tool_choice, plain.parallel_tool_calls, plain.format, plain.template_kwargs, plain.user) == (
        [],
        "auto",
        True,
        None,
        {},
        "me",
    )
    full = to_conversation(
        request(
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            stop_sequences=["END"],
            metadata={"user_id": "u1"},
            thinking={"type": "enabled", "budget_tokens": 1024},
            output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}, "effort": "max"},
            tools=[{**WEATHER, "cache_control": {"type": "ephemeral"}}],
            tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
            service_tier="auto",
            context_management={"edits": []},
        ),
        "me",
        DEFAULTS,
    )
    assert full.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=40, max_tokens=50, stop=("END",))
    assert (full.tool_choice, full.parallel_tool_calls) == (NamedTool("weather"), False)
    assert full.format == Format("schema", {"type": "object"})
    assert full.template_kwargs == {"enable_thinking": True, "reasoning_effort": "high"}
    assert full.tools[0]["function"]["parameters"] == WEATHER["input_schema"]
    for choice, wanted in (("any", "required"), ("none", "none"), ("auto", "auto")):
        assert to_conversation(request(tools=[WEATHER], tool_choice={"type": choice}), "me", DEFAULTS).tool_choice == wanted
    assert to_conversation(request(thinking={"type": "disabled"}), "me", DEFAULTS).template_kwargs == {"enable_thinking": False}


async def _batches(script: Sequence[Sequence[Delta]]) -> AsyncIterator[Sequence[Delta]]:
    for deltas in script:
        yield deltas


def events_of(script: Sequence[Sequence[Delta]]) -> list[dict[str, Any]]:
    async def collect() -> bytes:
        return b"".join([part async for part in stream(_batches(script), "tiny", 20)])

    events = []
    for frame in asyncio.run(collect()).decode().split("\n\n")[:-1]:
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def test_event_order() -> None:
    events = events_of(CALLS)
    found = [(event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events]
    assert found == [
        ("message_start", None, None),
        ("content_block_start", 0, None),
        ("ping", None, None),
        ("content_block_delta", 0, "thinking_delta"),
        ("content_block_delta", 0, "signature_delta"),
        ("content_block_stop", 0, None),
        ("content_block_start", 1, None),
        ("content_block_delta", 1, "text_delta"),
        ("content_block_stop", 1, None),
        ("content_block_start", 2, None),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_delta", 2, "input_json_delta"),
        ("content_block_stop", 2, None),
        ("content_block_start", 3, None),
        ("content_block_delta", 3, "input_json_delta"),
        ("content_block_stop", 3, None),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert events[9]["content_block"] == {"type": "tool_use", "id": "call_a", "name": "weather", "input": {}}
    assert events[0]["message"]["usage"]["input_tokens"] == 20
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert events[-2]["usage"] == {
        "input_tokens": 4,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 16,
        "output_tokens": 7,
    }


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[FakeService, str]]:
    service = FakeService()
    with served(service, keys=("k",)) as url:
        yield service, url


@pytest.fixture
def service(running: tuple[FakeService, str]) -> FakeService:
    service, _ = running
    service.script, service.refusal = HELLO, None
    service.conversations.clear()
    return service


@pytest.fixture
def client(service: FakeService, running: tuple[FakeService, str]) -> Iterator[Anthropic]:
    with Anthropic(base_url=running[1], api_key="k", max_retries=0) as client:
        yield client


def ask(client: Any, **fields: Any) -> Any:
    return client.messages.create(**{"model": "tiny", "max_tokens": 50, "messages": HI, **fields})


def test_create(client: Anthropic, service: FakeService) -> None:
    message = ask(client, system="Be brief.", metadata={"user_id": "u1"})
    assert [block.to_dict() for block in message.content] == [{"type": "text", "text": "Hello, 世界\u2028\n"}]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == ("assistant", "tiny", "end_turn", None)
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens, message.usage.output_tokens) == (4, 16, 7)
    assert service.conversations[0].messages[0] == {"role": "system", "content": "Be brief."}
    assert service.conversations[0].user.endswith("/u1")


@pytest.mark.parametrize(
    ("last", "reason", "stop"),
    [
        (end("length"), "max_tokens", None),
        (end("stop", stop_string="END"), "stop_sequence", "END"),
        (end("stop"), "end_turn", None),
    ],
)
def test_stop_reasons(client: Anthropic, service: FakeService, last: list[Delta], reason: str, stop: str | None) -> None:
    service.script = [[Content("x")], last]
    whole = ask(client)
    with client.messages.stream(model="tiny", max_tokens=5, messages=HI) as streamed:  # type: ignore[arg-type]
        final = streamed.get_final_message()
    assert (whole.stop_reason, whole.stop_sequence) == (final.stop_reason, final.stop_sequence) == (reason, stop)


@pytest.mark.parametrize("script", [HELLO, THOUGHT, CALLS, [end()]])
def test_stream_equals_message(client: Anthropic, service: FakeService, script: list[list[Delta]]) -> None:
    service.script = script
    whole = ask(client, tools=[WEATHER])
    with client.messages.stream(model="tiny", max_tokens=5, messages=HI, tools=[WEATHER]) as streamed:  # type: ignore[arg-type, list-item]
        text = "".join(streamed.text_stream)
        final = streamed.get_final_message()
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
    assert (final.stop_reason, final.usage.to_dict()) == (whole.stop_reason, whole.usage.to_dict())
    assert text == "".join(block.text for block in whole.content if block.type == "text")


def test_tool_round_trip(client: Anthropic, service: FakeService) -> None:
    service.script = CALLS
    first = ask(client, tools=[WEATHER], tool_choice={"type": "any"})
    thought, text, *uses = first.content
    assert (thought.thinking, thought.signature, text.text, first.stop_reason) == ("I look.", "", "Looking.", "tool_use")
    assert [(use.id, use.name, use.input) for use in uses] == [
        ("call_a", "weather", {"city": "Oslo"}),
        ("call_b", "weather", {"city": "Rome"}),
    ]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "rain"} for use in uses]
    service.script = HELLO
    ask(client, tools=[WEATHER], messages=[*HI, first.to_param(), {"role": "user", "content": results}])
    messages = service.conversations[1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert messages[1]["reasoning_content"] == "I look."
    assert messages[1]["tool_calls"][1]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}


def test_truncated_call(client: Anthropic, service: FakeService) -> None:
    service.script = [[ToolCallBegin(0, "c", "weather"), ToolCallArguments(0, '{"city": "Oslo", "days')], end("length")]
    message = ask(client, tools=[WEATHER])
    assert (message.content[0].input, message.stop_reason) == ({"city": "Oslo"}, "max_tokens")


def test_structured_output(client: Anthropic, service: FakeService) -> None:
    service.script = [[Content('{"city": "Oslo"}')], end()]
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    ask(client, output_config={"format": {"type": "json_schema", "schema": schema}})
    assert service.conversations[0].format == Format("schema", schema)


def test_count_tokens(client: Anthropic, service: FakeService) -> None:
    counted = client.messages.count_tokens(model="tiny", messages=HI, system="Be brief.", tools=[WEATHER])  # type: ignore[arg-type, list-item]
    assert counted.input_tokens == 20
    assert service.conversations[0].tools[0]["function"]["name"] == "weather"


def test_async_client(service: FakeService, running: tuple[FakeService, str]) -> None:
    service.script = CALLS

    async def talk() -> tuple[Any, Any]:
        async with AsyncAnthropic(base_url=running[1], api_key="k", max_retries=0) as client:
            whole = await ask(client, tools=[WEATHER])
            async with client.messages.stream(model="tiny", max_tokens=5, messages=HI) as streamed:  # type: ignore[arg-type]
                return whole, await streamed.get_final_message()

    whole, final = asyncio.run(talk())
    assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]


@pytest.mark.parametrize(
    ("refusal", "status", "kind", "header"),
    [
        (BusyError("256 requests wait already."), 429, "rate_limit_error", ("retry-after", "1")),
        (
            ContextError("The prompt has 9 tokens; prompt and answer must fit into a context of 8."),
            400,
            "invalid_request_error",
            None,
        ),
        (InputError("No."), 400, "invalid_request_error", ("x-should-retry", "false")),
        (not_ready("The model is being loaded; try again soon."), 529, "overloaded_error", ("retry-after", "1")),
        (RuntimeError("/secret/path"), 500, "api_error", None),
    ],
)
def test_errors_in_anthropic_format(
    client: Anthropic, service: FakeService, refusal: Exception, status: int, kind: str, header: tuple[str, str] | None
) -> None:
    service.refusal = refusal
    with pytest.raises(anthropic.APIStatusError) as refused:
        ask(client, stream=True)
    assert refused.value.status_code == status
    assert isinstance(refused.value.body, dict)
    assert refused.value.body["error"]["type"] == kind
    assert "secret" not in refused.value.body["error"]["message"]
    assert "request_id" in refused.value.body
    if header is not None:
        assert refused.value.response.headers[header[0]] == header[1]


def test_context_error_has_the_expected_prefix(client: Anthropic, service: FakeService) -> None:
    service.refusal = ContextError("The prompt has 9 tokens; prompt and answer must fit into a context of 8.")
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: The prompt has 9 tokens"):
        ask(client)


def test_unknown_model_is_not_found(client: Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError, match="The served model: tiny"):
        ask(client, model="claude-9")


def test_wrong_key_is_refused(running: tuple[FakeService, str]) -> None:
    with (
        Anthropic(base_url=running[1], api_key="wrong", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError) as refused,
    ):
        ask(client)
    assert isinstance(refused.value.body, dict)
    assert (refused.value.body["type"], refused.value.body["error"]["type"]) == ("error", "authentication_error")


def test_interrupted_answer_is_an_error(client: Anthropic, service: FakeService) -> None:
    service.script = [[Content("x")], end("error", error="The model process has ended.")]
    with pytest.raises(anthropic.InternalServerError, match="has ended"):
        ask(client)
    with (
        pytest.raises(anthropic.APIStatusError, match="has ended"),
        client.messages.stream(model="tiny", max_tokens=5, messages=HI) as streamed,  # type: ignore[arg-type]
    ):
        streamed.until_done()


def message(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [*HI, {"role": role, "content": list(blocks)}]}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1 << 40}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [3]}, "messages.0"),
    ({"messages": [{"role": "bot", "content": "x"}]}, "messages.0.role"),
    ({"messages": [{"role": "user"}]}, "messages.0.content"),
    ({"messages": [{"role": "user", "content": {"type": "text"}}]}, "a string or a list of blocks"),
    ({"messages": [{"role": "assistant", "content": "The answer is ("}]}, "prefilled answers are not supported"),
    ({"system": 3}, "system"),
    ({"system": [{"type": "image", "source": {}}]}, "system.0 is of type 'image'"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"stop_sequences": "END"}, "stop_sequences"),
    ({"stop_sequences": [""]}, "stop"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "this server hosts no tools"),
    ({"tools": [{"name": "f"}]}, "no input_schema"),
    ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools.0.input_schema"),
    ({"tool_choice": {"type": "any"}}, "there are no tools"),
    ({"tool_choice": {"type": "some"}}, "tool_choice.type"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, "The tools: weather"),
    ({"tools": [WEATHER], "tool_choice": {"type": "tool"}}, "tool_choice names"),
    ({"thinking": {"type": "maybe"}}, "thinking.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, "schema"),
    ({"metadata": {"user_id": 3}}, "user_id"),
    (message(3), "messages.1.content.0"),
    (message({"text": "x"}), "an object with a type"),
    (message({"type": ["text"]}), "an object with a type"),
    (message({"type": "text"}), "messages.1.content.0.text"),
    (message({"type": "image", "source": {}}), "messages.1.content.0.source is of type None"),
    (message({"type": "image", "source": {"type": "file"}}), "base64 and url are supported"),
    (
        message({"type": "image", "source": {"type": "base64", "media_type": "text/css", "data": ""}}),
        "media_type is 'text/css'",
    ),
    (message({"type": "document", "source": {}}), "is of type 'document'"),
    (message({"type": "tool_result"}), "tool_use_id"),
    (message({"type": "tool_result", "tool_use_id": "t", "content": 3}), "messages.1.content.0.content"),
    (
        message({"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}),
        "content.0.content.0.source is of type None",
    ),
    (message({"type": "tool_result", "tool_use_id": "t", "content": "x"}), "content.0 is the result of tool_use 't', but no"),
    (message({"type": "tool_use", "id": "t", "name": "f", "input": "x"}, role="assistant"), "input"),
    (message({"type": "tool_use", "name": "f", "input": {}}, role="assistant"), ".id"),
    (message({"type": "server_tool_use", "id": "t"}, role="assistant"), "server_tool_use"),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD)
def test_invalid_fields_are_refused(
    running: tuple[FakeService, str], service: FakeService, fields: dict[str, Any], sentence: str
) -> None:
    body = {"model": "tiny", "max_tokens": 50, "messages": HI, **fields}
    response = httpx.post(f"{running[1]}/v1/messages", json=body, headers=KEY)
    error = response.json()["error"]
    assert (response.status_code, error["type"]) == (400, "invalid_request_error")
    assert sentence in error["message"]
    assert error["message"].endswith(".")
    assert "\n" not in error["message"]
    assert service.conversations == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"3",
        b"{",
        b"\xff\xfe",
        b'{"model": "tiny", "max_tokens": NaN, "messages": []}',
        b'{"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"max_tokens": ' + b"9" * 10_000 + b"}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_invalid_bodies_are_refused(running: tuple[FakeService, str], path: str, raw: bytes) -> None:
    response = httpx.post(f"{running[1]}{path}", content=raw, headers=KEY)
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_large_body_is_refused(running: tuple[FakeService, str], service: FakeService) -> None:
    response = httpx.post(f"{running[1]}/v1/messages", content=b" " * (service.limits.body_nbytes + 1), headers=KEY)
    assert (response.status_code, response.json()["error"]["type"]) == (413, "request_too_large")


def test_end_to_end() -> None:
    text = '<think>I look.</think>Looking.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'
    link = FakeLink(text, ready=False)
    client = TestClient(make_app(Service(link)))
    body: dict[str, Any] = {"model": NAME, "max_tokens": 50, "messages": HI, "tools": [WEATHER], "system": "Be brief."}
    loading = client.post("/v1/messages", json=body)
    assert (loading.status_code, loading.json()["error"]["type"]) == (529, "overloaded_error")
    link.load()
    first = client.post("/v1/messages", json=body).json()
    thinking, text, use = first["content"]
    assert (thinking["thinking"], text["text"], use["input"]) == ("I look.", "Looking.", {"city": "Oslo"})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use["id"], "content": "rain"}]}
    later = {**body, "messages": [*HI, {"role": "assistant", "content": first["content"]}, result]}
    counted = client.post("/v1/messages/count_tokens", json=later).json()["input_tokens"]
    usage = client.post("/v1/messages", json=later).json()["usage"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] == len(link.requests[-1].prompt)
    assert "Looking.<tool_call>" in link.prompt
    assert link.prompt.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")
