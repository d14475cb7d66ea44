"""Requests of one conversation share an affinity key; other conversations have other keys."""

import json
from typing import Any

import pytest

from auraflux.serve.replicas.prefix_affinity import SESSION, affinity_key


def key(request: Any, **headers: str) -> str:
    return affinity_key(json.dumps(request).encode(), headers)


def messages(*contents: str) -> list[dict[str, str]]:
    return [{"role": "user" if number % 2 == 0 else "assistant", "content": content} for number, content in enumerate(contents)]


SYSTEM = [{"role": "system", "content": "be brief"}]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": messages("a")}, {"messages": messages("a", "b", "c"), "temperature": 1}),
        ({"messages": SYSTEM + messages("a")}, {"messages": SYSTEM + messages("a", "b", "c")}),
        ({"messages": messages("a"), "system": "be brief"}, {"messages": messages("a", "b", "c"), "system": "be brief"}),
        ({"input": "a"}, {"input": messages("a", "b", "c")}),
        ({"input": "a"}, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, *messages("b", "c")]}),
        ({"prompt": "x" * 300}, {"prompt": "x" * 300 + "y"}),
        ({"prompt": [7] * 64}, {"prompt": [7] * 64 + [8]}),
        ({"prompt": ["x" * 300, "y"]}, {"prompt": "x" * 300}),
        ({"prompt_cache_key": "me", "messages": messages("a")}, {"prompt_cache_key": "me", "messages": messages("b")}),
    ],
)
def test_common_prefix_shares_a_key(first: Any, second: Any):
    assert key(first) == key(second) != ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": messages("a")}, {"messages": messages("b")}),
        ({"messages": SYSTEM + messages("a")}, {"messages": SYSTEM + messages("b")}),
        ({"messages": messages("a"), "system": "be brief"}, {"messages": messages("a")}),
        ({"input": "a"}, {"input": "a", "instructions": "be brief"}),
        ({"prompt": "x"}, {"prompt": "y"}),
        ({"prompt": [1, 2]}, {"prompt": [1, 3]}),
    ],
)
def test_different_prefixes_have_different_keys(first: Any, second: Any):
    assert key(first) != key(second)


def test_session_header_sets_the_key():
    assert key({"messages": messages("a")}, **{SESSION: "7"}) == key({"messages": messages("b")}, **{SESSION: "7"})


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b'{"messages": []}', b'{"prompt": null}', b"[" * 100_000])
def test_invalid_body_has_no_key(body: bytes):
    assert affinity_key(body, {}) == ""


@pytest.mark.parametrize("malformed", [[1], [{"role": 3}], [{}], [None, {"role": "user"}]])
def test_malformed_messages_still_have_a_key(malformed: list[Any]):
    assert key({"messages": malformed})
