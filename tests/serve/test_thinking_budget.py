"""Thinking budgets through every API, with a model that never stops thinking by itself."""

import json
import random
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import jsonschema
import openai
import pytest
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.service import Service
from tests.engine.tiny import tiny
from tests.serve.fake_link import NAME, FakeLink
from tests.serve.schemas import short_schema
from tests.serve.server import NAME as TINY
from tests.serve.server import Served, running
from tests.tokenizer.toy_tokenizers import CHATML, byte_level, folder

HELLO = [{"role": "user", "content": "hello"}]
THINKS = CHATML.replace("<|im_start|>assistant\n'", "<|im_start|>assistant\n<think>\n'")
BUDGET = 64


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("thinks") / "model"
    shutil.copytree(tiny(), path)
    folder(path, byte_level(), tokenizer_config={"chat_template": THINKS, "eos_token": "<|im_end|>"})
    with running(path) as server:
        yield server


def asked(body: dict[str, Any], path: str = "/v1/chat/completions", template: str = "") -> Any:
    link = FakeLink()
    assert link.tokenizer is not None
    link.tokenizer.templates = {"default": THINKS + template}
    answer = TestClient(make_app(Service(link))).post(path, json={"model": NAME, **body})
    assert answer.status_code == 200, answer.text
    return link.requests[-1].thinking


def reasoning_tokens(server: Served, text: str) -> int:
    return len(server.model.tokenizer.encode(text, special=False))


def test_reasoning_ends_at_the_budget_and_the_answer_follows(served: Served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        for number in range(6):
            body: dict[str, Any] = {"max_thinking_tokens": BUDGET if number % 2 else number}
            # a random model ends anywhere, which is not what is tested
            body |= {"ignore_eos": True}
            answer = client.chat.completions.create(
                model=TINY, messages=HELLO, max_tokens=100, seed=number, temperature=1, logprobs=True, extra_body=body
            )
            closing = reasoning_tokens(served, "\n</think>\n\n")
            tokens = [each.token for each in answer.choices[0].logprobs.content]
            ends = next(count for count in range(101) if "</think>" in "".join(tokens[:count]))
            assert ends <= body["max_thinking_tokens"] + closing
            assert len(answer.choices[0].message.content) > 0
            assert answer.usage.completion_tokens == 100
        without = client.chat.completions.create(
            model=TINY, messages=HELLO, max_tokens=100, temperature=1, seed=1, extra_body={"ignore_eos": True}
        )
        assert without.choices[0].message.content == ""


@pytest.mark.slow
def test_200_runs_stay_within_the_budget(served: Served):
    closing = reasoning_tokens(served, "\n</think>\n\n")

    def ends(seed: int) -> int:
        """Return the number of tokens up to the end of the reasoning."""
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            body = {"max_thinking_tokens": BUDGET, "ignore_eos": True}
            answer = client.chat.completions.create(
                model=TINY, messages=HELLO, max_tokens=90, seed=seed, temperature=1 + seed % 3, logprobs=True, extra_body=body
            )
        assert answer.usage.completion_tokens == 90
        tokens = [each.token for each in answer.choices[0].logprobs.content]
        return next(count for count in range(91) if "</think>" in "".join(tokens[:count]))

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(ends, range(200)))
    print(f"200 runs: reasoning and its end take {min(found)} to {max(found)} tokens; {BUDGET} + {closing} are allowed")
    assert max(found) <= BUDGET + closing


@pytest.mark.slow
def test_1000_structured_answers_after_reasoning_are_valid(served: Served):
    rng = random.Random(49)
    schemas = [short_schema(rng) for _ in range(1000)]
    encode = served.model.tokenizer.encode
    # a random model hardly ends a text, or the white space that JSON allows
    closing = {encode(text, special=False)[0]: 12 for text in ('"', "}", "]")}
    bias = {str(token): value for token, value in {**closing, encode(" ", special=False)[0]: -8}.items()}

    def valid(number: int) -> bool:
        """Return whether the answer to a request follows its schema; its reasoning must be there."""
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schemas[number], "strict": True}}
        body = {"messages": HELLO, "max_thinking_tokens": 1 + number % 24, "response_format": wanted, "seed": number}
        body |= {"temperature": 1, "max_tokens": 400, "logit_bias": bias}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=300).json()["choices"][0]
        assert answer["finish_reason"] == "stop", answer
        assert answer["message"]["reasoning_content"], answer
        jsonschema.validate(json.loads(answer["message"]["content"]), schemas[number])
        return True

    with ThreadPoolExecutor(4) as threads:
        count = sum(threads.map(valid, range(1000)))
    print(f"{count} of 1,000 answers are valid")
    assert count == 1000


def test_structured_output_with_a_budget(served: Served):
    body = {"messages": HELLO, "max_thinking_tokens": 9, "grammar": {"type": "regex", "value": "(yes|no)"}, "temperature": 1}
    for seed in range(10):
        answer = httpx.post(f"{served.url}/v1/chat/completions", json={**body, "seed": seed}, timeout=60).json()
        assert answer["choices"][0]["message"]["content"].strip() in ("yes", "no")


def test_anthropic_client(served: Served):
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as client:
        thinking: Any = {"type": "enabled", "budget_tokens": 1024}
        answer = client.messages.create(model=TINY, messages=HELLO, max_tokens=20, thinking=thinking)
        assert [block.type for block in answer.content] == ["thinking"]
        # smaller than the client's own minimum, which the server does not have
        answer = client.messages.create(
            model=TINY, messages=HELLO, max_tokens=60, thinking={**thinking, "budget_tokens": 8}, extra_body={"seed": 1}
        )
        kinds = [block.type for block in answer.content]
        assert kinds in (["thinking", "text"], ["thinking"])


def test_where_a_budget_comes_from():
    assert asked({"messages": HELLO}) is None
    assert asked({"messages": HELLO, "max_thinking_tokens": 5}).tokens == 5
    assert asked({"messages": HELLO, "thinking": {"type": "enabled", "budget_tokens": 6}}).tokens == 6
    assert (
        asked({"messages": HELLO, "max_tokens": 9, "thinking": {"type": "enabled", "budget_tokens": 7}}, "/v1/messages").tokens
        == 7
    )
    assert asked({"input": "hello", "reasoning": {"max_tokens": 8}}, "/v1/responses").tokens == 8
    assert asked({"input": "hello", "reasoning": {"effort": "low"}}, "/v1/responses").tokens == 1024
    assert asked({"messages": HELLO, "think": "medium"}, "/api/chat").tokens == 4096
    assert asked({"messages": HELLO, "reasoning_effort": "high"}) is None
    # a template that knows efforts is told
    assert asked({"messages": HELLO, "reasoning_effort": "low"}, template="{# reasoning_effort #}") is None
    found = asked({"messages": HELLO, "max_thinking_tokens": 5})
    assert found.opened is not None
    assert found.opened.opening == "<think>"


def test_bad_budgets_are_refused():
    client = TestClient(make_app(Service(FakeLink())))
    for value in (-1, "x", 1.5, 1 << 40):
        answer = client.post("/v1/chat/completions", json={"messages": HELLO, "max_thinking_tokens": value})
        assert answer.status_code == 400
        assert "max_thinking_tokens" in answer.json()["error"]["message"]


def test_models_without_reasoning_have_no_budget(tmp_path: Path):
    link = FakeLink()
    assert link.tokenizer is not None
    link.tokenizer.templates = {"default": CHATML}
    client = TestClient(make_app(Service(link)))
    assert client.post("/v1/chat/completions", json={"messages": HELLO, "max_thinking_tokens": 5}).status_code == 200
    assert link.requests[-1].thinking is None
