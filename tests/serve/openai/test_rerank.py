"""Rerank: the scores of transformers with Qwen3-Reranker's prompt, in the forms of Jina's and Cohere's clients."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tokenizers
import torch
from starlette.testclient import TestClient

from auraflux.serve.app import make_app
from auraflux.serve.openai.rerank import INSTRUCTION
from auraflux.serve.service import Service
from tests.serve.fake_link import FakeLink
from tests.serve.server import NAME, Served, running
from tests.tokenizer.toy_tokenizers import byte_level

QUERY = "Which animal jumps?"
DOCUMENTS = ["The quick brown fox jumps over the lazy dog.", "x", "def f(x): return 12345", "한국어 " * 40]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """Serve a tiny Qwen3 in a folder whose name says that it is a reranker."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    tokenizer = tokenizers.Tokenizer.from_str(byte_level().to_str())
    tokenizer.add_tokens(["yes", "no"])
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
    vocab = tokenizer.get_vocab_size()
    config = Qwen3Config(num_attention_heads=2, num_key_value_heads=1, vocab_size=vocab, tie_word_embeddings=True, **sizes)
    folder = tmp_path_factory.mktemp("rerank") / "Qwen3-Reranker-tiny"
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    with running(folder, kv="none", chunk=64, context=1024) as server:
        yield server, folder


def expected(folder: Path, documents: list[str], instruction: str = INSTRUCTION) -> np.ndarray:
    """Return the scores as the model card computes them."""
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32)
    no, yes = tokenizer.convert_tokens_to_ids("no"), tokenizer.convert_tokens_to_ids("yes")
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    scores = []
    for document in documents:
        text = f"{prefix}<Instruct>: {instruction}\n<Query>: {QUERY}\n<Document>: {document}{suffix}"
        with torch.inference_mode():
            last = model(**tokenizer(text, return_tensors="pt", return_token_type_ids=False)).logits[0, -1]
        scores.append(torch.softmax(torch.stack([last[no], last[yes]]), 0)[1].item())
    return np.array(scores)


def rerank(served: Served, path: str = "/v1/rerank", **body: Any) -> Any:
    answer = httpx.post(f"{served.url}{path}", json={"model": NAME, "query": QUERY, "documents": DOCUMENTS, **body}, timeout=60)
    return answer.json()


def test_scores_are_those_of_transformers(served: tuple[Served, Path]):
    server, folder = served
    wanted = expected(folder, DOCUMENTS)
    found = rerank(server)
    assert [each["index"] for each in found["results"]] == list(np.argsort(-wanted))
    np.testing.assert_allclose([each["relevance_score"] for each in found["results"]], sorted(wanted, reverse=True), atol=2e-5)
    assert [each["document"]["text"] for each in found["results"]] == [DOCUMENTS[i] for i in np.argsort(-wanted)]
    assert found["usage"]["total_tokens"] > 4 * 50
    # more documents than sequences
    many = rerank(server, documents=DOCUMENTS * 10)["results"]
    scores = {each["index"]: each["relevance_score"] for each in many}
    np.testing.assert_allclose([scores[i] for i in range(40)], np.tile(wanted, 10), atol=2e-5)


def test_forms_of_a_request(served: tuple[Served, Path]):
    server, folder = served
    wanted = expected(folder, DOCUMENTS)
    for path in ("/rerank", "/v2/rerank"):
        top = rerank(server, path, top_n=2)["results"]
        assert [each["index"] for each in top] == list(np.argsort(-wanted)[:2])
        assert ("document" in top[0]) == (path == "/rerank")
    objects = rerank(server, "/v2/rerank", documents=[{"text": text} for text in DOCUMENTS], return_documents=True)["results"]
    assert objects == rerank(server)["results"]
    asked = rerank(server, documents=DOCUMENTS[:1], instruction="Find code.")["results"][0]
    assert asked["relevance_score"] == pytest.approx(expected(folder, DOCUMENTS[:1], "Find code.")[0], abs=2e-5)
    cut = rerank(server, documents=[DOCUMENTS[3]], max_tokens_per_doc=6)["results"][0]
    short = server.model.tokenizer.decode(server.model.tokenizer.encode(DOCUMENTS[3], special=False)[:6])
    assert cut["relevance_score"] == pytest.approx(expected(folder, [short])[0], abs=2e-5)


def test_cohere_client(served: tuple[Served, Path]):
    cohere = pytest.importorskip("cohere", reason="cohere is not installed")
    server, folder = served
    order = list(np.argsort(-expected(folder, DOCUMENTS)))
    for kind in (cohere.Client, cohere.ClientV2):
        with httpx.Client() as connections:
            client = kind("none", base_url=server.url, httpx_client=connections)
            answer = client.rerank(model=NAME, query=QUERY, documents=DOCUMENTS, top_n=3)
            assert [each.index for each in answer.results] == order[:3]


def test_requests_to_generate_and_to_rerank_share_the_scheduler(served: tuple[Served, Path]):
    server, _ = served
    body = {"prompt": DOCUMENTS[0], "max_tokens": 8, "temperature": 0}
    first = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"]
    rerank(server)
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"] == first
    assert server.scheduler.idle


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"documents": []}, "empty list"),
        ({"documents": ["x"] * 2049}, "at most 2048 for documents"),
        ({"documents": "x"}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents"),
        ({"top_n": 0}, "top_n"),
        ({"documents": ["word " * 2000]}, "context"),
        ({"query": None}, "query"),
    ],
)
def test_invalid_requests_are_refused(served: tuple[Served, Path], body: dict, message: str):
    assert message in rerank(served[0], **body)["error"]["message"]


def test_other_models_refuse():
    answer = TestClient(make_app(Service(FakeLink()))).post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert answer.status_code == 400
    assert "toy/model is not a reranker" in answer.json()["error"]["message"]
