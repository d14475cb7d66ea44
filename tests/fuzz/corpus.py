"""The models that inputs are made from: tiny, written by code, once in a process, and gone with it."""

import atexit
import json
import os
import shutil
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

from auraflux.cache import Cache, CacheSettings
from auraflux.models import FAMILIES, family, family_name
from auraflux.quant import QTensor
from auraflux.weights.checkpoint import open_checkpoint
from auraflux.weights.convert import convert
from auraflux.weights.loader import Weights
from auraflux.weights.stored import Checkpoint, Stored
from tests.models import (
    test_deepseek_v3,
    test_deepseek_v4,
    test_deepseek_v32,
    test_ernie4_5_moe,
    test_gemma3_text,
    test_gemma4_text,
    test_glm4_moe,
    test_gpt_oss,
    test_kimi_linear,
    test_llama,
    test_nemotron_h,
    test_qwen3_5_moe,
    test_qwen3_moe,
    test_qwen4_exp,
)
from tests.models.oracles import save
from tests.run.tiny import WIDTHS, tiny
from tests.weights.gguf_files import HIDDEN, INNER, llama_tensors, write_gguf
from tests.weights.gguf_models import WORDS, written
from tests.weights.gguf_models import tiny as gguf_model
from tests.weights.packed_folders import hf_folder, packed
from tests.weights.quantized_folders import FOLDERS, rewrite

# in memory where there is room for files: most of an input's time is the writing of its file
MEMORY = Path("/dev/shm")
SCRATCH = Path(mkdtemp(prefix="auraflux-fuzz-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# of Hugging Face's defaults, what would be slow to open
SMALL = {"num_hidden_layers": 4, "vocab_size": 300}
# what these leave open
INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
}
FURTHER = {kind: {**INDEXED, "ple_layer_ids": [1, 2], "eos_token_id": 2} for kind in ("qwen4_exp", "qwen4_exp_text")}
# types that transformers has under another name
ALIASES = {"kimi_k2": "deepseek_v3"}
# one or two of every file in auraflux/models
MODELS: dict[str, Callable[[], Any]] = {
    "llama": test_llama.llama,
    "ministral3": test_llama.ministral3,
    "qwen3_moe": test_qwen3_moe.qwen3_moe,
    "qwen2_moe": test_qwen3_moe.qwen2_moe,
    "qwen3_next": test_qwen3_5_moe.qwen3_next,
    "qwen3_5_moe_text": test_qwen3_5_moe.qwen3_5_moe,
    "qwen4_exp_text": test_qwen4_exp.qwen4,
    "deepseek_v3": test_deepseek_v3.deepseek,
    "mistral4": test_deepseek_v3.mistral4,
    "deepseek_v32": test_deepseek_v32.deepseek,
    "glm_moe_dsa": test_deepseek_v32.glm_shared,
    "deepseek_v4": test_deepseek_v4.deepseek,
    "kimi_linear": test_kimi_linear.kimi_linear,
    "nemotron_h": test_nemotron_h.nemotron_h,
    "glm4_moe": test_glm4_moe.glm,
    "minimax_m2": test_glm4_moe.minimax,
    "ernie4_5_moe": test_ernie4_5_moe.ernie,
    "gpt_oss": test_gpt_oss.gpt_oss,
    "gemma3_text": test_gemma3_text.gemma,
    "gemma4": test_gemma4_text.mixture,
    "gemma4_text": test_gemma4_text.little,
}
METHODS = {
    "awq": ("awq", "awq-rows", "awq-old-words"),
    "gptq": ("gptq-4", "gptq-8-zeros-rows", "gptq-3", "gptq-act-order", "gptq-v2"),
    "compressed-tensors": ("ct-4-zeros", "ct-8", "ct-5", "ct-act-order", "ct-int8", "ct-int8-zeros"),
    "fp8": ("fp8", "fp8-powers", "fp8-tensor", "fp8-rows"),
    "compressed-fp8": ("ct-fp8-rows", "ct-fp8-tensor", "ct-fp8-blocks", "ct-fp8-groups"),
    "compressed-mxfp4": ("ct-mxfp4",),
    "nvfp4": ("nvfp4", "ct-nvfp4"),
    "modelopt-fp8": ("modelopt-fp8", "modelopt-fp8-rows", "modelopt-fp8-blocks"),
}


def open_all(path: Path) -> Checkpoint:
    """Open a model as far as it can be before weights are read: config, caches, names and sizes of tensors."""
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config)
    settings = CacheSettings("auto").for_family(family_name(checkpoint.config))
    Cache(module.make_caches(module.Config.from_hf(checkpoint.config)), settings, context=64, device="meta")
    checkpoint.sizes()
    return checkpoint


class FirstRow(Weights):
    """Weights of which the first row is computed, of the first that is held as codes."""

    is_read = False

    def ready(self, found: Stored, in_order: bool = False) -> Stored:
        made = super().ready(found, in_order)
        if isinstance(made, QTensor) and not self.is_read and len(made.shape) == 2:
            self.is_read = True
            assert made.take(torch.zeros(1, dtype=torch.int64)).dequantize().shape == (1, made.shape[1])
        return made


def load_all(path: Path) -> None:
    """Also read its weights, and what `inspect` says of them."""
    checkpoint = open_all(path)
    module = family(checkpoint.config)
    weights = FirstRow(checkpoint, module.rename)
    module.Model(module.Config.from_hf(checkpoint.config), weights)
    weights.done()
    assert all(isinstance(note, str) for note in checkpoint.notes)


@cache
def copy_of(name: str) -> Path:
    """A folder for one target, with the files of the tiny model as links within it would be: as they are."""
    folder = SCRATCH / name
    folder.mkdir()
    for path in tiny().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


@cache
def original(name: str) -> bytes:
    return (tiny() / name).read_bytes()


@cache
def configs() -> list[dict[str, Any]]:
    """A config of every type, with Hugging Face's defaults."""
    found = [json.loads(original(CONFIG))]
    for kind in sorted(FAMILIES):
        made = AutoConfig.for_model(ALIASES.get(kind, kind)).to_dict()
        inner = made.get("text_config")
        layers = None if kind != "gpt_oss" else ["sliding_attention", "full_attention"] * 2
        (inner if isinstance(inner, dict) else made).update(SMALL, layer_types=layers, **FURTHER.get(kind, {}))
        found.append(json.loads(json.dumps({**made, "model_type": kind}, default=str)))
    return found


class Folder:
    """A model's folder whose config and weights are others for every input."""

    def __init__(self, path: Path):
        self.path = path
        self._config, self._content = (path / CONFIG).read_bytes(), (path / WEIGHTS).read_bytes()
        self._is_changed = False

    @property
    def config(self) -> dict[str, Any]:
        return json.loads(self._config)

    @property
    def parts(self) -> tuple[bytes, dict[str, Any]]:
        return split(self._content)

    def write(self, config: bytes | None = None, weights: bytes | None = None) -> Path:
        """Put these there, or what was there at first."""
        (self.path / CONFIG).write_bytes(self._config if config is None else config)
        if weights is not None or self._is_changed:
            (self.path / WEIGHTS).write_bytes(self._content if weights is None else weights)
        self._is_changed = weights is not None
        return self.path


@cache
def model_of(kind: str) -> Folder:
    """A tiny model of a family."""
    return Folder(save(MODELS[kind](), SCRATCH / f"family-{kind}"))


@cache
def small() -> Path:
    """A model of one layer and few tokens: what inputs in the formats of others are made from."""
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=512, eos_token_id=0, **WIDTHS)
    return save(LlamaForCausalLM(config), SCRATCH / "small")


@cache
def quantized(kind: str) -> Folder:
    """A small model whose MLP is in a format of others."""
    rewrite(small(), SCRATCH / kind, *FOLDERS[kind], skip=("embed_tokens", "lm_head", "norm", "self_attn"))
    return Folder(SCRATCH / kind)


@cache
def converted() -> Folder:
    """A small model as `convert` writes it."""
    checkpoint = open_checkpoint(small())
    return Folder(convert(checkpoint, family(checkpoint.config), SCRATCH / "converted", group=32))


@cache
def blocks() -> Folder:
    """A gpt-oss as OpenAI published it: experts as blocks and exponents of MXFP4."""
    model = test_gpt_oss.gpt_oss(num_hidden_layers=1, layer_types=["full_attention"], num_local_experts=2, vocab_size=32)
    folder, found = save(model, SCRATCH / "blocks"), {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, width, rows = tensor.shape
            found[f"{name}_blocks"] = torch.full((count, rows, width // 32, 16), 0x2A, dtype=torch.uint8)
            found[f"{name}_scales"] = torch.full((count, rows, width // 32), 120, dtype=torch.uint8)
        else:
            found[name] = tensor
    return Folder(test_gpt_oss.rewrite(folder, found, quantization_config={"quant_method": "mxfp4"}))


@cache
def packed_model() -> Path:
    """A mixture whose experts lie in files of their own."""
    return packed(hf_folder(SCRATCH / "mixture"), SCRATCH / "packed", bits=4, group=32)


def split(content: bytes) -> tuple[bytes, dict[str, Any]]:
    """The data of a safetensors file, and its header."""
    length = struct.unpack("<Q", content[:8])[0]
    return content[8 + length :], json.loads(content[8 : 8 + length])


def join(data: bytes, header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@cache
def gguf_of(architecture: str, kind: str = "F32") -> bytes:
    """A GGUF file of a family; its matrices but those of attention have blocks of some type."""
    if architecture == "llama":
        # wide enough for blocks of 256
        tensors = one_layer() if kind == "F32" else wide_tensors()
        words = {} if kind == "F32" else {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64}
        words["block_count"] = 1
    else:
        tensors, words = written(gguf_model(architecture), architecture), dict(WORDS[architecture])
    path, kinds = SCRATCH / f"{architecture}-{kind}.gguf", {name: "F32" for name in tensors if "self_attn" in name}
    return write_gguf(path, tensors, kind, architecture, words, kinds, tokenizer=True).read_bytes()


@cache
def gguf_pieces() -> tuple[bytes, ...]:
    """The files of a model that the `gguf` package has cut into two."""
    tensors = wide_tensors()
    words = {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64, "block_count": 1}
    write_gguf(SCRATCH / "cut.gguf", tensors, "Q8_0", words=words, tokenizer=True, most=-(-len(tensors) // 2))
    return tuple((SCRATCH / f"cut-0000{number}-of-00002.gguf").read_bytes() for number in (1, 2))


@cache
def header_nbytes(content: bytes) -> int:
    """Where the tensors of a GGUF file begin."""
    path = SCRATCH / "header.gguf"
    path.write_bytes(content)
    return gguf.GGUFReader(path).data_offset


def one_layer() -> dict[str, np.ndarray]:
    return {name: array for name, array in llama_tensors().items() if ".layers.1." not in name}


def wide_tensors() -> dict[str, np.ndarray]:
    """A Llama of which every matrix has whole blocks of 256."""
    swapped = {HIDDEN: 256, INNER: 256, 64: 128}
    made = {}
    for name, array in one_layer().items():
        shape = tuple(swapped.get(size, size) for size in array.shape)
        made[name] = np.resize(array, shape)
    return made
