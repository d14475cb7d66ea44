"""Tiny models that inputs are mutated from, generated once per process in a temporary folder."""

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
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.formats.stored import Checkpoint, Stored
from auraflux.weights.loader import Weights
from tests.engine.tiny import WIDTHS, tiny
from tests.models import (
    test_afmoe,
    test_axk2,
    test_bailing_hybrid,
    test_cohere2_moe,
    test_dbrx,
    test_deepseek_v3,
    test_deepseek_v4,
    test_deepseek_v32,
    test_ernie4_5_moe,
    test_flex_olmo,
    test_gemma3_text,
    test_gemma4_text,
    test_glm4_moe,
    test_gpt_oss,
    test_granitemoe,
    test_hunyuan_v1_moe,
    test_hy_v4,
    test_kimi_linear,
    test_kolibri1,
    test_laguna,
    test_lfm2_moe,
    test_llama,
    test_llama4_text,
    test_longcat_flash,
    test_mimo_v2_flash,
    test_minimax,
    test_minimax_m3_vl,
    test_nemotron_h,
    test_phimoe,
    test_qwen3_5_moe,
    test_qwen3_moe,
    test_qwen4_exp,
    test_step3p7,
)
from tests.models.oracles import save
from tests.weights.experts.packed_folders import hf_folder, packed
from tests.weights.formats.gguf_files import HIDDEN, INNER, llama_tensors, write_gguf
from tests.weights.formats.gguf_models import METADATA, gguf_tensors
from tests.weights.formats.gguf_models import tiny as gguf_model
from tests.weights.formats.quantized_folders import FOLDERS, rewrite

# in /dev/shm if possible: on a disk, writing the file would dominate an input's time
MEMORY = Path("/dev/shm")
SCRATCH = Path(mkdtemp(prefix="auraflux-fuzz-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
atexit.register(shutil.rmtree, SCRATCH, ignore_errors=True)

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# overrides of Hugging Face defaults that would be slow to load
SMALL = {"num_hidden_layers": 4, "vocab_size": 300}
# keys without defaults
INDEXED = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 64,
    "indexer_compress_ratio": 16,
}
QWEN4 = {kind: {**INDEXED, "ple_layer_ids": [1, 2], "eos_token_id": 2} for kind in ("qwen4_exp", "qwen4_exp_text")}
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
    "solar_open": test_glm4_moe.solar,
    "dots1": test_glm4_moe.dots,
    "hy_v3": test_glm4_moe.hunyuan,
    "hy_v4": test_hy_v4.hunyuan4,
    "dbrx": test_dbrx.dbrx,
    "axk1": test_deepseek_v3.axk1,
    "axk2": test_axk2.axk2,
    "bailing_hybrid": test_bailing_hybrid.bailing,
    "flex_olmo": test_flex_olmo.flex_olmo,
    "llama4_text": test_llama4_text.llama4,
    "minimax": test_minimax.minimax,
    "phimoe": test_phimoe.phimoe,
    "deepseek_v2": test_deepseek_v3.deepseek_v2,
    "longcat_flash": test_longcat_flash.longcat,
    "granitemoeshared": test_granitemoe.shared,
    "granitemoehybrid": test_granitemoe.hybrid,
    "granitemoe_swa": test_granitemoe.swash,
    "hunyuan_v1_moe": test_hunyuan_v1_moe.hunyuan,
    "kolibri1": test_kolibri1.kolibri,
    "lfm2_moe": test_lfm2_moe.lfm2,
    "cohere2_moe": test_cohere2_moe.cohere,
    "minimax_m3_vl": test_minimax_m3_vl.minimax,
    "step3p7": test_step3p7.step,
    "mimo_v2_flash": test_mimo_v2_flash.mimo,
    "exaone_moe": test_glm4_moe.exaone,
    "mellum": test_qwen3_moe.mellum,
    "afmoe": test_afmoe.afmoe,
    # the usual projector, which no model here uses, would take 170 MB
    "muse_glimmer_text": lambda: test_afmoe.muse({"out_hidden_size": 32, "projector_hidden_size": 24}),
    "laguna": test_laguna.laguna,
    "ernie4_5_moe": test_ernie4_5_moe.ernie,
    "gpt_oss": test_gpt_oss.gpt_oss,
    "gemma3_text": test_gemma3_text.gemma,
    "gemma4": test_gemma4_text.mixture,
    "gemma4_text": test_gemma4_text.small_gemma4,
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
    """Open a model up to its weights: config, cache shapes, names and sizes of tensors."""
    checkpoint = open_checkpoint(path)
    module = family(checkpoint.config)
    settings = CacheSettings("auto").for_family(family_name(checkpoint.config))
    Cache(module.make_caches(module.Config.from_hf(checkpoint.config)), settings, context=64, device="meta")
    checkpoint.sizes()
    return checkpoint


class FirstRow(Weights):
    """Weights that dequantize the first row of the first quantized tensor."""

    is_read = False

    def to_kernel_layout(self, found: Stored, in_order: bool = False) -> Stored:
        made = super().to_kernel_layout(found, in_order)
        if isinstance(made, QTensor) and not self.is_read and len(made.shape) == 2:
            self.is_read = True
            assert made.take(torch.zeros(1, dtype=torch.int64)).dequantize().shape == (1, made.shape[1])
        return made


def load_all(path: Path) -> None:
    """Load a model with its weights, and plan its memory as `inspect` does."""
    checkpoint = open_all(path)
    module = family(checkpoint.config)
    weights = FirstRow(checkpoint, module.rename)
    module.Model(module.Config.from_hf(checkpoint.config), weights)
    weights.check_loaded()
    assert all(isinstance(note, str) for note in checkpoint.notes)


@cache
def copy_of(name: str) -> Path:
    """Return a folder for one target with copies of the tiny model's files."""
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
    """Return a config of every model type with Hugging Face defaults."""
    found = [json.loads(original(CONFIG))]
    for kind in sorted(FAMILIES):
        made = AutoConfig.for_model(ALIASES.get(kind, kind)).to_dict()
        inner = made.get("text_config")
        layers = None if kind != "gpt_oss" else ["sliding_attention", "full_attention"] * 2
        (inner if isinstance(inner, dict) else made).update(SMALL, layer_types=layers, **QWEN4.get(kind, {}))
        found.append(json.loads(json.dumps({**made, "model_type": kind}, default=str)))
    return found


class Folder:
    """A model folder whose config and weights are replaced for every input."""

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
        """Write the given files, or the original ones."""
        (self.path / CONFIG).write_bytes(self._config if config is None else config)
        if weights is not None or self._is_changed:
            (self.path / WEIGHTS).write_bytes(self._content if weights is None else weights)
        self._is_changed = weights is not None
        return self.path


@cache
def model_of(kind: str) -> Folder:
    """Return a tiny model of a family."""
    return Folder(save(MODELS[kind](), SCRATCH / f"family-{kind}"))


@cache
def small() -> Path:
    """Return a model of one layer and a small vocabulary, the source of quantized folders."""
    config = LlamaConfig(vocab_size=32, num_hidden_layers=1, max_position_embeddings=512, eos_token_id=0, **WIDTHS)
    return save(LlamaForCausalLM(config), SCRATCH / "small")


@cache
def quantized(kind: str) -> Folder:
    """Return a small model whose MLP is quantized in a third-party format."""
    rewrite(small(), SCRATCH / kind, *FOLDERS[kind], skip=("embed_tokens", "lm_head", "norm", "self_attn"))
    return Folder(SCRATCH / kind)


@cache
def converted() -> Folder:
    """Return a small model as written by `convert`."""
    checkpoint = open_checkpoint(small())
    return Folder(convert(checkpoint, family(checkpoint.config), SCRATCH / "converted", group=32))


@cache
def blocks() -> Folder:
    """Return a gpt-oss as published by OpenAI: experts as MXFP4 blocks and scales."""
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
    """Return an MoE model with packed experts."""
    return packed(hf_folder(SCRATCH / "mixture"), SCRATCH / "packed", bits=4, group=32)


def split(content: bytes) -> tuple[bytes, dict[str, Any]]:
    """Split a safetensors file into its data and its header."""
    length = struct.unpack("<Q", content[:8])[0]
    return content[8 + length :], json.loads(content[8 : 8 + length])


def join(data: bytes, header: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + data


@cache
def gguf_of(architecture: str, kind: str = "F32") -> bytes:
    """Return a GGUF file of a family with all matrices but attention in one block type."""
    if architecture == "llama":
        # wide enough for blocks of 256
        tensors = one_layer() if kind == "F32" else wide_tensors()
        metadata = {} if kind == "F32" else {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64}
        metadata["block_count"] = 1
    else:
        tensors, metadata = gguf_tensors(gguf_model(architecture), architecture), dict(METADATA[architecture])
    path, kinds = SCRATCH / f"{architecture}-{kind}.gguf", {name: "F32" for name in tensors if "self_attn" in name}
    return write_gguf(path, tensors, kind, architecture, metadata, kinds, tokenizer=True).read_bytes()


@cache
def gguf_split() -> tuple[bytes, ...]:
    """Return the two files of a model split by the `gguf` package."""
    tensors = wide_tensors()
    metadata = {"embedding_length": 256, "feed_forward_length": 256, "attention.key_length": 64, "block_count": 1}
    write_gguf(SCRATCH / "cut.gguf", tensors, "Q8_0", metadata=metadata, tokenizer=True, most=-(-len(tensors) // 2))
    return tuple((SCRATCH / f"cut-0000{number}-of-00002.gguf").read_bytes() for number in (1, 2))


@cache
def header_nbytes(content: bytes) -> int:
    """Return the offset of the tensor data in a GGUF file."""
    path = SCRATCH / "header.gguf"
    path.write_bytes(content)
    return gguf.GGUFReader(path).data_offset


def one_layer() -> dict[str, np.ndarray]:
    return {name: array for name, array in llama_tensors().items() if ".layers.1." not in name}


def wide_tensors() -> dict[str, np.ndarray]:
    """Return Llama tensors whose widths are multiples of 256."""
    swapped = {HIDDEN: 256, INNER: 256, 64: 128}
    made = {}
    for name, array in one_layer().items():
        shape = tuple(swapped.get(size, size) for size in array.shape)
        made[name] = np.resize(array, shape)
    return made
