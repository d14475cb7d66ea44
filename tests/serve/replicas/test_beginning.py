"""Requests of one conversation have one name, and those of another have another."""

import json
from typing import Any

import pytest

from auraflux.serve.replicas.beginning import SESSION, beginning


def name(asked: Any, **headers: str) -> str:
    return beginning(json.dumps(asked).encode(), headers)


def said(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user" if number % 2 == 0 else "assistant", "content": text} for number, text in enumerate(texts)]


SYSTEM = [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": said("a")}, {"messages": said("a", "b", "c"), "temperature": 1}),
        ({"messages": SYSTEM + said("a")}, {"messages": SYSTEM + said("a", "b", "c")}),
        ({"messages": said("a"), "system": "be brief"}, {"messages": said("a", "b", "c"), "system": "be brief"}),
        ({"input": "a"}, {"input": said("a", "b", "c")}),
        ({"input": "a"}, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, *said("b", "c")]}),
        ({"prompt": "x" * 300}, {"prompt": "x" * 300 + "y"}),
        ({"prompt": [7] * 64}, {"prompt": [7] * 64 + [8]}),
        ({"prompt": ["x" * 300, "y"]}, {"prompt": "x" * 300}),
        ({"prompt_cache_key": "me", "messages": said("a")}, {"prompt_cache_key": "me", "messages": said("b")}),
    ],
)
def test_what_begins_alike_belongs_together(first: Any, second: Any):
    assert name(first) == name(second) != ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": said("a")}, {"messages": said("b")}),
        ({"messages": SYSTEM + said("a")}, {"messages": SYSTEM + said("b")}),
        ({"messages": said("a"), "system": "be brief"}, {"messages": said("a")}),
        ({"input": "a"}, {"input": "a", "instructions": "be brief"}),
        ({"prompt": "x"}, {"prompt": "y"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
    ],
)
def test_what_begins_otherwise_does_not(first: Any, second: Any):
    assert name(first) != name(second)


def test_a_client_may_name_it():
    assert name({"messages": said("a")}, **{SESSION: "7"}) == name({"messages": said("b")}, **{SESSION: "7"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": []}', b'{"prompt": null}', b"[" * 100_000])
def test_what_cannot_be_read_has_no_name(body: bytes):
    assert beginning(body, {}) == ""


@pytest.mark.parametrize("turns", [[1], [{"role": 3}], [{}], [None, {"role": "user"}]])
def test_strange_messages_are_left_to_the_replica(turns: list[Any]):
    assert name({"messages": turns})
