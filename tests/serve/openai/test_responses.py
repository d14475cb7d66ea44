"""/v1/responses: items in, events and responses out, through OpenAI's own client."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel
from starlette.testclient import TestClient

from auraflux.engine.request import TokenLogprob
from auraflux.engine.sampling import Sampling
from auraflux.errors import BusyError, ContextError
from auraflux.serve.app import make_app
from auraflux.serve.chat.conversation import Format, NamedTool
from auraflux.serve.chat.deltas import Content, Delta, Logprobs, Reasoning, ToolCallArguments, ToolCallBegin
from auraflux.serve.openai.responses import initial_response
from auraflux.serve.openai.responses_events import ResponseEvents
from auraflux.serve.openai.responses_request import to_conversation
from auraflux.serve.openai.responses_schema import ResponsesRequest
from auraflux.serve.service import Service
from tests.serve.fake_link import DEFAULTS, NAME, FakeLink
from tests.serve.fake_service import CALLS, HELLO, THOUGHT, FakeService, end, served

WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tell the weather.",
    "strict": True,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}


def request(**fields: Any) -> ResponsesRequest:
    return ResponsesRequest.model_validate({"model": "tiny", "input": "hi", **fields})


def messages_of(*items: Any, **fields: Any) -> list[dict[str, Any]]:
    return to_conversation(request(input=list(items), **fields), "me", DEFAULTS).messages


def test_consecutive_items_become_one_message() -> None:
    messages = messages_of(
        {"role": "developer", "content": "Use tools."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Look."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look.", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call", "call_id": "c2", "name": "clock", "arguments": "not json"},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "noon"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Done."}], "encrypted_content": None},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
        {"role": "user", "content": "Why?"},
        instructions="Be brief.",
    )
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}},
        {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": "not json"}},
    ]
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "system", "content": "Use tools."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "name": "weather", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "name": "clock", "content": "noon"},
        {"role": "assistant", "content": "No.", "reasoning_content": "Done."},
        {"role": "user", "content": "Why?"},
    ]


def test_custom_and_shell_calls() -> None:
    messages = messages_of(
        {"role": "user", "content": "Patch."},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "ok"},
        {"type": "local_shell_call", "call_id": "c2", "status": "completed", "action": {"type": "exec", "command": ["ls"]}},
        {"type": "local_shell_call_output", "id": "c2", "output": "a b"},
    )
    functions = [message["tool_calls"][0]["function"] for message in messages if "tool_calls" in message]
    assert functions == [
        {"name": "apply_patch", "arguments": {"input": "*** Begin"}},
        {"name": "local_shell", "arguments": {"type": "exec", "command": ["ls"]}},
    ]
    assert [message["name"] for message in messages if message["role"] == "tool"] == ["apply_patch", "local_shell"]


def test_codex_request() -> None:
    conversation = to_conversation(
        request(
            instructions="You are Codex.",
            input=[{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}],
            tools=[WEATHER, {"type": "local_shell"}, {"type": "web_search"}, {"type": "custom", "name": "apply_patch"}],
            tool_choice="auto",
            parallel_tool_calls=False,
            reasoning={"effort": "medium", "summary": "auto"},
            store=False,
            stream=True,
            include=["reasoning.encrypted_content"],
            prompt_cache_key="conversation",
            text={"verbosity": "low"},
        ),
        "me",
        DEFAULTS,
    )
    assert [tool["function"]["name"] for tool in conversation.tools] == ["weather"]
    assert conversation.messages == [{"role": "system", "content": "You are Codex."}, {"role": "user", "content": "hi"}]
    assert (conversation.parallel_tool_calls, conversation.template_kwargs, conversation.format, conversation.user) == (
        False,
        {"reasoning_effort": "medium"},
        None,
        "me",
    )


def test_request_settings() -> None:
    assert to_conversation(request(), "", DEFAULTS).sampling == Sampling(temperature=0.2, top_k=9)
    full = to_conversation(request(temperature=0.5, top_p=0.9, max_output_tokens=9, top_logprobs=2), "", DEFAULTS)
    assert full.sampling == Sampling(temperature=0.5, top_p=0.9, top_k=9, max_tokens=9, logprobs=2)
    assert to_conversation(request(include=["message.output_text.logprobs"]), "", DEFAULTS).sampling.logprobs == 0
    assert to_conversation(request(reasoning={"effort": "none"}), "", DEFAULTS).template_kwargs == {"enable_thinking": False}
    assert to_conversation(request(text={"format": {"type": "json_object"}}), "", DEFAULTS).format == Format("json")
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    assert to_conversation(request(text={"format": schema}), "", DEFAULTS).format == Format("schema", {"type": "object"})
    named = {"type": "function", "name": "weather"}
    clock = {"type": "function", "name": "clock"}
    for choice, wanted, tools in (
        ("none", "none", 2),
        ("required", "required", 2),
        (named, NamedTool("weather"), 2),
        ({"type": "allowed_tools", "mode": "required", "tools": [named]}, "required", 1),
    ):
        conversation = to_conversation(request(tools=[WEATHER, clock], tool_choice=choice), "", DEFAULTS)
        assert (conversation.tool_choice, len(conversation.tools)) == (wanted, tools)


def events_of(script: Sequence[Sequence[Delta]]) -> list[dict[str, Any]]:
    body = request()
    events = ResponseEvents(
        initial_response(body, to_conversation(body, "", DEFAULTS), "tiny"), lambda token: {"token": str(token.token)}
    )
    frames = (events.first() + b"".join([events.encode(deltas, 3) for deltas in script])).decode().split("\n\n")
    found = []
    for number, frame in enumerate(frames[:-1]):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        found.append(event)
    return found


def test_event_order() -> None:
    events = events_of(CALLS)
    assert [(event["type"].removeprefix("response."), event.get("output_index")) for event in events] == [
        ("created", None),
        ("in_progress", None),
        ("output_item.added", 0),
        ("content_part.added", 0),
        ("reasoning_text.delta", 0),
        ("reasoning_text.done", 0),
        ("content_part.done", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("content_part.added", 1),
        ("output_text.delta", 1),
        ("output_text.done", 1),
        ("content_part.done", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.delta", 2),
        ("function_call_arguments.done", 2),
        ("output_item.done", 2),
        ("output_item.added", 3),
        ("function_call_arguments.delta", 3),
        ("function_call_arguments.done", 3),
        ("output_item.done", 3),
        ("completed", None),
    ]
    last = events[-1]["response"]
    assert last["output"] == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert last["usage"] == {
        "input_tokens": 20,
        "input_tokens_details": {"cached_tokens": 16, "cache_write_tokens": 0},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 27,
    }


def test_logprobs_accompany_their_text() -> None:
    def score(token: int) -> Logprobs:
        return Logprobs((TokenLogprob(token, -0.5),))

    script = [[Reasoning("r"), score(1)], [score(2)], [Content("a"), score(3)], [Content("b"), score(4)], end()]
    events = events_of(script)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[{"token": "2"}, {"token": "3"}], [{"token": "4"}]]
    [part] = events[-1]["response"]["output"][1]["content"]
    assert [token["token"] for token in part["logprobs"]] == ["2", "3", "4"]


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
def client(service: FakeService, running: tuple[FakeService, str]) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{running[1]}/v1", api_key="k", max_retries=0) as client:
        yield client


def test_create(client: OpenAI, service: FakeService) -> None:
    response = client.responses.create(model="tiny", input="hi", instructions="Be brief.", metadata={"a": "b"}, user="u1")
    # the client does not validate responses
    Response.model_validate(response.to_dict())
    assert (response.status, response.output_text, response.error) == ("completed", "Hello, 世界\u2028\n", None)
    assert (response.instructions, response.metadata, response.temperature) == ("Be brief.", {"a": "b"}, 0.2)
    assert response.usage is not None
    assert (response.usage.total_tokens, response.usage.input_tokens_details.cached_tokens) == (27, 16)
    assert service.conversations[0].user.endswith("/u1")


@pytest.mark.parametrize("script", [HELLO, THOUGHT, CALLS, [end()]])
def test_stream_equals_response(client: OpenAI, service: FakeService, script: list[list[Delta]]) -> None:
    service.script = script
    whole = client.responses.create(model="tiny", input="hi", tools=[WEATHER])  # type: ignore[list-item]
    with client.responses.stream(model="tiny", input="hi", tools=[WEATHER]) as streamed:  # type: ignore[list-item]
        events = list(streamed)
        final = streamed.get_final_response()
    Response.model_validate(whole.to_dict())
    assert _shape(final.to_dict()) == _shape(whole.to_dict())
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text


def _shape(response: dict[str, Any]) -> dict[str, Any]:
    """Drop ids, times, and fields that the client adds."""
    drop = {"id", "created_at", "completed_at", "parsed", "parsed_arguments"}
    cleaned = {key: value for key, value in response.items() if key not in drop}
    for key in ("output", "content"):
        if isinstance(cleaned.get(key), list):
            cleaned[key] = [_shape(each) for each in cleaned[key]]
    return cleaned


def test_tool_round_trip(client: OpenAI, service: FakeService) -> None:
    service.script = CALLS
    first = client.responses.create(model="tiny", input="Weather?", tools=[WEATHER], tool_choice="required")  # type: ignore[list-item]
    calls = [item for item in first.output if item.type == "function_call"]
    assert [(call.call_id, call.name, call.arguments) for call in calls] == [
        ("call_a", "weather", '{"city": "Oslo"}'),
        ("call_b", "weather", '{"city": "Rome"}'),
    ]
    outputs = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
    history = [{"role": "user", "content": "Weather?"}, *(item.to_dict() for item in first.output), *outputs]
    service.script = HELLO
    client.responses.create(model="tiny", input=history, tools=[WEATHER])  # type: ignore[arg-type, list-item]
    messages = service.conversations[1].messages
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert (messages[1]["reasoning_content"], messages[1]["content"]) == ("I look.", "Looking.")
    assert messages[1]["tool_calls"][1]["function"] == {"name": "weather", "arguments": {"city": "Rome"}}


class City(BaseModel):
    city: str


def test_parse(client: OpenAI, service: FakeService) -> None:
    service.script = [[Content('{"city": "Oslo"}')], end()]
    response = client.responses.parse(model="tiny", input="Where?", text_format=City)
    assert response.output_parsed == City(city="Oslo")
    assert service.conversations[0].format is not None
    assert service.conversations[0].format.source["required"] == ["city"]
    assert response.text is not None
    assert response.text.to_dict()["format"]["type"] == "json_schema"  # type: ignore[index]


def test_truncated_answer_is_incomplete(client: OpenAI, service: FakeService) -> None:
    service.script = [[ToolCallBegin(0, "c", "weather"), ToolCallArguments(0, '{"ci')], end("length")]
    response = client.responses.create(model="tiny", input="hi")
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert response.output[0].to_dict()["status"] == "incomplete"
    kinds = [event.type for event in client.responses.create(model="tiny", input="hi", stream=True)]
    assert kinds[-1] == "response.incomplete"


def test_interrupted_answer_is_an_error(client: OpenAI, service: FakeService) -> None:
    service.script = [[Content("x")], end("error", error="The model process has ended.")]
    with pytest.raises(openai.InternalServerError, match="has ended"):
        client.responses.create(model="tiny", input="hi")
    *_, last = client.responses.create(model="tiny", input="hi", stream=True)
    assert last.type == "response.failed"
    assert last.response.status == "failed"
    assert last.response.error is not None
    assert last.response.error.message == "The model process has ended."


def test_async_client(service: FakeService, running: tuple[FakeService, str]) -> None:
    service.script = THOUGHT

    async def talk() -> tuple[str, str]:
        async with AsyncOpenAI(base_url=f"{running[1]}/v1", api_key="k", max_retries=0) as client:
            whole = await client.responses.create(model="tiny", input="hi")
            async with client.responses.stream(model="tiny", input="hi") as streamed:
                return whole.output_text, (await streamed.get_final_response()).output_text

    assert asyncio.run(talk()) == ("42", "42")


def test_errors_in_openai_format(client: OpenAI, service: FakeService) -> None:
    service.refusal = BusyError("256 requests wait already.")
    with pytest.raises(openai.RateLimitError) as refused:
        client.responses.create(model="tiny", input="hi", stream=True)
    assert refused.value.response.headers["retry-after"] == "1"
    service.refusal = ContextError("The prompt has 9 tokens; prompt and answer must fit into a context of 8.")
    with pytest.raises(openai.BadRequestError) as told_context:
        client.responses.create(model="tiny", input="hi")
    assert told_context.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="gpt-9", input="hi")


def items(*given: Any) -> dict[str, Any]:
    return {"input": list(given)}


BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": None}, "input"),
    ({"input": 3}, "a string or a list of items"),
    ({"input": []}, "no items"),
    ({"previous_response_id": "resp_1"}, "send the complete history"),
    ({"conversation": "conv_1"}, "send the complete history"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt"),
    ({"background": True}, "background"),
    ({"instructions": 3}, "instructions"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": 2}, "top_p"),
    ({"top_logprobs": 21}, "top_logprobs"),
    ({"truncation": "some"}, "truncation"),
    ({"metadata": {"a": {}}}, "metadata.a"),
    ({"reasoning": "high"}, "reasoning"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "no schema"),
    ({"tools": {}}, "tools"),
    ({"tools": [3]}, "tools.0"),
    ({"tools": [{"type": "function"}]}, "tools.0 has no name"),
    ({"tools": [{"type": "function", "name": "f", "parameters": []}]}, "tools.0.parameters"),
    ({"tool_choice": "some"}, "tool_choice"),
    ({"tool_choice": 3}, "tool_choice"),
    ({"tool_choice": "required"}, "there are no tools"),
    ({"tool_choice": {"type": "web_search"}}, "web_search"),
    ({"tool_choice": {"type": "function", "name": ["x"]}}, "which does not exist"),
    ({"tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "x"}]}}, "which does not exist"),
    ({"tool_choice": {"type": "allowed_tools", "tools": 3}}, "a list of objects"),
    ({"tool_choice": {"type": "allowed_tools", "mode": {}, "tools": []}}, "tool_choice.mode"),
    (items(3), "input.0 must be an object"),
    (items({"content": "x"}), "is of type None"),
    (items({"type": ["message"]}), "which is not supported"),
    (items({"type": "item_reference", "id": "msg_1"}), "send the item itself"),
    (items({"type": "computer_call"}), "computer_call"),
    (items({"role": "bot", "content": "x"}), "input.0.role"),
    (items({"role": {}, "content": "x"}), "input.0.role"),
    (items({"role": "user"}), "input.0.content"),
    (items({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}), "has the URL 'x'"),
    (items({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}), "has no image_url"),
    (items({"role": "system", "content": [{"type": "input_image", "image_url": "data:,"}]}), "is of type 'input_image'"),
    (items({"role": "user", "content": [{"type": "input_text"}]}), "input.0.content.0.text"),
    (items({"role": "user", "content": ["x"]}), "an object with a type"),
    (items({"type": "function_call", "name": "f", "arguments": "{}"}), "call_id"),
    (items({"type": "function_call", "name": "f", "arguments": {}, "call_id": "c"}), "arguments"),
    (items({"type": "function_call_output", "output": "x"}), "call_id"),
    (items({"type": "function_call_output", "call_id": "c"}), "output"),
    (items({"type": "function_call_output", "call_id": "c", "output": "x"}), "input.0 is the output of call 'c', but no"),
    (items({"type": "reasoning", "summary": 3}), "summary"),
    (items({"type": "local_shell_call", "call_id": "c"}), "action"),
]


@pytest.mark.parametrize(("fields", "sentence"), BAD)
def test_invalid_fields_are_refused(
    running: tuple[FakeService, str], service: FakeService, fields: dict[str, Any], sentence: str
) -> None:
    body = {"model": "tiny", "input": "hi", **fields}
    response = httpx.post(f"{running[1]}/v1/responses", json=body, headers={"authorization": "Bearer k"})
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert sentence in message
    assert message.endswith(".")
    assert "\n" not in message
    assert service.conversations == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"model": "tiny", "input": "hi", "temperature": NaN}',
        b'{"model": "tiny", "input": "\\udfff"}',
        b'{"input": ' + b'[{"a": ' * 100_000 + b"1" + b"}]" * 100_000 + b"}",
        b'{"model": "tiny", "input": "hi", "tools": [{"type": "function", "name": "f", "parameters": {"maximum": 1e999}}]}',
    ],
)
def test_invalid_bodies_are_refused(running: tuple[FakeService, str], raw: bytes) -> None:
    response = httpx.post(f"{running[1]}/v1/responses", content=raw, headers={"authorization": "Bearer k"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")


def test_end_to_end() -> None:
    link = FakeLink('<think>I look.</think>Looking.<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>')
    client = TestClient(make_app(Service(link)))
    user = {"role": "user", "content": "Weather?"}
    developer = {"role": "developer", "content": "Use tools."}
    body: dict[str, Any] = {
        "model": NAME,
        "instructions": "Be brief.",
        "tools": [WEATHER],
        "input": [developer, user],
        "top_logprobs": 2,
    }
    first = client.post("/v1/responses", json=body).json()
    reasoning, message, call = first["output"]
    assert (reasoning["content"][0]["text"], message["content"][0]["text"]) == ("I look.", "Looking.")
    assert json.loads(call["arguments"]) == {"city": "Oslo"}
    assert {len(token["top_logprobs"]) for token in message["content"][0]["logprobs"]} == {2}
    assert first["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "rain"}
    client.post("/v1/responses", json={**body, "input": [developer, user, *first["output"], output]})
    assert "Be brief.\n\nUse tools." in link.prompt
    assert "<think>I look.</think>\nLooking.<tool_call>" in link.prompt
    assert link.prompt.endswith("<|im_start|>tool\nrain<|im_end|>\n<|im_start|>assistant\n")
