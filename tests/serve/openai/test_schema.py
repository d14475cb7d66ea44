"""The OpenAPI document, and random requests generated from it: none may cause a server error."""

from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from auraflux.serve.app import make_app
from auraflux.serve.batch.batches import Batches
from auraflux.serve.limits import Limits
from auraflux.serve.service import Service
from tests.serve.fake_link import FakeLink

KEPT = Batches(Path(mkdtemp(prefix="auraflux-files-")))
APP = make_app(Service(FakeLink("Hello there!"), Limits(body_nbytes=1 << 16)), batches=KEPT)
CHANCE = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def document() -> Any:
    return schemathesis.openapi.from_asgi("/openapi.json", APP)


schema, with_bounds = document(), document()
# boundary values of all fields are thousands of requests
schema.config.phases.coverage.enabled = False


def test_every_route_is_described():
    paths = set(schema.raw_schema["paths"])
    described = {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/models/{model}", "/v1/responses", "/v1/messages"}
    described |= {
        "/v1/messages/count_tokens",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/v1/embeddings",
        *("/v1/rerank", "/rerank", "/v2/rerank"),
        *("/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"),
        *("/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel"),
        "/v1/experts/placement",
        *(
            f"/api/{name}"
            for name in ("chat", "generate", "version", "tags", "ps", "show", "pull", "delete", "embed", "embeddings")
        ),
        "/health",
        "/ready",
        "/metrics",
    }
    assert paths == described


@schema.parametrize()
@settings(CHANCE, max_examples=8)
def test_no_request_is_a_server_error(case: schemathesis.Case):
    hold(case)


@pytest.mark.slow
@with_bounds.parametrize()
@settings(CHANCE, max_examples=30)
def test_no_boundary_request_is_a_server_error(case: schemathesis.Case):
    hold(case)


def hold(case: schemathesis.Case) -> None:
    checks = [not_a_server_error, content_type_conformance, status_code_conformance, response_schema_conformance]
    case.call_and_validate(checks=checks)
