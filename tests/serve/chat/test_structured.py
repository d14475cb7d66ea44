"""A finished answer follows its schema, even at temperature 2 from a model with random weights."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from auraflux.serve.transport.http_process import HttpSettings
from tests.serve.schemas import random_schema
from tests.serve.server import Served, running

ALL = 100
# logit bias of closing tokens in each retry of an answer that did not end in time
NUDGES = (0, 8, 14, 20)
# relative bias: a quote more than other tokens, and some that patterns require
CLOSING = {'"': 1.5, "}": 1.0, "]": 1.0, "-": 0.8, "7": 0.8}
MESSAGES = [{"role": "user", "content": "Give me some JSON."}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(max_sequences=8, settings=HttpSettings(waiting=ALL, grace_s=0.5)) as served:
        yield served


async def answer(client: httpx.AsyncClient, closing: dict[int, float], seed: int, **fields: Any) -> dict[str, Any] | None:
    """Return the first finished answer; None if no attempt finished."""
    for nudge in NUDGES:
        bias = {str(token): nudge * share for token, share in closing.items()}
        body = {"messages": MESSAGES, "temperature": 2, "seed": seed, "max_tokens": 400, "logit_bias": bias, **fields}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        if choice["finish_reason"] != "length":
            return choice
    return None


async def answers(served: Served, requests: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    tokenizer, limits = served.model.tokenizer, httpx.Limits(max_connections=8)
    closing = {tokenizer.encode(text, special=False)[0]: share for text, share in CLOSING.items()}
    closing |= dict.fromkeys(served.scheduler.builder.stop_token_ids, 1.0)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
        return await asyncio.gather(*(answer(client, closing, seed, **each) for seed, each in enumerate(requests)))


def schemas(count: int) -> list[dict[str, Any]]:
    rng = random.Random(16)
    return [random_schema(rng) for _ in range(count)]


@pytest.mark.parametrize(("count", "least"), [(6, 6), pytest.param(ALL, 95, marks=pytest.mark.slow)])
def test_answers_follow_their_schema(served: Served, count: int, least: int):
    made = schemas(count)
    formats = [{"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}} for schema in made]
    found = asyncio.run(answers(served, [{"response_format": each} for each in formats]))
    for schema, choice in zip(made, found, strict=True):
        if choice is not None:
            assert choice["finish_reason"] == "stop"
            jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert sum(choice is not None for choice in found) >= least


@pytest.mark.parametrize(("count", "least"), [(3, 3), pytest.param(10, 9, marks=pytest.mark.slow)])
def test_required_calls_follow_their_tools(served: Served, count: int, least: int):
    rng, made = random.Random(17), []
    for _ in range(count):
        named = {f"p{place}": random_schema(rng, 2) for place in range(2)}
        made.append({"type": "object", "properties": named, "required": ["p0"], "additionalProperties": False})
    tools = [[_tool("first", schema), _tool("second", schema)] for schema in made]
    options = {"tool_choice": "required", "parallel_tool_calls": False}
    found = asyncio.run(answers(served, [{"tools": each, **options} for each in tools]))
    for schema, choice in zip(made, found, strict=True):
        if choice is not None:
            assert choice["finish_reason"] == "tool_calls"
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] in ("first", "second")
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert sum(choice is not None for choice in found) >= least


def _tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
