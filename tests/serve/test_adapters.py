"""Adapters in the server: models of their own to clients."""

from dataclasses import replace

import pytest
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.service import Service
from tests.serve.fake_link import NAME, FakeLink

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
def link() -> FakeLink:
    found = FakeLink("Hello there!")
    assert found.facts is not None
    found.facts = replace(found.facts, adapters=("poet", "sql"))
    return found


@pytest.fixture
def client(link: FakeLink) -> TestClient:
    return TestClient(make_app(Service(link, aliases=("small",))))


@pytest.mark.parametrize(
    ("model", "adapter"),
    [
        (None, None),
        (NAME, None),
        ("small:latest", None),
        ("poet", "poet"),
        (f"{NAME}:sql", "sql"),
        ("small:poet", "poet"),
    ],
)
def test_requests_choose_an_adapter_by_name(link: FakeLink, client: TestClient, model: str | None, adapter: str | None):
    answer = client.post("/v1/chat/completions", json={**HELLO, **({} if model is None else {"model": model})})
    assert answer.status_code == 200, answer.text
    assert [request.adapter for request in link.requests] == [adapter]


@pytest.mark.parametrize("model", ["prose", f"{NAME}:prose", "other:poet", ":poet"])
def test_unknown_adapters_are_refused(link: FakeLink, client: TestClient, model: str):
    answer = client.post("/v1/chat/completions", json={**HELLO, "model": model})
    assert answer.status_code == 404
    assert f"The served model: {NAME}, with the adapters poet, sql." in answer.text
    assert not link.requests


def test_adapters_are_listed_with_their_model(client: TestClient):
    found = client.get("/v1/models").json()["data"]
    assert [(each["id"], each["parent"]) for each in found] == [(NAME, None), ("poet", NAME), ("sql", NAME)]
    assert found[0]["adapters"] == ["poet", "sql"]
    for name in ("poet", f"{NAME}:poet"):
        one = client.get(f"/v1/models/{name}").json()
        assert (one["id"], one["parent"]) == ("poet", NAME)
