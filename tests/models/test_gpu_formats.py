"""A tiny checkpoint of every weight format on the GPU: as on the CPU, and as transformers on what its weights stand for."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from auraflux.ops import use_backend
from auraflux.quant.gguf_blocks import LAYOUTS
from tests.models.oracles import error, save, tokens, truth
from tests.models.test_gpu import engine_for, scores
from tests.weights.gguf_files import UNWRITTEN, VOCAB, any_blocks, decoded, llama_tensors, write_gguf
from tests.weights.quantized_folders import FOLDERS, rewrite

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 256}
MIXTURE = {"head_dim": 32, "moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 4}


def make_llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def make_mixture() -> Any:
    """Tokens go to all experts, so that rounding chooses no others."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **MIXTURE))


def check(folder: Path, text: list[int], wanted: torch.Tensor) -> None:
    """Hold the GPU to the CPU, in single precision and in bf16."""
    with use_backend("reference"):
        cpu = scores(engine_for(folder, "none", "cpu", torch.float32), text)
    assert error(cpu, wanted) < 2e-4
    assert error(scores(engine_for(folder, "none", "cuda", torch.float32), text), cpu) < 1e-3
    assert error(scores(engine_for(folder, "none", "cuda", torch.bfloat16), text), cpu) < 0.03


@pytest.mark.parametrize("make", [make_llama, make_mixture], ids=["llama", "mixture"])
@pytest.mark.parametrize("kind", FOLDERS)
def test_a_folder_of_every_method(kind: str, make: Any, tmp_path: Path):
    model = make()
    folder = save(model, tmp_path / "hf")
    meant = rewrite(folder, tmp_path / "q", *FOLDERS[kind])
    text = tokens(model, 40)
    check(tmp_path / "q", text, truth(with_weights(type(model), folder, meant, tmp_path / "plain"), text))


def with_weights(kind: Any, folder: Path, meant: dict[str, torch.Tensor], target: Path) -> Any:
    """A transformers model of the weights that are meant."""
    from safetensors.torch import save_file

    target.mkdir()
    weights = {name: weight.float().contiguous() for name, weight in meant.items()}
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((folder / "config.json").read_bytes())
    return kind.from_pretrained(target)


@pytest.mark.parametrize("kind", LAYOUTS)
def test_a_file_of_every_block_type(kind: str, tmp_path: Path):
    inner, names = 256, [f"model.layers.{number}.mlp.down_proj.weight" for number in range(2)]
    wide = {f"model.layers.{number}.mlp.{part}_proj.weight": (inner, 128) for number in range(2) for part in ("gate", "up")}
    tensors = llama_tensors(**wide, **dict.fromkeys(names, (128, inner)))
    words, text = {"feed_forward_length": inner}, list(range(1, 41))
    path = write_gguf(tmp_path / "m.gguf", tensors, words=words, kinds=dict.fromkeys(names, kind))
    meant = {name: decoded(octets_of(tensors[name], kind), kind) for name in names}
    plain = write_gguf(tmp_path / "plain.gguf", tensors | meant, words=words)
    assert max(text) < VOCAB
    with use_backend("reference"):
        wanted = scores(engine_for(plain, "none", "cpu", torch.float32), text)
    check(path, text, wanted)


def octets_of(array: np.ndarray, kind: str) -> np.ndarray:
    """The blocks that `write_gguf` makes of an array."""
    return any_blocks(array.shape, kind) if kind in UNWRITTEN else quants.quantize(array, GGMLQuantizationType[kind])
