"""Ollama's API: what clients send and read, field by field."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.auth import Access
from auraflux.serve.limits import Limits
from auraflux.serve.ollama import pull
from auraflux.serve.service import Service
from tests.serve.fake_link import NAME, FakeLink, Script

HELLO = [{"role": "user", "content": "hello"}]
THOUGHT = "<think> They ask. </think> It is sunny."
CALL = '<tool_call>\n{"name": "weather", "arguments": {"place": "Bonn"}}\n</tool_call>'
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": {"type": "object"}}}
COUNTERS = {"total_duration", "load_duration", "prompt_eval_count", "prompt_eval_duration", "eval_count", "eval_duration"}


@pytest.fixture
def link() -> FakeLink:
    return FakeLink("Hello there!")


@pytest.fixture
def client(link: FakeLink) -> Iterator[TestClient]:
    with TestClient(make_app(Service(link, Limits()), Access())) as client:
        yield client


def post(client: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"model": NAME, "stream": False, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def lines(client: TestClient, path: str, **body: Any) -> list[dict[str, Any]]:
    answer = client.post(path, json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"] == "application/x-ndjson"
    return [json.loads(each) for each in answer.text.splitlines()]


def refusal(client: TestClient, path: str, status: int = 400, **body: Any) -> str:
    answer = client.post(path, json={"model": NAME, **body})
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error"}
    return answer.json()["error"]


def test_chat_streams_lines_and_counters(client: TestClient):
    *parts, last = lines(client, "/api/chat", messages=HELLO, keep_alive="5m")
    assert "".join(part["message"]["content"] for part in parts) == "Hello there!"
    assert all(part["done"] is False and part["model"] == NAME and part["created_at"].endswith("Z") for part in parts)
    assert last["done"]
    assert last["done_reason"] == "stop"
    assert last["message"] == {"role": "assistant", "content": ""}
    assert set(last) >= COUNTERS
    # of the fake statistics: first token after 0.5 s, 0.25 s of them in the queue, the last after 2.5 s
    assert [last[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration")] == [
        2_500_000_000,
        250_000_000,
        2_000_000_000,
    ]


def test_chat_as_one_object(client: TestClient, link: FakeLink):
    link.play(Script(("Hel", "lo"), "length"))
    answer = post(client, "/api/chat", messages=HELLO)
    assert answer["message"]["content"] == "Hello"
    assert answer["done_reason"] == "length"
    assert answer["eval_count"] > 0


def test_options_become_sampling_settings(client: TestClient, link: FakeLink):
    options = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "num_predict": 5,
        "stop": ["x"],
        "seed": 3,
        "repeat_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "num_ctx": 2048,
        "mirostat": 0,
        "num_gpu": 1,
        "unknown": None,
    }
    post(client, "/api/chat", messages=HELLO, options=options)
    used = link.requests[-1].sampling
    assert (used.temperature, used.top_p, used.top_k, used.min_p) == (0.7, 0.9, 7, 0.1)
    assert (used.max_tokens, used.stop, used.seed, used.repetition_penalty) == (5, ("x",), 3, 1.1)
    assert (used.presence_penalty, used.frequency_penalty) == (0.2, 0.3)
    post(client, "/api/generate", prompt="x", raw=True, options={"num_predict": -1, "seed": -1, "top_p": 0, "temperature": 1})
    used = link.requests[-1].sampling
    assert (used.max_tokens, used.seed) == (None, None)
    assert 0 < used.top_p < 1e-3


def test_think(client: TestClient, link: FakeLink):
    link.play(THOUGHT)
    answer = post(client, "/api/chat", messages=HELLO, think=True)
    assert answer["message"]["thinking"].strip() == "They ask."
    assert answer["message"]["content"] == "It is sunny."
    streamed = lines(client, "/api/generate", prompt="x", think="high")
    assert "".join(each.get("thinking", "") for each in streamed).strip() == "They ask."
    assert "".join(each["response"] for each in streamed) == "It is sunny."
    assert "<!-- high -->" in link.prompt
    assert "'max'" in refusal(client, "/api/chat", messages=HELLO, think="very")


def test_format(client: TestClient, link: FakeLink):
    for format in ("json", {"type": "object", "properties": {"a": {"type": "integer"}}}):
        for path, body in (("/api/chat", {"messages": HELLO}), ("/api/generate", {"prompt": "x", "raw": True})):
            post(client, path, format=format, **body)
            assert link.requests[-1].sampling.grammar
    post(client, "/api/chat", format="", messages=HELLO)
    assert link.requests[-1].sampling.grammar is None
    assert "must be 'json' or a JSON schema" in refusal(client, "/api/chat", messages=HELLO, format="xml")
    assert "cannot be enforced" in refusal(client, "/api/chat", messages=HELLO, format={"not": {"type": "string"}})


def test_tool_calls_and_results(client: TestClient, link: FakeLink):
    link.play(CALL)
    for answer in (
        post(client, "/api/chat", messages=HELLO, tools=[WEATHER]),
        *lines(client, "/api/chat", messages=HELLO, tools=[WEATHER])[:1],
    ):
        [call] = answer["message"]["tool_calls"]
        assert call["function"] == {"index": 0, "name": "weather", "arguments": {"place": "Bonn"}}
    assert answer["done"] is False
    link.play("Rain.")
    asked = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"place": "Bonn"}}}],
    }
    for result in ({}, {"tool_name": "weather"}, {"tool_call_id": "unknown"}):
        post(client, "/api/chat", messages=[*HELLO, asked, {"role": "tool", "content": "wet", **result}], tools=[WEATHER])
        assert '{"name": "weather", "arguments": {"place": "Bonn"}}' in link.prompt
        assert "wet" in link.prompt


def test_a_call_that_is_cut_short_is_left_out(client: TestClient, link: FakeLink):
    link.play(Script((CALL[:50],), "length"))
    *_, last = lines(client, "/api/chat", messages=HELLO, tools=[WEATHER])
    assert last["done_reason"] == "length"
    assert "tool_calls" not in last["message"]


def test_what_the_template_lacks_is_refused(client: TestClient, link: FakeLink):
    assert link.tokenizer is not None
    link.tokenizer.templates = {"default": "{% for m in messages %}{{ m.content }}{% endfor %}"}
    assert "does not support tools" in refusal(client, "/api/chat", messages=HELLO, tools=[WEATHER])
    assert "does not support thinking" in refusal(client, "/api/chat", messages=HELLO, think=True)
    post(client, "/api/chat", messages=HELLO, think=False)
    assert post(client, "/api/show")["capabilities"] == ["completion"]


def test_generate_with_and_without_a_template(client: TestClient, link: FakeLink):
    answer = post(client, "/api/generate", prompt="Why?", system="Be kind.")
    assert answer["response"] == "Hello there!"
    assert "Be kind." in link.prompt
    assert "<|im_start|>user\nWhy?" in link.prompt
    post(client, "/api/generate", prompt="Why?", raw=True)
    assert link.prompt == "Why?"
    assert link.tokenizer is not None
    link.tokenizer.templates = {}
    post(client, "/api/generate", prompt="Why?")
    assert link.prompt == "Why?"


def test_logprobs(client: TestClient):
    answer = post(client, "/api/chat", messages=HELLO, logprobs=True, top_logprobs=2)
    assert "".join(each["token"] for each in answer["logprobs"]) == "Hello there!"
    assert len(answer["logprobs"][0]["top_logprobs"]) == 2
    assert post(client, "/api/generate", prompt="x", raw=True, logprobs=True)["logprobs"][0]["top_logprobs"] == []


def test_requests_without_a_prompt_load_the_model(client: TestClient, link: FakeLink):
    assert post(client, "/api/chat", messages=[])["done_reason"] == "load"
    assert post(client, "/api/generate", keep_alive=0)["response"] == ""
    assert link.requests == []


@pytest.mark.parametrize("field", ["template", "context"])
def test_fields_that_change_the_meaning_are_refused(client: TestClient, field: str):
    given: Any = [1] if field == "context" else "x"
    assert f"{field} " in refusal(client, "/api/generate", prompt="x", **{field: given})


def test_errors_are_ollamas(client: TestClient, link: FakeLink):
    assert "not served here" in refusal(client, "/api/chat", 404, model="other", messages=HELLO)
    assert "options.temperature" in refusal(client, "/api/chat", messages=HELLO, options={"temperature": -1})
    assert "takes text only" in refusal(client, "/api/chat", messages=[{**HELLO[0], "images": ["aGk="]}])
    assert client.get("/api/nothing").json() == {"error": "Unknown path."}
    link.play(Script(("Hel",), "error", "The GPU is gone."))
    assert lines(client, "/api/chat", messages=HELLO)[-1] == {"error": "The GPU is gone."}
    assert refusal(client, "/api/chat", 500, messages=HELLO, stream=False) == "The GPU is gone."
    link.room = 0
    assert "again later" in refusal(client, "/api/chat", 429, messages=HELLO)
    link.facts = None
    assert "being loaded" in client.get("/api/tags").json()["error"]


def test_the_served_model_is_listed_and_shown(client: TestClient):
    version = client.get("/api/version").json()["version"]
    assert [int(part) for part in version.split(".")] > [0, 14, 2]
    [listed] = client.get("/api/tags").json()["models"]
    assert listed["model"] == listed["name"] == f"{NAME}:latest"
    assert len(listed["digest"]) == 64
    [running] = client.get("/api/ps").json()["models"]
    assert running["digest"] == listed["digest"]
    assert (running["size_vram"], running["context_length"]) == (0, 4096)
    for body in ({"model": listed["model"]}, {"model": "", "name": NAME}):
        shown = post(client, "/api/show", **body)
        assert shown["model_info"]["general.architecture"] == "qwen3"
        assert shown["model_info"]["qwen3.context_length"] == 4096
        assert shown["capabilities"] == ["completion", "tools", "thinking"]
        assert "temperature 0.2" in shown["parameters"]
        assert shown["details"]["family"] == "qwen3"
    assert "not served here" in refusal(client, "/api/show", 404, model="other")
    assert "model is missing" in refusal(client, "/api/show", model="")
    # as GitHub Copilot and Open WebUI ask, after they read the list
    chat = {"model": listed["model"], "messages": HELLO}
    assert client.post("/v1/chat/completions", json=chat).status_code == 200


def test_pull_and_delete_need_an_option(client: TestClient):
    assert [each["status"] for each in lines(client, "/api/pull")] == ["pulling manifest", "success"]
    assert post(client, "/api/pull", name=f"{NAME}:latest") == {"status": "success"}
    assert "--manage-models" in refusal(client, "/api/pull", 403, model="org/other")
    answer = client.request("DELETE", "/api/delete", json={"model": "org/other"})
    assert answer.status_code == 403
    assert "--manage-models" in answer.json()["error"]


@pytest.fixture
def managed(link: FakeLink, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    monkeypatch.setenv("AURAFLUX_HOME", str(tmp_path))
    monkeypatch.setattr("auraflux.weights.download.local_models._hub_folder", lambda: tmp_path / "hub")
    with TestClient(make_app(Service(link), Access(manage_models=True))) as client:
        yield client


def test_pull_reports_progress(managed: TestClient, monkeypatch: pytest.MonkeyPatch):
    asked = []

    def fetch(name: str, report: Any) -> None:
        asked.append(name)
        for done in range(0, 101, 50):
            report("downloading", done, 100)

    monkeypatch.setattr(pull, "fetch", fetch)
    first, *progress, last = lines(managed, "/api/pull", model="hf.co/org/other:latest")
    assert asked == ["org/other"]
    assert (first["status"], last) == ("pulling manifest", {"status": "success"})
    assert progress[-1] == {"status": "downloading", "digest": "downloading", "total": 100, "completed": 100}


def test_pull_says_why_it_failed(managed: TestClient):
    # a path is not a name to download
    for name in ("/etc", "no-such-model"):
        assert "neither a built-in name" in lines(managed, "/api/pull", model=name)[-1]["error"]
        assert "neither a built-in name" in refusal(managed, "/api/pull", 502, model=name, stream=False)


def test_delete(managed: TestClient, tmp_path: Any, link: FakeLink):
    def delete(name: str) -> Any:
        answer = managed.request("DELETE", "/api/delete", json={"model": name})
        return answer.status_code, answer.json()

    snapshot = tmp_path / "hub" / "models--org--other" / "snapshots" / "abc"
    (snapshot / "more").mkdir(parents=True)
    for file in ("config.json", "a.safetensors", "more/x.gguf"):
        (snapshot / file).write_text("{}")
    assert delete("org/none")[0] == 404
    assert "being served" in delete(f"{NAME}:latest")[1]["error"]
    assert delete("org/other/more/x.gguf:latest") == (200, {"status": "success"})
    assert not (snapshot / "more/x.gguf").exists()
    link.facts = replace(link._facts, path=snapshot)
    assert "in use" in delete("org/other")[1]["error"]
    link.facts = link._facts
    assert delete("org/other") == (200, {"status": "success"})
    assert not (tmp_path / "hub" / "models--org--other").exists()
