"""/v1/chat/completions: requests to the model, and responses in OpenAI's format."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.chat.conversation import Format, system_message_variants
from auraflux.serve.limits import Limits
from auraflux.serve.openai.chat_request import to_conversation
from auraflux.serve.openai.schema import ChatCompletionRequest
from auraflux.serve.service import Service
from tests.serve.fake_link import DEFAULTS, NAME, FakeLink, Script

PATH = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'


def client_of(link: FakeLink, limits: Limits | None = None) -> TestClient:
    return TestClient(make_app(Service(link, limits)))


def ask(link: FakeLink, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = client_of(link).post(PATH, json={**HELLO, **body})
    assert answer.status_code == status, answer.text
    return answer.json()


def chunks(link: FakeLink, **body: Any) -> list[dict[str, Any]]:
    answer = client_of(link).post(PATH, json={**HELLO, "stream": True, **body})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def deltas(found: list[dict[str, Any]], index: int = 0) -> list[dict[str, Any]]:
    return [choice["delta"] for chunk in found for choice in chunk["choices"] if choice["index"] == index]


def partial(**message: str) -> dict[str, Any]:
    return {"messages": [*HELLO["messages"], {"role": "assistant", **message}], "continue_final_message": True}


def test_continuation_extends_the_last_message():
    link = FakeLink(" and  more <b>")
    message = ask(link, **partial(content="Once upon a time"))["choices"][0]["message"]
    # white space where the halves meet is text
    assert message["content"] == " and  more <b>"
    assert link.prompt.endswith("<|im_start|>assistant\nOnce upon a time")


def test_continuation_of_reasoning_is_reasoning():
    link = FakeLink(" wonder </think> It is so.")
    message = ask(link, **partial(content="", reasoning_content="I"))["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == (" wonder", "It is so.")
    assert link.prompt.endswith("<|im_start|>assistant\n<think>\nI")
    link.play(" so.")
    message = ask(link, **partial(content="It is", reasoning_content="I wonder"))["choices"][0]["message"]
    assert message["content"] == " so."
    assert "reasoning_content" not in message
    assert link.prompt.endswith("<think>\nI wonder\n</think>\n\nIt is")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"continue_final_message": True}, "the last message is the user's"),
        (partial(content=""), "assistant's and empty"),
        (partial(content="a") | {"response_format": {"type": "json_object"}}, "response_format"),
    ],
)
def test_continuation_needs_text_of_the_assistant(fields, problem):
    assert problem in ask(FakeLink(), 400, **fields)["error"]["message"]


def test_full_response():
    body = ask(FakeLink("Hello there!"))
    [choice] = body["choices"]
    assert choice["message"]["content"] == "Hello there!"
    assert choice["finish_reason"] == "stop"
    assert (body["object"], body["model"]) == ("chat.completion", NAME)
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert body["timings"]["cache_nbytes"] == 1000
    assert body["timings"]["first_s"] == 0.5
    assert {"steps", "drafted", "accepted"} <= set(body["timings"])


def test_stream_begins_with_role_and_ends_with_finish_reason():
    found = chunks(FakeLink("Hello there!"))
    assert deltas(found) == [{"role": "assistant", "content": ""}, {"content": "Hello"}, {"content": " there!"}, {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "stop"]
    assert len({chunk["id"] for chunk in found}) == 1
    assert all("usage" not in chunk for chunk in found)


def test_usage_chunk_is_last():
    *others, last = chunks(FakeLink("Hello there!"), stream_options={"include_usage": True})
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] > 0
    assert last["timings"]["plain_nbytes"] == 4000


def test_text_is_escaped():
    text = 'a "quote"\\ \n\t\x01 ü 🦙 \u2028'
    assert "".join(delta.get("content", "") for delta in deltas(chunks(FakeLink(Script((text,)))))) == text


def test_n_choices_have_indices_and_seeds():
    link = FakeLink("first one", "second one")
    found = chunks(link, n=2, seed=7)
    assert "".join(delta.get("content", "") for delta in deltas(found, 0)) == "first one"
    assert "".join(delta.get("content", "") for delta in deltas(found, 1)) == "second one"
    assert [request.sampling.seed for request in link.requests] == [7, 8]
    body = ask(FakeLink("first one", "second one"), n=2)
    assert [choice["message"]["content"] for choice in body["choices"]] == ["first one", "second one"]
    assert body["usage"]["prompt_tokens"] == len(link.requests[0].prompt)


def test_reasoning_has_both_field_names():
    link = FakeLink("<think> I wonder </think> It is so.")
    message = ask(link)["choices"][0]["message"]
    assert message["reasoning"].strip() == message["reasoning_content"].strip() == "I wonder"
    assert message["content"].strip() == "It is so."
    link.play("<think> I wonder </think> It is so.")
    found = chunks(link, stream_options={"include_usage": True})
    thought = [delta for delta in deltas(found) if "reasoning" in delta]
    assert "".join(delta["reasoning"] for delta in thought).strip() == "I wonder"
    assert all(delta["reasoning"] == delta["reasoning_content"] for delta in thought)
    usage = found[-1]["usage"]
    assert 0 < usage["completion_tokens_details"]["reasoning_tokens"] < usage["completion_tokens"]


def test_tools_are_rendered_and_calls_parsed():
    link = FakeLink(CALL)
    choice = ask(link, tools=[WEATHER])["choices"][0]
    assert "Weather at a place." in link.prompt
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert choice["message"]["content"] is None
    assert call["function"]["name"] == "weather"
    assert json.loads(call["function"]["arguments"]) == {"place": "Bonn"}


def test_call_deltas():
    found = chunks(FakeLink(CALL + "\n" + CALL.replace("Bonn", "Ulm")), tools=[WEATHER])
    parts = [call for delta in deltas(found) for call in delta.get("tool_calls", ())]
    named = [part for part in parts if "id" in part]
    assert [(part["index"], part["type"], part["function"]["name"]) for part in named] == [
        (0, "function", "weather"),
        (1, "function", "weather"),
    ]
    for index, place in enumerate(("Bonn", "Ulm")):
        text = "".join(part["function"].get("arguments", "") for part in parts if part["index"] == index)
        assert json.loads(text) == {"place": place}
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_single_call_without_parallel_tool_calls():
    link = FakeLink(Script((CALL, "\n" + CALL.replace("Bonn", "Ulm"), "\n" + CALL)))
    choice = ask(link, tools=[WEATHER], parallel_tool_calls=False)["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["finish_reason"] == "tool_calls"
    assert link.streams[0].cancelled


def test_tool_choice_none_offers_no_tools():
    link = FakeLink("No.")
    ask(link, tools=[WEATHER], tool_choice="none")
    assert "Weather" not in link.prompt


def test_required_call_is_enforced():
    link = FakeLink(CALL)
    ask(link, tools=[WEATHER], tool_choice={"type": "function", "function": {"name": "weather"}})
    assert link.requests[0].sampling.grammar
    assert (
        "wheather" in ask(FakeLink(), 400, tools=[WEATHER], tool_choice={"function": {"name": "wheather"}})["error"]["message"]
    )
    assert "no tools" in ask(FakeLink(), 400, tool_choice="required")["error"]["message"]


def test_history_with_calls_and_reasoning():
    link = FakeLink("Rain.")
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "Bonn"}'}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "How is"}, {"type": "text", "text": "the weather?"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": "Ask the tool."},
        {"role": "tool", "tool_call_id": "call_1", "content": "It rains."},
    ]
    ask(link, messages=messages, tools=[WEATHER])
    assert "system\nBe brief." in link.prompt
    assert "How is\nthe weather?" in link.prompt
    assert "<think>Ask the tool.</think>" in link.prompt
    assert '"arguments": {"place": "Bonn"}' in link.prompt
    assert "tool\nIt rains." in link.prompt


def test_system_messages_are_merged_for_strict_templates():
    link = FakeLink()
    messages = [{"role": "system", "content": "One."}, *HELLO["messages"], {"role": "system", "content": "Two."}]
    ask(link, messages=messages)
    assert "system\nOne.\n\nTwo.<|im_end|>" in link.prompt


def test_system_message_moves_to_the_first_user_message():
    system = {"role": "system", "content": "Be kind."}
    user, assistant = {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}
    assert list(system_message_variants([user])) == [[user]]
    assert list(system_message_variants([system, user, assistant]))[1:] == [
        [{"role": "user", "content": "Be kind.\n\nHi."}, assistant]
    ]


def test_tool_results_carry_the_tool_name():
    call = {"id": "call_1", "function": {"name": "weather", "arguments": "no JSON"}}
    messages = [*HELLO["messages"], {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1"}]
    conversation = to_conversation(ChatCompletionRequest(messages=messages), Limits(), "", DEFAULTS)
    assert conversation.messages[1]["tool_calls"][0]["function"]["arguments"] == "no JSON"
    assert conversation.messages[2] == {"role": "tool", "content": "", "tool_call_id": "call_1", "name": "weather"}


def test_billing_line_is_dropped():
    link = FakeLink()
    text = "x-anthropic-billing-header: cc=1; cch=abc;\nYou are kind."
    ask(link, messages=[{"role": "system", "content": text}, *HELLO["messages"]])
    assert "system\nYou are kind." in link.prompt
    assert "billing" not in link.prompt


def test_sampling_settings():
    link = FakeLink()
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "presence_penalty": 1, "frequency_penalty": 0.5}
    ask(
        link,
        **settings,
        repetition_penalty=1.1,
        seed=-1,
        stop="END",
        max_completion_tokens=9,
        max_tokens=5,
        logit_bias={"7": -100},
    )
    sampling = link.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (1, 0.5, 1.1)
    assert (sampling.stop, sampling.max_tokens, sampling.logit_bias) == (("END",), 9, {7: -100})
    assert sampling.seed == (1 << 63) - 1


def test_null_and_unknown_fields_are_ignored():
    link = FakeLink()
    names = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "tools",
        "tool_choice",
        "logit_bias",
        "response_format",
        "stream",
        "user",
    )
    ask(link, **dict.fromkeys(names), something={"new": 1}, store=False, metadata=None)
    sampling = link.requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.2, 9, 1.0)
    assert link.requests[0].sampling.max_tokens is None


def test_max_tokens_is_clamped_to_the_context():
    link = FakeLink(context=100)
    ask(link, max_tokens=100_000)
    assert link.requests[0].sampling.max_tokens == 100 - len(link.requests[0].prompt)


def test_template_kwargs():
    link = FakeLink()
    ask(link, reasoning_effort="high")
    assert "<!-- high -->" in link.prompt
    ask(link, reasoning_effort="minimal")
    assert "<!-- low -->" in link.prompt
    ask(link, chat_template_kwargs={"reasoning_effort": "low"})
    assert "<!-- low -->" in link.prompt
    for name in ("messages", "self", "template", "add_generation_prompt", "tools"):
        assert name in ask(FakeLink(), 400, chat_template_kwargs={name: 1})["error"]["message"]


def test_formats_become_grammars(monkeypatch: pytest.MonkeyPatch):
    seen: list[Format | None] = []

    def grammar_for(ask: Any, syntax: Any, tail: str, tokenizer: Any) -> str | None:
        seen.append(ask.format)
        assert tail.endswith("<|im_start|>assistant\n")
        return "a grammar"

    monkeypatch.setattr("auraflux.serve.chat.prompts.grammar_for", grammar_for)
    schema = {"type": "object"}
    link = FakeLink("{}")
    ask(link, response_format={"type": "json_object"})
    ask(link, response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
    ask(link, grammar="start: /a/")
    ask(link, grammar={"type": "regex", "value": "a+"})
    ask(link, grammar={"type": "json_schema", "value": '{"type": "object"}'})
    ask(link, response_format={"type": "text"})
    wanted = [("json", None), ("schema", schema), ("lark", "start: /a/"), ("regex", "a+"), ("schema", schema)]
    assert seen == [*(Format(*each) for each in wanted), None]
    assert link.requests[0].sampling.grammar == "a grammar"


def test_logprobs():
    body = ask(FakeLink("Hi you"), logprobs=True, top_logprobs=2)
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(each["token"] for each in content) == "Hi you"
    assert bytes(byte for each in content for byte in each["bytes"]) == b"Hi you"
    assert all(each["logprob"] == -0.5 and len(each["top_logprobs"]) == 2 for each in content)
    found = chunks(FakeLink("Hi you"), logprobs=True)
    streamed = [each for chunk in found for each in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert [each["token"] for each in streamed] == [each["token"] for each in content]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "the URL 'x'"),
        (
            {"messages": [{"role": "tool", "tool_call_id": "c", "content": "x"}]},
            "messages.0 is the result of tool call 'c', but no",
        ),
        ({"n": 9}, "at most 8 for n"),
        ({"n": 0}, "n: "),
        ({"stop": ["x"] * 17}, "at most 16 for stop"),
        ({"stop": [""]}, "stop"),
        ({"temperature": -1}, "temperature"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "logprobs: true"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "outside the model's vocabulary"),
        ({"tools": [WEATHER] * 129}, "at most 128 for tools"),
        ({"grammar": "x" * 70_000}, "65536"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema"),
        ({"grammar": "x", "response_format": {"type": "json_object"}}, "either"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "fit into a context of 4096"),
    ],
)
def test_invalid_requests_are_refused(body: dict[str, Any], message: str):
    link = FakeLink()
    answer = client_of(link).post(PATH, json={**HELLO, **body})
    assert answer.status_code == 400
    assert answer.headers["x-should-retry"] == "false"
    assert message in answer.json()["error"]["message"]
    assert link.requests == []


def test_context_error_code():
    error = ask(FakeLink(), 400, messages=[{"role": "user", "content": "word " * 5000}])["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")


def test_unknown_model_is_not_found():
    assert ask(FakeLink(), 404, model="other")["error"]["code"] == "model_not_found"
    assert len(ask(FakeLink(), 404, model="x" * 5000)["error"]["message"]) < 1100
    assert ask(FakeLink(), model=NAME)["model"] == NAME
    assert ask(FakeLink(), model="")["model"] == NAME


def test_full_queue_has_retry_after():
    link = FakeLink()
    link.room = 1
    answer = client_of(link).post(PATH, json={**HELLO, "n": 2})
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert link.streams[0].cancelled


def test_generation_error():
    broken = Script(("Hel",), "error", "Expert 3 cannot be read from /data/models/x.bin.")
    answer = client_of(FakeLink(broken)).post(PATH, json=HELLO)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "Expert 3 cannot be read from a file"
    events = client_of(FakeLink(broken)).post(PATH, json={**HELLO, "stream": True}).text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "generation_failed"
    assert not any("[DONE]" in event for event in events)


def test_deadline():
    link = FakeLink(Script(finish=None))
    answer = client_of(link, Limits(deadline_s=0.01)).post(PATH, json=HELLO)
    assert answer.status_code == 500
    assert "0.01 seconds" in answer.json()["error"]["message"]
    assert link.streams[0].cancelled
