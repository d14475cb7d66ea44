"""A model with bidirectional attention behind every API: embeddings like those of transformers, and no generation."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.serve.server import NAME, Served, running
from tests.weights.embedding_models import PROMPTS, WIDTHS, embedding_gemma, embeddings

# shorter and longer than windows and prefill chunks
TEXTS = ["The capital of France is Paris.", "x", "A longer text than the sliding window and a prefill chunk. " * 4]
CONTEXT = 300


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    folder = embedding_gemma(tmp_path_factory.mktemp("gemma"))
    with running(folder, chunk=64, context=CONTEXT) as server:
        yield server, folder


def expected(served: tuple[Served, Path], texts: list[str]) -> np.ndarray:
    server, folder = served
    return embeddings(folder, [server.model.tokenizer.encode(text) for text in texts])


def post(served: tuple[Served, Path], path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{served[0].url}{path}", json={"model": NAME, **body}, timeout=60)


def embed(served: tuple[Served, Path], **body: Any) -> list[Any]:
    return [each["embedding"] for each in post(served, "/v1/embeddings", **body).json()["data"]]


def test_openai_client(served: tuple[Served, Path]):
    wanted = expected(served, TEXTS)
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0) as client:
        found = client.embeddings.create(model=NAME, input=TEXTS)
        np.testing.assert_allclose([each.embedding for each in found.data], wanted, atol=1e-5)
        # more inputs than sequences, in one request
        many = client.embeddings.create(model=NAME, input=TEXTS * 20)
        np.testing.assert_allclose([each.embedding for each in many.data], np.tile(wanted, (20, 1)), atol=1e-5)
    assert served[0].model.scheduler.idle
    assert not len(served[0].model.scheduler.prefix_cache)


def test_dimensions_prompts_and_encodings(served: tuple[Served, Path]):
    cut = expected(served, TEXTS)[:, :16]
    found = embed(served, input=TEXTS, dimensions=16)
    np.testing.assert_allclose(found, cut / np.linalg.norm(cut, axis=1, keepdims=True), atol=1e-5)
    encoded = embed(served, input=TEXTS, dimensions=16, encoding_format="base64")
    np.testing.assert_allclose([np.frombuffer(base64.b64decode(each), "<f4") for each in encoded], found, atol=1e-6)
    asked = embed(served, input=TEXTS[:2], prompt_name="query")
    np.testing.assert_allclose(asked, expected(served, [PROMPTS["query"] + text for text in TEXTS[:2]]), atol=1e-5)
    refused = post(served, "/v1/embeddings", input="x", dimensions=WIDTHS[-1] + 1)
    assert f"have {WIDTHS[-1]}" in refused.json()["error"]["message"]


def test_ollama_api_cuts_long_inputs(served: tuple[Served, Path]):
    answer = post(served, "/api/embed", input=TEXTS).json()
    np.testing.assert_allclose(answer["embeddings"], expected(served, TEXTS), atol=1e-5)
    # the whole context may be a prompt: nothing follows it
    tokens = served[0].model.tokenizer.encode("word " * CONTEXT)[:CONTEXT]
    cut = post(served, "/api/embed", input="word " * CONTEXT).json()["embeddings"]
    np.testing.assert_allclose(cut, embeddings(served[1], [tokens]), atol=1e-5)
    for path, body in (("/v1/embeddings", {}), ("/api/embed", {"truncate": False})):
        refused = post(served, path, input="word " * CONTEXT, **body)
        assert refused.status_code == 400
        assert f"context is limited to {CONTEXT}" in refused.text


def test_generation_is_refused(served: tuple[Served, Path]):
    messages = [{"role": "user", "content": "Hello"}]
    for path, body in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/completions", {"prompt": "x", "echo": True, "max_tokens": 0, "logprobs": 1}),
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 8}),
        ("/api/chat", {"messages": messages}),
        ("/api/generate", {"prompt": "x"}),
    ):
        answer = post(served, path, **body)
        assert answer.status_code == 400, path
        assert "generates no text" in answer.text, path
    assert post(served, "/api/show").json()["capabilities"] == ["embedding"]
