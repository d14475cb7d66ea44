"""GGUF files of every architecture, held to llama.cpp itself: what one of its own files says must be what it says here."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.oracles import save, scores, tokens, truth
from tests.tested import outside
from tests.weights.gguf_files import VOCAB, write_gguf
from tests.weights.gguf_models import LITTLE_WORDS, WORDS, little, tiny, written

COUNT = 40  # tokens, past the windows
xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")


def server(path: Path) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.swa_full, params.warmup = str(path), 256, 1, True, False
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.cpuparams.n_threads = 1
    return xllamacpp.Server(params)


@outside("llama.cpp")
def likelihoods(llama: Any, ids: list[int]) -> torch.Tensor:
    """The logarithms of all tokens' probabilities after others, [V]."""
    asked = {"prompt": ids, "n_predict": 1, "n_probs": VOCAB, "cache_prompt": False, "temperature": 1.0}
    listed = llama.handle_completions(asked)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    found = torch.full((VOCAB,), torch.nan)
    for each in listed:
        found[each["id"]] = each["logprob"]
    return found


MODELS = {kind: (kind, partial(tiny, kind), words) for kind, words in WORDS.items()}
MODELS["gemma4-little"] = "gemma4", little, LITTLE_WORDS


@pytest.mark.slow
@pytest.mark.parametrize("which", MODELS)
def test_llama_cpp_says_the_same_of_the_file(which: str, tmp_path: Path):
    kind, make, words = MODELS[which]
    model = make()
    save(model, tmp_path / "hf")
    ids = tokens(model, COUNT)
    if not model.config.tie_word_embeddings:
        with torch.no_grad():
            # so that no token is too unlikely to be told
            model.lm_head.weight.div_(truth(model, ids).std())
    path = write_gguf(tmp_path / "m.gguf", written(model, kind), "F32", kind, words, tokenizer=True)
    llama = server(path)
    ours = torch.log_softmax(scores(path, ids).float(), -1)
    for count in (1, 7, COUNT):
        theirs = likelihoods(llama, ids[:count])
        assert not theirs.isnan().any()
        # it rounds to half precision in places, such as what GELU takes
        worst = float((theirs - ours[count - 1]).abs().max())
        print(f"{which}: {worst:.2e} after {count}")
        assert worst < 0.03
