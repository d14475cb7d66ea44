"""Whatever the schema: an answer that was finished follows it, also from a model of random weights that is told to be wild."""

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest

from auraflux.serve.front import FrontSettings
from tests.serve.schemas import schema_by_chance
from tests.serve.server import Served, running

ALL = 100
# an answer that did not end in time is asked for again, with what ends things made likelier
NUDGES = (0, 8, 14, 20)
# a quote more than what may stand in a string, and some that patterns want
CLOSING = {'"': 1.5, "}": 1.0, "]": 1.0, "-": 0.8, "7": 0.8}
ASKED = [{"role": "user", "content": "Give me some JSON."}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(sequences=8, settings=FrontSettings(waiting=ALL, grace_s=0.5)) as served:
        yield served


async def answer(client: httpx.AsyncClient, closing: dict[int, float], seed: int, **asked: Any) -> dict[str, Any] | None:
    """Give the answer that came to its end; None where none of several did."""
    for nudge in NUDGES:
        bias = {str(token): nudge * share for token, share in closing.items()}
        body = {"messages": ASKED, "temperature": 2, "seed": seed, "max_tokens": 400, "logit_bias": bias, **asked}
        response = await client.post("/v1/chat/completions", json=body)
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        if choice["finish_reason"] != "length":
            return choice
    return None


async def answers(served: Served, asked: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
    tokenizer, limits = served.model.tokenizer, httpx.Limits(max_connections=8)
    closing = {tokenizer.encode(text, special=False)[0]: share for text, share in CLOSING.items()}
    closing |= dict.fromkeys(served.scheduler.intake.ends, 1.0)
    async with httpx.AsyncClient(base_url=served.url, timeout=300, limits=limits) as client:
        return await asyncio.gather(*(answer(client, closing, seed, **each) for seed, each in enumerate(asked)))


def schemas(count: int) -> list[dict[str, Any]]:
    rng = random.Random(16)
    return [schema_by_chance(rng) for _ in range(count)]


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
        named = {f"p{place}": schema_by_chance(rng, 2) for place in range(2)}
        made.append({"type": "object", "properties": named, "required": ["p0"], "additionalProperties": False})
    tools = [[_tool("first", schema), _tool("second", schema)] for schema in made]
    choice = {"tool_choice": "required", "parallel_tool_calls": False}
    found = asyncio.run(answers(served, [{"tools": each, **choice} for each in tools]))
    for schema, came in zip(made, found, strict=True):
        if came is not None:
            assert came["finish_reason"] == "tool_calls"
            (call,) = came["message"]["tool_calls"]
            assert call["function"]["name"] in ("first", "second")
            jsonschema.validate(json.loads(call["function"]["arguments"]), schema)
    assert sum(came is not None for came in found) >= least


def _tool(name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does it.", "parameters": schema}}
