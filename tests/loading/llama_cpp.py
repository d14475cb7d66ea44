"""llama.cpp on the same GGUF file, as an oracle for real models: package xllamacpp."""

import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.loading.language_model import LanguageModel
from tests.tested import external_oracle


def llama_cpp(path: Path) -> Any:
    """Load a model in llama.cpp, with an uncompressed KV cache."""
    module = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    params = module.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.swa_full = str(path), 1024, 1, True
    params.cache_type_k = params.cache_type_v = module.ggml_type.GGML_TYPE_F32
    return module.Server(params)


def ask(llama: Any, where: str, what: dict[str, Any]) -> dict[str, Any]:
    """Send a request to the server."""
    request = urllib.request.Request(llama.listening_address + where, json.dumps(what).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


def perplexities(model: LanguageModel, llama: Any, ids: list[int], first: int = 1) -> tuple[float, float]:
    """Return the perplexity of tokens from `first` on here and by llama.cpp, over those that llama.cpp reports."""
    log = torch.log_softmax(model.logits(ids)[:-1].float(), -1)
    ours = -log.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)[first - 1 :]
    theirs = [likelihood(llama, ids[:at], ids[at]) for at in range(first, len(ids))]
    pairs = [(float(own), -found) for own, found in zip(ours, theirs, strict=True) if found is not None]
    assert len(pairs) > 0.98 * len(theirs)
    own, found = (math.exp(sum(each) / len(pairs)) for each in zip(*pairs, strict=True))
    print(f"perplexity: {own:.3f} here, {found:.3f} by llama.cpp, over {len(pairs)} tokens")
    return own, found


@external_oracle("llama.cpp")
def likelihood(llama: Any, ids: list[int], wanted: int) -> float | None:
    """Return the logprob of a token after others; None if it is not among the most likely thousands."""
    request = {"prompt": ids, "n_predict": 1, "n_probs": 20000, "cache_prompt": True}
    listed = llama.handle_completions(request)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return next((each["logprob"] for each in listed if each["id"] == wanted), None)


@external_oracle("llama.cpp")
def greedy(llama: Any, ids: list[int], count: int) -> list[int]:
    """Return the greedy continuation of tokens."""
    request = {"prompt": ids, "n_predict": count, "temperature": 0, "n_probs": 1, "cache_prompt": True}
    listed = llama.handle_completions(request)["choices"][0]["logprobs"]["content"]
    return [each["id"] for each in listed]
