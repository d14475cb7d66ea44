"""llama.cpp on the same GGUF file, as an oracle for real models: package xllamacpp."""

import ctypes
import json
import math
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

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


class Settings(ctypes.Structure):
    """llama.cpp's settings of a model or a context, passed by value; larger than any version's, and never looked into."""

    _fields_ = (("octets", ctypes.c_char * 1024),)


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = (
        ("count", ctypes.c_int32),
        ("token", ctypes.POINTER(ctypes.c_int32)),
        ("embedding", ctypes.c_void_p),
        ("position", ctypes.POINTER(ctypes.c_int32)),
        ("sequences", ctypes.POINTER(ctypes.c_int32)),
        ("sequence", ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
        ("wanted", ctypes.POINTER(ctypes.c_int8)),
    )


@external_oracle("llama.cpp")
def llama_cpp_logits(path: Path, ids: list[int]) -> Tensor:
    """Return llama.cpp's logits after each of at most 512 tokens, [T, V], by the C functions in xllamacpp's library."""
    module = pytest.importorskip("xllamacpp.xllamacpp", reason="xllamacpp is not installed")
    library = ctypes.CDLL(module.__file__)

    def call(name: str, result: Any, *values: Any) -> Any:
        function = getattr(library, name)
        function.restype = result
        return function(*values)

    address, count = ctypes.c_void_p, ctypes.c_int32
    settings = call("llama_model_default_params", Settings)
    model = address(call("llama_model_load_from_file", address, str(path).encode(), settings))
    context = address(call("llama_init_from_model", address, model, call("llama_context_default_params", Settings)))
    vocab_size = call("llama_vocab_n_tokens", count, address(call("llama_model_get_vocab", address, model)))
    batch = call("llama_batch_init", Batch, count(len(ids)), count(0), count(1))
    batch.count = len(ids)
    for at, token in enumerate(ids):
        batch.token[at], batch.position[at], batch.sequences[at], batch.wanted[at] = token, at, 1, 1
        batch.sequence[at][0] = 0
    assert call("llama_decode", count, context, batch) == 0
    logits = call("llama_get_logits", ctypes.POINTER(ctypes.c_float), context)
    found = torch.from_numpy(np.ctypeslib.as_array(logits, (len(ids), vocab_size)).copy())
    call("llama_batch_free", None, batch)
    call("llama_free", None, context)
    call("llama_model_free", None, model)
    return found


def divergence(wanted: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence of the next-token distributions of two logits, [T]."""
    one, other = (torch.log_softmax(each.float(), -1) for each in (wanted, found))
    return (one.exp() * (one - other)).sum(-1)


def log_likelihoods(logits: Tensor, ids: list[int]) -> Tensor:
    """Return the log likelihood of tokens given the logits after the token before each; those without logits are left out."""
    log = torch.log_softmax(logits[:-1].float(), -1)
    return log.gather(1, torch.tensor(ids[-len(log) :])[:, None])[:, 0]


def perplexity(logits: Tensor, ids: list[int]) -> float:
    """Return the perplexity of tokens given the logits after the token before each."""
    return math.exp(-float(log_likelihoods(logits, ids).mean()))


def differs_by_rounding(own: Tensor, theirs: Tensor, ids: list[int]) -> bool:
    """Return whether two logits differ as by activations in int8: little, and in no direction."""
    differences = log_likelihoods(own, ids) - log_likelihoods(theirs, ids)
    standard_error = float(differences.std()) / len(differences) ** 0.5
    assert standard_error < 0.01
    return float(divergence(own, theirs).mean()) < 0.01 and abs(float(differences.mean())) < 3 * standard_error


@external_oracle("llama.cpp")
def greedy(llama: Any, ids: list[int], count: int) -> list[int]:
    """Return the greedy continuation of tokens."""
    request = {"prompt": ids, "n_predict": count, "temperature": 0, "n_probs": 1, "cache_prompt": True}
    listed = llama.handle_completions(request)["choices"][0]["logprobs"]["content"]
    return [each["id"] for each in listed]
