"""A server with a tiny model: every API returns the output that the model generates alone."""

import math
import multiprocessing
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any, Literal

import anthropic
import httpx
import openai
import pytest
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict, Field

import auraflux
from auraflux.cache.prefix.radix import common_length
from auraflux.loading.language_model import LanguageModel
from auraflux.serve.transport.http_process import HttpSettings
from auraflux.serve.transport.pipe import STOP
from tests.engine.tiny import tiny
from tests.serve.server import NAME, Served, http_server, running, wait_until

HELLO = [{"role": "user", "content": "The quick brown fox jumps."}]
GREEDY: dict[str, Any] = {"model": NAME, "temperature": 0}
LONG = "The lazy dog says hello again, and they don't think it's won. " * 4 + "say we"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running() as served:
        yield served


@pytest.fixture(scope="module")
def alone() -> LanguageModel:
    return auraflux.load(tiny(), "cpu", exact=True, context=512, max_sequences=1, sampling={"temperature": 0})


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    """Clear the prefix cache between tests."""
    if "served" in request.fixturenames:
        request.getfixturevalue("served").model.reset()
        request.getfixturevalue("alone").reset()


@pytest.fixture
def client(served: Served, alone: LanguageModel) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(served: Served, alone: LanguageModel) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        yield client


def written(model: LanguageModel, prompt: str | list[int], **settings: Any) -> str:
    return "".join(model.generate(prompt, **settings))


def completed(client: openai.OpenAI, prompt: str | list[int] = LONG, **settings: Any) -> str:
    return client.completions.create(prompt=prompt, **{**GREEDY, "max_tokens": 12, **settings}).choices[0].text


def figure(served: Served, name: str) -> float:
    found = re.search(rf"^auraflux:{name}(?:{{[^}}]*}})? (\S+)$", httpx.get(f"{served.url}/metrics").text, re.M)
    assert found, name
    return float(found[1])


def test_chat(client: openai.OpenAI, alone: LanguageModel):
    expected = written(alone, alone.chat_ids(HELLO), max_tokens=16)
    whole = client.chat.completions.create(messages=HELLO, max_tokens=16, **GREEDY)
    assert whole.choices[0].message.content == expected
    assert whole.usage.prompt_tokens == len(alone.chat_ids(HELLO))
    assert whole.usage.completion_tokens == 16
    stream = client.chat.completions.create(messages=HELLO, max_tokens=16, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == expected


def test_completions(client: openai.OpenAI, alone: LanguageModel):
    expected = written(alone, LONG, max_tokens=12)
    assert completed(client) == expected
    stream = client.completions.create(prompt=LONG, max_tokens=12, stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == expected


def test_responses(client: openai.OpenAI, alone: LanguageModel):
    expected = written(alone, alone.chat_ids(HELLO), max_tokens=16)
    whole = client.responses.create(input=HELLO, max_output_tokens=16, **GREEDY)
    assert whole.output_text == expected
    stream = client.responses.create(input=HELLO, max_output_tokens=16, stream=True, **GREEDY)
    assert "".join(event.delta for event in stream if event.type == "response.output_text.delta") == expected


def test_messages(claude: anthropic.Anthropic, alone: LanguageModel):
    expected = written(alone, alone.chat_ids(HELLO), max_tokens=16)
    whole = claude.messages.create(messages=HELLO, max_tokens=16, **_claude())
    assert whole.content[0].text == expected
    assert whole.stop_reason == "max_tokens"
    with claude.messages.stream(messages=HELLO, max_tokens=16, **_claude()) as stream:
        assert "".join(stream.text_stream) == expected


def _claude() -> dict[str, Any]:
    # the client has no parameter for it any more
    return {"model": NAME, "extra_body": {"temperature": 0}}


def test_second_request_hits_the_prefix_cache(client: openai.OpenAI, alone: LanguageModel):
    first = client.chat.completions.create(messages=HELLO, max_tokens=16, **GREEDY)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    messages = [*HELLO, answer, {"role": "user", "content": "And then?"}]
    second = client.chat.completions.create(messages=messages, max_tokens=16, **GREEDY)
    # the last generated token is not in the cache
    before = alone.chat_ids(HELLO) + list(alone.tokens(alone.chat_ids(HELLO), max_tokens=16))[:-1]
    assert second.usage.prompt_tokens_details.cached_tokens == common_length(before, alone.chat_ids(messages)) > 20
    assert second.choices[0].message.content == written(alone, alone.chat_ids(messages), max_tokens=16)


def test_n_choices_share_their_prompt(client: openai.OpenAI, served: Served, alone: LanguageModel):
    counts, length = served.scheduler.counts, len(alone.tokenizer.encode(LONG))
    looked_up, found = counts.queried_tokens, counts.hit_tokens
    several = client.completions.create(model=NAME, prompt=LONG, max_tokens=12, n=3, seed=7)
    assert [each.text for each in several.choices] == [
        written(alone, LONG, max_tokens=12, temperature=1.0, seed=seed) for seed in (7, 8, 9)
    ]
    assert counts.queried_tokens - looked_up == 3 * (length - 1)
    assert counts.hit_tokens - found == 2 * (length - 1)
    assert several.usage.prompt_tokens == length


def test_logprobs_match_the_model(client: openai.OpenAI, alone: LanguageModel):
    ids = alone.tokenizer.encode(LONG)
    made = client.completions.create(prompt=ids, max_tokens=8, logprobs=5, **GREEDY).choices[0].logprobs
    tokens = list(alone.tokens(ids, max_tokens=8))
    assert made.tokens == [alone.tokenizer.piece(token).decode(errors="replace") for token in tokens]
    expected = alone.logits(ids + tokens)[len(ids) - 1 : -1].log_softmax(-1)
    for place, token in enumerate(tokens):
        assert made.token_logprobs[place] == pytest.approx(float(expected[place, token]), abs=0.02)
    chat = client.chat.completions.create(messages=HELLO, max_tokens=8, logprobs=True, top_logprobs=5, **GREEDY)
    for each in chat.choices[0].logprobs.content:
        likely = [other.logprob for other in each.top_logprobs]
        # greedy sampling picks the most likely token
        assert each.logprob == likely[0]
        assert likely == sorted(likely, reverse=True)
        assert sum(map(math.exp, likely)) <= 1.0001


def test_logit_bias(client: openai.OpenAI, alone: LanguageModel):
    tokens = list(alone.tokens(LONG, max_tokens=12))
    made = client.completions.create(
        prompt=LONG, max_tokens=12, logprobs=0, logit_bias={str(token): -100 for token in tokens}, **GREEDY
    )
    pieces = {alone.tokenizer.piece(token).decode(errors="replace") for token in tokens} - {"\N{REPLACEMENT CHARACTER}"}
    assert pieces
    assert not pieces & set(made.choices[0].logprobs.tokens)
    (fox,) = alone.tokenizer.encode(" fox")
    assert completed(client, logit_bias={str(fox): 100}, max_tokens=5) == " fox" * 5


def test_stop_strings(client: openai.OpenAI, claude: anthropic.Anthropic, alone: LanguageModel):
    whole = written(alone, LONG, max_tokens=12)
    stop = next(letter for letter in whole[3:] if letter.isalnum())
    made = client.completions.create(prompt=LONG, max_tokens=12, stop=["never there", stop], **GREEDY).choices[0]
    assert (made.text, made.finish_reason) == (whole[: whole.index(stop)], "stop")
    answer = written(alone, alone.chat_ids(HELLO), max_tokens=16)
    stop = next(letter for letter in answer[3:] if letter.isalnum())
    message = claude.messages.create(messages=HELLO, max_tokens=16, stop_sequences=[stop], **_claude())
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)


def test_seed_is_reproducible(client: openai.OpenAI, alone: LanguageModel):
    hot = {"temperature": 1.5, "max_tokens": 24}
    outputs = [completed(client, seed=seed, **hot) for seed in (1, 1, 2)]
    assert outputs[0] == outputs[1] == written(alone, LONG, seed=1, **hot)
    assert outputs[2] == written(alone, LONG, seed=2, **hot) != outputs[0]


def test_penalties(client: openai.OpenAI, alone: LanguageModel):
    (fox,) = alone.tokenizer.encode(" fox")
    bias = {"logit_bias": {str(fox): 16}, "max_tokens": 24}
    assert completed(client, **bias) == written(alone, LONG, max_tokens=24, logit_bias={fox: 16})
    lowered = completed(client, frequency_penalty=2, presence_penalty=1, **bias)
    assert lowered.count(" fox") < completed(client, **bias).count(" fox")
    settings = {"frequency_penalty": 2, "presence_penalty": 1, "logit_bias": {fox: 16}}
    assert lowered == written(alone, LONG, max_tokens=24, **settings)


def test_concurrent_clients_get_the_same_output(client: openai.OpenAI, alone: LanguageModel):
    requests = [
        (
            f"{LONG if number % 3 else ''}Number {number}",
            {"seed": number, "temperature": number % 4 / 2, "max_tokens": 10 + number},
        )
        for number in range(12)
    ]
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda each: completed(client, each[0], **each[1]), requests))
    assert found == [written(alone, prompt, **settings) for prompt, settings in requests]


def test_metrics(client: openai.OpenAI, served: Served, alone: LanguageModel):
    names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total", "prefix_cache_hits_total")
    names += ("e2e_request_latency_seconds_count", "time_to_first_token_seconds_count")
    before, gaps = [figure(served, name) for name in names], figure(served, "inter_token_latency_seconds_count")
    for _ in range(2):
        completed(client, max_tokens=10)
    length = len(alone.tokenizer.encode(LONG))
    expected = [2 * length, 20, 2 * (length - 1), length - 1, 2, 2]
    wait_until(lambda: figure(served, "num_requests_running") == 0)
    wait_until(lambda: figure(served, "prefix_cache_queries_total") == before[2] + expected[2])
    assert [figure(served, name) - was for name, was in zip(names, before, strict=True)] == expected
    # tokens in the first output have no inter-token latency
    assert 0 < figure(served, "inter_token_latency_seconds_count") - gaps <= 18
    assert figure(served, "kv_cache_usage_perc") == 0


def test_context_length_is_enforced(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError, match="must fit into a context of 512") as refused:
        completed(client, prompt=[5] * 512)
    assert refused.value.code == "context_length_exceeded"
    # generation stops at the context length
    made = client.completions.create(prompt=[5] * 500, max_tokens=100, extra_body={"ignore_eos": True}, **GREEDY)
    assert made.usage.completion_tokens == 12


def test_full_queue_is_refused(alone: LanguageModel):
    def ask() -> httpx.Response:
        return httpx.post(
            f"{served.url}/v1/completions", json={"prompt": "hello", "max_tokens": 3, "temperature": 0}, timeout=60
        )

    with running(max_sequences=1, settings=HttpSettings(waiting=1, grace_s=0.5)) as served, ThreadPoolExecutor(2) as pool:
        # no engine step runs inside
        with served.scheduler.exclusive():
            requests = [pool.submit(ask) for _ in range(2)]
            wait_until(lambda: served.scheduler.queued == 2)
            refused = ask()
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "queue_full"
        assert int(refused.headers["retry-after"]) > 0
        expected = written(alone, "hello", max_tokens=3)
        assert [each.result().json()["choices"][0]["text"] for each in requests] == [expected] * 2


def test_not_ready_while_loading():
    ours, theirs = multiprocessing.Pipe()
    with http_server(theirs, HttpSettings()) as url:
        wait_until(lambda: _alive(url))
        assert httpx.get(f"{url}/ready").status_code == 503
        refused = httpx.post(f"{url}/v1/chat/completions", json={"messages": HELLO})
        assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
        ours.send((STOP,))
    ours.close()


def _alive(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


class Trip(BaseModel):
    """A journey."""

    model_config = ConfigDict(extra="forbid")
    place: Annotated[str, Field(max_length=12)]
    days: Annotated[int, Field(ge=1, le=30)]
    by: Literal["train", "ship"]


@tool(args_schema=Trip)
def plan(place: str, days: int, by: str) -> str:
    """Plan a journey."""
    return f"{days} days in {place} by {by}"


@pytest.fixture(scope="module")
def langchain(served: Served) -> Iterator[Callable[..., ChatOpenAI]]:
    # clients of one URL share a connection, which is closed once
    made: list[ChatOpenAI] = []

    def make(**settings: Any) -> ChatOpenAI:
        made.append(ChatOpenAI(base_url=f"{served.url}/v1", api_key="none", model=NAME, max_tokens=400, **settings))
        return made[-1]

    yield make
    made[0].root_client.close()


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_langchain(langchain: Callable[..., ChatOpenAI], method: Any):
    for seed in range(3):
        model = langchain(temperature=2, seed=seed)
        assert isinstance(model.with_structured_output(Trip, method=method).invoke("Plan a journey."), Trip)


def test_langchain_tools(langchain: Callable[..., ChatOpenAI]):
    bound = langchain(temperature=2, seed=1).bind_tools([plan], tool_choice="any", strict=True, parallel_tool_calls=False)
    calls = bound.invoke("Plan a journey.").tool_calls
    assert calls
    assert all(f"by {call['args']['by']}" in plan.invoke(call["args"]) for call in calls)
    whole = None
    for chunk in bound.stream("Plan a journey."):
        whole = chunk if whole is None else whole + chunk
    assert [call["args"] for call in whole.tool_calls] == [call["args"] for call in calls]
