"""A tiny checkpoint of every weight format on the GPU against the CPU and against transformers on the dequantized weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from auraflux.ops import use_backend
from auraflux.quant.gguf_layouts import LAYOUTS
from tests.models.oracles import error, save, tokens, transformers_logits
from tests.models.test_gpu import engine_for, logits
from tests.weights.formats.gguf_files import UNWRITTEN, VOCAB, any_blocks, decoded, llama_tensors, write_gguf
from tests.weights.formats.quantized_folders import FOLDERS, rewrite

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256}
MIXTURE = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4}


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def make_mixture() -> Any:
    """Return a mixture that routes tokens to all experts, so that rounding does not change the routing."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE))


def check(folder: Path, ids: list[int], expected: torch.Tensor) -> None:
    """Compare the GPU with the CPU, in float32 and in bf16."""
    with use_backend("reference"):
        cpu = logits(engine_for(folder, "none", "cpu", torch.float32), ids)
    assert error(cpu, expected) < 2e-4
    assert error(logits(engine_for(folder, "none", "cuda", torch.float32), ids), cpu) < 1e-3
    assert error(logits(engine_for(folder, "none", "cuda", torch.bfloat16), ids), cpu) < 0.03


@pytest.mark.parametrize("make", [make_llama, make_mixture], ids=["llama", "mixture"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_every_quantization_method_matches_transformers(kind: str, make: Any, tmp_path: Path):
    model = make()
    folder = save(model, tmp_path / "hf")
    dequantized = rewrite(folder, tmp_path / "q", *FOLDERS[kind])
    ids = tokens(model, 40)
    check(tmp_path / "q", ids, transformers_logits(with_weights(type(model), folder, dequantized, tmp_path / "plain"), ids))


def with_weights(kind: Any, folder: Path, dequantized: dict[str, torch.Tensor], target: Path) -> Any:
    """Return a transformers model with dequantized weights."""
    from safetensors.torch import save_file

    target.mkdir()
    weights = {name: weight.float().contiguous() for name, weight in dequantized.items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return kind.from_pretrained(target)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_every_gguf_block_type_matches_cpu(kind: str, tmp_path: Path):
    inner, names = 256, [f"model.layers.{number}.mlp.down_proj.weight" for number in range(2)]
    wide = {f"model.layers.{number}.mlp.{part}_proj.weight": (inner, 128) for number in range(2) for part in ("gate", "up")}
    tensors = llama_tensors(**wide, **dict.fromkeys(names, (128, inner)))
    metadata, ids = {"feed_forward_length": inner}, list(range(1, 41))
    path = write_gguf(tmp_path / "m.gguf", tensors, metadata=metadata, kinds=dict.fromkeys(names, kind))
    dequantized = {name: decoded(encoded(tensors[name], kind), kind) for name in names}
    plain = write_gguf(tmp_path / "plain.gguf", tensors | dequantized, metadata=metadata)
    assert max(ids) < VOCAB
    with use_backend("reference"):
        expected = logits(engine_for(plain, "none", "cpu", torch.float32), ids)
    check(path, ids, expected)


def encoded(array: np.ndarray, kind: str) -> np.ndarray:
    """Return the blocks that `write_gguf` encodes an array to."""
    return any_blocks(array.shape, kind) if kind in UNWRITTEN else quants.quantize(array, GGMLQuantizationType[kind])
