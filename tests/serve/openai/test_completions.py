"""/v1/completions, /v1/models, /tokenize and /detokenize."""

import json
from typing import Any

import pytest
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.service import Service
from tests.serve.fake_link import NAME, FakeLink, Script

PATH = "/v1/completions"


def client_of(link: FakeLink) -> TestClient:
    return TestClient(make_app(Service(link)))


def complete(link: FakeLink, status: int = 200, **body: Any) -> dict[str, Any]:
    answer = client_of(link).post(PATH, json=body)
    assert answer.status_code == status, answer.text
    return answer.json()


@pytest.mark.parametrize("prompt", ["one", ["one", "two"], [5, 6, 7], [[5, 6], [7]]], ids=str)
def test_four_forms_of_prompts(prompt: Any):
    link = FakeLink("goes on")
    body = complete(link, prompt=prompt)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    wanted = prompt if several else [prompt]
    assert [choice["text"] for choice in body["choices"]] == ["goes on"] * len(wanted)
    for request, each in zip(link.requests, wanted, strict=True):
        assert request.prompt == (tuple(link.tokenizer.encode(each)) if isinstance(each, str) else tuple(each))
    assert body["usage"]["prompt_tokens"] == sum(len(request.prompt) for request in link.requests)


def test_n_choices_per_prompt_are_adjacent():
    link = FakeLink("a1", "a2", "b1", "b2")
    body = complete(link, prompt=["a", "b"], n=2, best_of=2, echo=True)
    assert [choice["text"] for choice in body["choices"]] == ["aa1", "aa2", "bb1", "bb2"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"]["prompt_tokens"] == 2


def test_stream_with_echo_and_usage():
    answer = client_of(FakeLink("goes on")).post(
        PATH, json={"prompt": "It ", "echo": True, "stream": True, "stream_options": {"include_usage": True}}
    )
    *events, done = [event.removeprefix("data: ") for event in answer.text.strip().split("\n\n")]
    *found, last = map(json.loads, events)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["text"] for chunk in found] == ["It ", "goes", " on", ""]
    assert found[-1]["choices"][0]["finish_reason"] == "stop"
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0


def test_defaults_are_those_of_openai_and_of_the_model():
    link = FakeLink()
    complete(link, prompt="x")
    assert (link.requests[0].sampling.max_tokens, link.requests[0].sampling.temperature) == (16, 0.2)


def test_logprobs_are_parallel_lists():
    [choice] = complete(FakeLink("Hi you"), prompt="x", logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "Hi you"
    assert logprobs["text_offset"][0] == 0
    assert all(len(top) == 2 for top in logprobs["top_logprobs"])
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"])


def test_response_format():
    link = FakeLink('{"a": 1}')
    complete(link, prompt="x", response_format={"type": "json_object"})
    complete(link, prompt="x", grammar={"type": "regex", "value": "a+"})
    assert all(request.sampling.grammar for request in link.requests)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"suffix": "end"}, "cannot fill in the middle"),
        ({"best_of": 3}, "best_of=3"),
        ({"echo": True, "logprobs": 1, "stream": True}, "not streamed"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt": []}, "empty list"),
        ({"prompt": ""}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [10_000_000]}, "outside the model's vocabulary"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["x"] * 65}, "at most 64 for prompt"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
    ids=str,
)
def test_invalid_requests_are_refused(body: dict[str, Any], message: str):
    assert message in complete(FakeLink(), 400, **{"prompt": "x", **body})["error"]["message"]


def test_echo_with_logprobs_scores_the_prompt():
    """As lm-eval reads it: one entry per prompt token, the first without a value, then the generated ones."""
    link = FakeLink(Script(("Hi",), "stop"))
    assert link.tokenizer is not None
    prompt = link.tokenizer.encode("It is so")
    [choice] = complete(link, prompt=prompt, echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["text"] == "It is soHi"
    assert link.requests[-1].prompt_logprobs == 1
    scores = choice["logprobs"]
    assert {len(values) for values in scores.values()} == {len(scores["tokens"])}
    assert "".join(scores["tokens"][: len(prompt)]) == "It is so"
    assert scores["token_logprobs"][: len(prompt)] == [None, *[-2.0] * (len(prompt) - 1)]
    assert scores["top_logprobs"][0] is None
    # the stop token counts too: a reader drops the last entries of generated tokens by number
    assert len(scores["tokens"]) == len(prompt) + len(link.tokenizer.encode("Hi", special=False)) + 1
    offsets = scores["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[len(prompt)] == len("It is so")


def test_no_tokens_are_generated_to_score_a_prompt():
    link = FakeLink("Hi")
    for body in ({"echo": True, "logprobs": 2}, {"echo": True}, {"prompt_logprobs": 2}):
        answer = complete(link, prompt="It is", max_tokens=0, **body)
        [choice] = answer["choices"]
        assert choice["text"] == ("It is" if "echo" in body else "")
        assert choice["finish_reason"] == "length"
        assert answer["usage"]["completion_tokens"] == 0
    first, *rest = choice["prompt_logprobs"]
    assert first is None
    own = str(link.requests[-1].prompt[1])
    assert rest[0]["5"]["rank"] == 1
    assert rest[0][own] == {"logprob": -2.0, "rank": 9, "decoded_token": link.tokenizer.piece(int(own)).decode()}


def test_error_within_a_stream():
    link = FakeLink(Script(("Hel",), "error", "The GPU is gone."))
    text = client_of(link).post(PATH, json={"prompt": "x", "stream": True}).text
    last = json.loads(text.strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == "The GPU is gone."


def test_models():
    client = client_of(FakeLink())
    [model] = client.get("/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["kv"]) == (NAME, 4096, "k8v4")
    assert client.get(f"/v1/models/{NAME}").json() == model
    assert client.get("/v1/models/other").status_code == 404


def test_tokenize_and_detokenize():
    link = FakeLink()
    client = client_of(link)
    made = client.post("/tokenize", json={"prompt": "Hello there"}).json()
    assert made["count"] == len(made["tokens"]) > 1
    assert made["max_model_len"] == 4096
    assert client.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "Hello there"}
    chat = client.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]}).json()
    assert client.post("/detokenize", json={"tokens": chat["tokens"]}).json()["prompt"].endswith("<|im_start|>assistant\n")


def test_invalid_token_ids():
    client = client_of(FakeLink())
    assert client.post("/tokenize", json={}).status_code == 400
    assert client.post("/tokenize", json={"prompt": "x", "messages": [{"role": "user"}]}).status_code == 400
    assert client.post("/detokenize", json={"tokens": [1 << 30]}).status_code == 400
