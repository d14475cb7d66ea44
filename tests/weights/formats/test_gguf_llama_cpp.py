"""Logits of every GGUF architecture compared with llama.cpp."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import auraflux
from tests.models.oracles import logits, save, tokens, transformers_logits
from tests.tested import external_oracle
from tests.weights.embedding_models import GGUF_GEMMA, gemma, write_embedding_gguf
from tests.weights.formats.gguf_files import VOCAB, write_gguf
from tests.weights.formats.gguf_models import METADATA, SMALL_GEMMA4_METADATA, gguf_tensors, small_gemma4, tiny

COUNT = 40  # tokens, past the windows
xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")


def server(path: Path, embedding: bool = False) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.swa_full, params.warmup = str(path), 256, 1, True, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads, params.embedding = 1, embedding
    return xllamacpp.Server(params)


@external_oracle("llama.cpp")
def likelihoods(llama: Any, ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities of the next token, [V]."""
    request = {"prompt": ids, "n_predict": 1, "n_probs": VOCAB, "cache_prompt": False, "temperature": 1.0}
    listed = llama.handle_completions(request)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found = torch.full((VOCAB,), torch.nan)
    for each in listed:
        found[each["id"]] = each["logprob"]
    return found


MODELS = {kind: (kind, partial(tiny, kind), metadata) for kind, metadata in METADATA.items()}
MODELS["gemma4-little"] = "gemma4", small_gemma4, SMALL_GEMMA4_METADATA


@pytest.mark.slow
@pytest.mark.parametrize("which", MODELS)
def test_logits_match_llama_cpp(which: str, tmp_path: Path):
    kind, make, metadata = MODELS[which]
    model = make()
    save(model, tmp_path / "hf")
    ids = tokens(model, COUNT)
    if not model.config.tie_word_embeddings:
        with torch.no_grad():
            # flatten the distribution: llama.cpp omits very unlikely tokens
            model.lm_head.weight.div_(transformers_logits(model, ids).std())
    path = write_gguf(tmp_path / "m.gguf", gguf_tensors(model, kind), "F32", kind, metadata, tokenizer=True)
    llama = server(path)
    ours = torch.log_softmax(logits(path, ids).float(), -1)
    for count in (1, 7, COUNT):
        theirs = likelihoods(llama, ids[:count])
        assert not theirs.isnan().any()
        # llama.cpp rounds some activations to float16, such as GELU's input
        worst = float((theirs - ours[count - 1]).abs().max())
        print(f"{which}: {worst:.2e} after {count}")
        assert worst < 0.03


@external_oracle("llama.cpp")
def embedding(llama: Any, ids: list[int]) -> np.ndarray:
    return np.array(llama.handle_embeddings({"input": ids})["data"][0]["embedding"])


@pytest.mark.slow
def test_embeddings_match_llama_cpp(tmp_path: Path):
    path = write_embedding_gguf(tmp_path / "m.gguf", gemma(**GGUF_GEMMA))
    prompts = [[5], [1, 2, 3], [token % VOCAB for token in range(100)], [7] * COUNT]
    llama, ours = server(path, embedding=True), auraflux.load(path, "cpu", exact=True).embed(prompts)
    theirs = [embedding(llama, ids) for ids in prompts]
    # rounding as above
    np.testing.assert_allclose(ours, theirs, atol=2e-3)
