"""Embeddings: those of transformers with sentence-transformers' pooling, through OpenAI's and Ollama's clients."""

import base64
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch

from auraflux.errors import FormatError
from auraflux.weights.formats.embedding import Embedding, read_embedding
from tests.serve.server import NAME, Served, running
from tests.tokenizer.toy_tokenizers import byte_level

TEXTS = ["The capital of France is Paris.", "x", "A longer text, which several chunks of the prompt share. " * 3]
PROMPTS = {"query": "Instruct: find\nQuery: ", "document": ""}


def folder_of(tmp_path: Path, pooling: str, normalize: bool = True, **about: Any) -> Path:
    """Save a tiny Qwen3 without a head, with sentence-transformers' files."""
    from transformers import Qwen3Config, Qwen3Model

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 512, "head_dim": 32}
    config = Qwen3Config(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True, **sizes)
    folder = tmp_path / "model"
    Qwen3Model(config).float().save_pretrained(folder)
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ["models.Transformer", "models.Pooling", *(["models.Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [{"idx": i, "path": paths[i], "type": f"sentence_transformers.{kind}"} for i, kind in enumerate(kinds)]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({pooling: True, "word_embedding_dimension": 64}))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, **about}))
    return folder


def expected(folder: Path, tokens: list[list[int]], pooling: str, normalize: bool = True) -> np.ndarray:
    from transformers import Qwen3Model

    model = Qwen3Model.from_pretrained(folder, dtype=torch.float32)
    found = []
    for ids in tokens:
        with torch.inference_mode():
            hidden = model(torch.tensor([ids])).last_hidden_state[0]
        found.append({"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0]}[pooling])
    stacked = torch.stack(found)
    return (torch.nn.functional.normalize(stacked, dim=1) if normalize else stacked).numpy()


def tokens_of(server: Served, texts: list[str]) -> list[list[int]]:
    return [server.model.tokenizer.encode(text) for text in texts]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = folder_of(tmp_path_factory.mktemp("last"), "pooling_mode_lasttoken")
    with running(folder, kv="none", chunk=32) as server:
        yield server, folder


def test_openai_client(served: tuple[Served, Path]):
    server, folder = served
    wanted = expected(folder, tokens_of(server, TEXTS), "last")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        # the client asks for base64 by itself
        found = client.embeddings.create(model=NAME, input=TEXTS)
        assert [each.index for each in found.data] == [0, 1, 2]
        np.testing.assert_allclose([each.embedding for each in found.data], wanted, atol=1e-5)
        assert found.usage.prompt_tokens == sum(map(len, tokens_of(server, TEXTS)))
        one = client.embeddings.create(model=NAME, input=TEXTS[0], encoding_format="float", dimensions=16).data[0].embedding
        cut = wanted[0, :16] / np.linalg.norm(wanted[0, :16])
        np.testing.assert_allclose(one, cut, atol=1e-5)
        # more texts than sequences, and than the queue would hold
        many = client.embeddings.create(model=NAME, input=TEXTS * 30)
        np.testing.assert_allclose([each.embedding for each in many.data], np.tile(wanted, (30, 1)), atol=1e-5)


def test_forms_of_a_request(served: tuple[Served, Path]):
    server, folder = served
    tokens = tokens_of(server, TEXTS)

    def embed(**body: Any) -> Any:
        return httpx.post(f"{server.url}/v1/embeddings", json={"model": NAME, **body}, timeout=60).json()

    by_tokens = [each["embedding"] for each in embed(input=tokens)["data"]]
    by_text = [each["embedding"] for each in embed(input=TEXTS)["data"]]
    np.testing.assert_allclose(by_tokens, by_text, atol=1e-6)
    encoded = embed(input=tokens[0], encoding_format="base64")["data"][0]["embedding"]
    np.testing.assert_allclose(np.frombuffer(base64.b64decode(encoded), "<f4"), by_text[0], atol=1e-6)
    asked = embed(input=TEXTS[0], prompt_name="query")["data"][0]["embedding"]
    wanted = expected(folder, tokens_of(server, [PROMPTS["query"] + TEXTS[0]]), "last")
    np.testing.assert_allclose(asked, wanted[0], atol=1e-5)
    for body, message in (
        ({"input": []}, "empty list"),
        ({"input": [""]}, "empty"),
        ({"input": "x", "dimensions": 65}, "have 64"),
        ({"input": "x", "prompt_name": "other"}, "Its prompts: query, document"),
        ({"input": ["x"] * 2049}, "at most 2048 for input"),
        ({"input": "word " * 600}, "context"),
    ):
        assert message in embed(**body)["error"]["message"], body


def test_requests_to_generate_and_to_embed_share_the_scheduler(served: tuple[Served, Path]):
    server, folder = served
    wanted = expected(folder, tokens_of(server, TEXTS), "last")
    body = {"prompt": TEXTS[2], "max_tokens": 8, "temperature": 0}
    first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    data = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()["data"]
    np.testing.assert_allclose([each["embedding"] for each in data], wanted, atol=1e-5)
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"] == first
    assert server.scheduler.idle


def test_ollama_api(served: tuple[Served, Path]):
    server, folder = served
    wanted = expected(folder, tokens_of(server, TEXTS), "last")
    answer = httpx.post(f"{server.url}/api/embed", json={"model": NAME, "input": TEXTS}, timeout=60).json()
    np.testing.assert_allclose(answer["embeddings"], wanted, atol=1e-5)
    assert answer["prompt_eval_count"] == sum(map(len, tokens_of(server, TEXTS)))
    one = httpx.post(f"{server.url}/api/embeddings", json={"model": NAME, "prompt": TEXTS[0]}, timeout=60).json()
    np.testing.assert_allclose(one["embedding"], wanted[0], atol=1e-5)
    long = {"model": NAME, "input": "word " * 600}
    assert len(httpx.post(f"{server.url}/api/embed", json=long, timeout=60).json()["embeddings"]) == 1
    refused = httpx.post(f"{server.url}/api/embed", json={**long, "truncate": False}, timeout=60).json()
    assert "context" in refused["error"]
    assert httpx.post(f"{server.url}/api/show", json={"model": NAME}).json()["capabilities"] == ["embedding"]


def test_ollama_client(served: tuple[Served, Path]):
    ollama = pytest.importorskip("ollama", reason="ollama's Python client is not installed")
    server, folder = served
    client = ollama.Client(server.url)
    found = client.embed(NAME, TEXTS, dimensions=8).embeddings
    client._client.close()
    wanted = expected(folder, tokens_of(server, TEXTS), "last")[:, :8]
    np.testing.assert_allclose(found, wanted / np.linalg.norm(wanted, axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize(("pooling", "normalize"), [("mean", False), ("pooling_mode_cls_token", True)])
def test_poolings(tmp_path: Path, pooling: str, normalize: bool):
    folder = folder_of(tmp_path, pooling, normalize) if pooling != "mean" else folder_of(tmp_path, "", normalize)
    if pooling == "mean":
        # as newer versions store it
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean"}))
    with running(folder, kv="none", chunk=32) as server:
        data = httpx.post(f"{server.url}/v1/embeddings", json={"input": TEXTS}, timeout=60).json()["data"]
        wanted = expected(folder, tokens_of(server, TEXTS), "mean" if pooling == "mean" else "cls", normalize)
    np.testing.assert_allclose([each["embedding"] for each in data], wanted, atol=2e-5)


def test_models_that_do_not_embed_say_so(tmp_path: Path):
    with running() as server:
        for path, body in (("/v1/embeddings", {"input": "x"}), ("/api/embed", {"model": NAME, "input": "x"})):
            answer = httpx.post(f"{server.url}{path}", json=body)
            assert answer.status_code == 400
            assert "not an embedding model" in answer.text


def test_what_is_not_supported_is_named(tmp_path: Path):
    folder = folder_of(tmp_path, "pooling_mode_lasttoken", default_prompt_name="query")
    assert read_embedding(folder) == Embedding("last", True, PROMPTS, "query")
    pooling, config = folder / "1_Pooling" / "config.json", folder / "config.json"
    for settings, reason in (
        ({"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "supported"),
        ({"pooling_mode_lasttoken": True, "include_prompt": False}, "include_prompt"),
    ):
        pooling.write_text(json.dumps(settings))
        found = read_embedding(folder)
        assert found is not None
        assert reason in (found.refusal or "")
    pooling.write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    config.write_text(json.dumps(json.loads(config.read_text()) | {"is_causal": False}))
    found = read_embedding(folder)
    assert found is not None
    assert "bidirectional" in (found.refusal or "")
    (folder / "modules.json").write_text("{")
    with pytest.raises(FormatError, match="cannot be read"):
        read_embedding(folder)
