"""Unmodified clients over a real connection: OpenAI's and LangChain's."""

import asyncio
import json
from collections.abc import Iterator

import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.service import Service
from tests.serve.fake_link import NAME, FakeLink, Script, serving

KEY = "sk-of-a-test"
HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<think> They ask. </think> It is sunny."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn", "days": 2}}\n</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["place", "days"],
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Weather of a place.", "parameters": SCHEMA}}


class Trip(BaseModel):
    """A journey."""

    place: str
    days: int


TRIP = Trip(place="Bonn", days=2)


@tool
def weather(place: str, days: int) -> str:
    """Weather of a place."""
    return f"{days} days of rain in {place}"


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[FakeLink, str]]:
    link = FakeLink()
    with serving(make_app(Service(link), Access(keys=(KEY,)))) as url:
        yield link, f"{url}/v1"


@pytest.fixture
def link(served: tuple[FakeLink, str]) -> FakeLink:
    link = served[0]
    link.room = None
    link.requests.clear()
    link.play("Hello there!")
    return link


@pytest.fixture
def client(served: tuple[FakeLink, str], link: FakeLink) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served[1], api_key=KEY, max_retries=0) as client:
        yield client


# clients of one URL share a connection, which is closed once
@pytest.fixture(scope="module")
def langchain(served: tuple[FakeLink, str]) -> Iterator[ChatOpenAI]:
    model = ChatOpenAI(base_url=served[1], api_key=KEY, model=NAME, max_retries=0)
    yield model
    model.root_client.close()


def test_chat(client: openai.OpenAI):
    answer = client.chat.completions.create(model=NAME, messages=HELLO)
    assert answer.choices[0].message.content == "Hello there!"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


def test_chat_streamed(client: openai.OpenAI, link: FakeLink):
    link.play(THOUGHT)
    stream = client.chat.completions.create(
        model=NAME, messages=HELLO, stream=True, stream_options={"include_usage": True}, extra_body={"min_p": 0.1}
    )
    *chunks, last = stream
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas).strip() == "It is sunny."
    assert "".join(getattr(delta, "reasoning_content", "") for delta in deltas).strip() == "They ask."
    assert last.choices == []
    assert last.usage.completion_tokens_details.reasoning_tokens > 0
    assert link.requests[0].sampling.min_p == 0.1


def test_stream_helper(client: openai.OpenAI, link: FakeLink):
    link.play(CALL)
    with client.chat.completions.stream(
        model=NAME, messages=HELLO, tools=[openai.pydantic_function_tool(Trip, name="weather")]
    ) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert "tool_calls.function.arguments.done" in kinds
    assert message.tool_calls[0].function.parsed_arguments == TRIP


def test_calls_round_trip(client: openai.OpenAI, link: FakeLink):
    link.play(CALL, "Rain.")
    first = client.chat.completions.create(model=NAME, messages=HELLO, tools=[WEATHER], tool_choice="required")
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls"
    [call] = message.tool_calls
    assert json.loads(call.function.arguments) == TRIP.model_dump()
    result = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
    second = client.chat.completions.create(model=NAME, messages=[*HELLO, message, result], tools=[WEATHER])
    assert second.choices[0].message.content == "Rain."
    assert '"place": "Bonn"' in link.prompt


def test_structured_output(client: openai.OpenAI, link: FakeLink):
    link.play(TRIP.model_dump_json())
    answer = client.chat.completions.parse(model=NAME, messages=HELLO, response_format=Trip)
    assert answer.choices[0].message.parsed == TRIP
    assert link.requests[0].sampling.grammar
    client.chat.completions.create(model=NAME, messages=HELLO, response_format={"type": "json_object"})
    assert link.requests[1].sampling.grammar


def test_logprobs(client: openai.OpenAI):
    answer = client.chat.completions.create(model=NAME, messages=HELLO, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    assert "".join(each.token for each in content) == "Hello there!"
    assert len(content[0].top_logprobs) == 3


def test_completions_and_models(client: openai.OpenAI):
    assert client.completions.create(model=NAME, prompt="x").choices[0].text == "Hello there!"
    streamed = client.completions.create(model=NAME, prompt="x", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "Hello there!"
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME


def test_client_error_classes(client: openai.OpenAI, link: FakeLink):
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature") as refused:
        client.chat.completions.create(model=NAME, messages=HELLO, temperature=-1)
    assert refused.value.param == "temperature"
    assert refused.value.request_id
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    link.play(Script(("Hel",), "error", "The GPU is gone."))
    with pytest.raises(openai.InternalServerError, match="The GPU is gone"):
        client.chat.completions.create(model=NAME, messages=HELLO)
    with pytest.raises(openai.APIError, match="The GPU is gone"):
        list(client.chat.completions.create(model=NAME, messages=HELLO, stream=True))
    link.room = 0
    with pytest.raises(openai.RateLimitError, match="try again later"):
        client.chat.completions.create(model=NAME, messages=HELLO)


def test_async_client(served: tuple[FakeLink, str], link: FakeLink):
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=served[1], api_key=KEY) as client:
            whole = client.chat.completions.create(model=NAME, messages=HELLO)
            stream = await client.chat.completions.create(model=NAME, messages=HELLO, stream=True)
            text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
            return [text, (await whole).choices[0].message.content]

    assert asyncio.run(ask()) == ["Hello there!"] * 2


def test_langchain_invoke_and_stream(langchain: ChatOpenAI, link: FakeLink):
    answer = langchain.invoke("hello")
    assert answer.content == "Hello there!"
    assert answer.usage_metadata["input_token_details"] == {"cache_read": 3}
    assert "".join(chunk.content for chunk in langchain.stream("hello")) == "Hello there!"


def test_langchain_structured_output(langchain: ChatOpenAI, link: FakeLink):
    link.play(TRIP.model_dump_json())
    assert langchain.with_structured_output(Trip).invoke("Plan a trip.") == TRIP
    assert link.requests[0].sampling.grammar
    link.play(CALL.replace("weather", "Trip"))
    assert langchain.with_structured_output(Trip, method="function_calling").invoke("Plan a trip.") == TRIP


def test_langchain_tools(langchain: ChatOpenAI, link: FakeLink):
    link.play(CALL)
    bound = langchain.bind_tools([weather])
    [call] = bound.invoke("Will it rain?").tool_calls
    assert (call["name"], call["args"]) == ("weather", {"place": "Bonn", "days": 2})
    whole = None
    for chunk in bound.stream("Will it rain?"):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == {"place": "Bonn", "days": 2}
    assert weather.invoke(call["args"]) == "2 days of rain in Bonn"
