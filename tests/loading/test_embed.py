"""Embeddings in Python: `LanguageModel.embed` on folders of sentence-transformers and on GGUF files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import auraflux
from auraflux.errors import ContextError, FormatError, InputError, SettingsError
from auraflux.loading.warmup import warm_up
from auraflux.weights.formats.embedding import read_embedding
from tests.weights.embedding_models import (
    GGUF_GEMMA,
    WIDTHS,
    dense_weights,
    embedding_gemma,
    embeddings,
    gemma,
    save_modules,
    write_embedding_gguf,
)
from tests.weights.formats.gguf_files import VOCAB

PROMPTS = [[5], [1, 2, 3], list(range(100)), [7] * 200]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_gemma(tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return auraflux.load(folder, "cpu", exact=True, chunk=64, max_sequences=3)


def test_embeddings_are_those_of_transformers(model: Any, folder: Path):
    warm_up(model, lambda what, done, total: None)
    assert model.engine.cache.reserved_nbytes == 0
    np.testing.assert_allclose(model.embed(PROMPTS), embeddings(folder, PROMPTS), atol=1e-5)
    np.testing.assert_allclose(model.embed(["ab"], "query"), model.embed(["task: search result | query: ab"]), atol=1e-6)
    assert model.embed(PROMPTS, dimensions=8).shape == (len(PROMPTS), 8)
    assert model.stats.prompt_tokens == sum(map(len, PROMPTS))


def test_what_such_a_model_cannot_do_is_refused(model: Any, folder: Path):
    messages = [{"role": "user", "content": "Hello"}]
    for work in (
        lambda: next(model.generate("x")),
        lambda: next(model.tokens([1])),
        lambda: model.generate_batch([[1], [2]]),
        lambda: next(model.chat(messages)),
        lambda: model.logits([1, 2]),
    ):
        with pytest.raises(InputError, match="generates no text"):
            work()
    with pytest.raises(ContextError, match="401 tokens, and the context is limited to 400"):
        model.embed([[1] * 401])
    with pytest.raises(InputError, match=r"no prompt 'other'\. Its prompts: query, document"):
        model.embed(["x"], "other")
    with pytest.raises(InputError, match="no input"):
        model.embed([])
    for dimensions in (0, WIDTHS[-1] + 1):
        with pytest.raises(InputError, match=f"dimensions is {dimensions}, but the model's embeddings have {WIDTHS[-1]}"):
            model.embed(["x"], dimensions=dimensions)
    with pytest.raises(SettingsError, match="bidirectional attention, which runs in one process"):
        auraflux.load(folder, "cpu", parallel="tensor=2")


@pytest.mark.parametrize(
    ("dense", "reason"),
    [
        ({"activation_function": "os.system"}, "the activation function system; supported are Identity, Tanh"),
        ({"use_residual": True}, "residual connection"),
        ({"module_input_name": "token_embeddings"}, "not for pooled vectors"),
    ],
)
def test_unsupported_dense_modules_are_named(dense: dict[str, Any], reason: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3_text"}))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    save_modules(tmp_path, dense_weights(), **dense)
    found = read_embedding(tmp_path)
    assert found is not None
    assert reason in (found.refusal or "")
    modules = json.loads((tmp_path / "modules.json").read_text())
    (tmp_path / "modules.json").write_text(json.dumps([*modules[:2], modules[-1], *modules[2:-1]]))
    found = read_embedding(tmp_path)
    assert found is not None
    assert "in the order Transformer, Pooling, Dense, Normalize" in (found.refusal or "")


def test_damaged_dense_modules_are_refused(tmp_path: Path):
    folder = embedding_gemma(tmp_path)
    for name, tensors, message in (
        ("2_Dense", {"linear.weight": torch.zeros(3, 5)}, "2_Dense/model.safetensors has tensors"),
        ("2_Dense", {"linear.weight": torch.zeros(WIDTHS[1::-1]), "linear.bias": torch.zeros(WIDTHS[1])}, "has tensors"),
        ("3_Dense", None, "3_Dense/model.safetensors cannot be read"),
    ):
        save_modules(folder, dense_weights())
        weights = folder / name / "model.safetensors"
        weights.unlink() if tensors is None else save_file(tensors, weights)
        with pytest.raises(FormatError, match=message):
            auraflux.load(folder, "cpu", exact=True)
    save_modules(folder, dense_weights()[:1] * 2)
    with pytest.raises(FormatError, match="do not follow each other: 48 wide"):
        auraflux.load(folder, "cpu", exact=True)


@pytest.mark.parametrize("architecture", ["gemma-embedding", "gemma3"])
def test_gguf_files_of_llama_cpp_and_of_ollama(architecture: str, tmp_path: Path):
    source = gemma(**GGUF_GEMMA)
    source.save_pretrained(tmp_path)
    path = write_embedding_gguf(tmp_path / "model.gguf", source, architecture)
    prompts = [[token % VOCAB for token in prompt] for prompt in PROMPTS]
    found = auraflux.load(path, "cpu", exact=True).embed(prompts)
    np.testing.assert_allclose(found, embeddings(tmp_path, prompts), atol=1e-5)
