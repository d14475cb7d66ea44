"""Folders written by `convert`, loaded here and by mlx-lm."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.errors import FormatError
from auraflux.models import family
from auraflux.ops import use_backend
from auraflux.quant import QTensor, quantize
from auraflux.weights.convert import mlx_folder as module
from auraflux.weights.convert.mlx_folder import convert
from auraflux.weights.formats.checkpoint import open_checkpoint
from auraflux.weights.loader import Weights
from tests.models.oracles import save
from tests.tested import external_oracle
from tests.weights.formats.gguf_files import llama_tensors, write_gguf
from tests.weights.tiny_models import tiny

IDS = [1, 5, 9, 70, 3]
FAMILIES = ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gpt_oss", "gemma3_text", "deepseek_v3"]
LATER = ["glm4_moe", "minimax_m2", "gemma4_text", "mistral4", "ernie4_5_moe", "mixtral"]


@pytest.fixture
def source(tmp_path) -> Path:
    """Save a tiny Llama in Hugging Face's layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=96,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "hf")
    (tmp_path / "hf" / "tokenizer_config.json").write_text('{"chat_template": "{{ 1 }}"}')
    (tmp_path / "hf" / "code.py").write_text("raise SystemExit")
    return tmp_path / "hf"


def run(path: Path, target: Path, **options) -> Path:
    checkpoint = open_checkpoint(path)
    return convert(checkpoint, family(checkpoint.config), target, **options)


def scores(path: Path, **options) -> Tensor:
    checkpoint = open_checkpoint(path)
    kind = family(checkpoint.config)
    config = kind.Config.from_hf(checkpoint.config)
    with use_backend("reference"):
        weights = Weights(checkpoint, kind.rename, **options)
        model = kind.Model(config, weights)
        weights.check_loaded()
        engine = Engine(model, kind.make_caches(config), CacheSettings(kv="none"), context=64, exact=True)
        return engine.all_logits(engine.cache.open(), IDS)


@external_oracle("mlx-lm")
def mlx_logits(path: Path) -> Tensor:
    from mlx_lm.utils import load_model

    model, _ = load_model(path)
    model.set_dtype(mx.float32)
    return torch.from_numpy(np.array(model(mx.array([IDS]))[0]))


def close(have: Tensor, want: Tensor, tolerance: float) -> bool:
    return bool((have - want).norm() <= tolerance * want.norm())


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32), (3, 64)])
def test_both_packages_load_the_folder(source: Path, tmp_path, bits: int, group: int):
    target = run(source, tmp_path / "mlx", bits=bits, group=group)
    mine = scores(target)
    assert torch.equal(mine, scores(source, bits=bits, group=group))
    assert close(mlx_logits(target), mine, 1e-4)
    assert not close(mine, scores(source), 1e-6)


def test_folder_has_mlx_lm_layout(source: Path, tmp_path):
    target = run(source, tmp_path / "mlx")
    assert sorted(os.listdir(target)) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "tokenizer_config.json",
    ]
    config = json.loads((target / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] == {"group_size": 64, "bits": 4, "mode": "affine"}
    assert (config["rope_theta"], config["rope_scaling"]) == (5000.0, {"rope_type": "linear", "factor": 2.0})
    with safe_open(target / "model.safetensors", "pt") as file:
        name = "model.layers.1.self_attn.q_proj"
        dtypes = [file.get_slice(f"{name}.{part}").get_dtype() for part in ("weight", "scales", "biases")]
        assert dtypes == ["U32", "BF16", "BF16"]
        assert file.get_slice("model.norm.weight").get_dtype() == "BF16"
        assert file.metadata() == {"format": "mlx"}


def test_shards_and_index(source: Path, tmp_path, monkeypatch):
    whole = scores(run(source, tmp_path / "whole"))
    monkeypatch.setattr(module.Shards.__init__, "__defaults__", (20_000,))
    target = run(source, tmp_path / "mlx")
    files = sorted(path.name for path in target.glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((target / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert torch.equal(scores(target), whole)
    assert close(mlx_logits(target), whole, 1e-4)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_gguf_codes_are_unchanged(kind: str, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", llama_tensors(), kind)
    target = run(path, tmp_path / "mlx", bits=4, group=64)
    config = json.loads((target / "config.json").read_text())
    assert config["quantization"] == {"group_size": 32, "bits": 4, "mode": "affine"}
    # Q4_0 has no biases before it is converted: sums round otherwise
    assert torch.equal(scores(target), scores(path)) if kind == "Q4_1" else close(scores(target), scores(path), 1e-5)
    assert close(mlx_logits(target), scores(path), 1e-4)


def test_codes_with_more_bits_are_requantized(source: Path, tmp_path):
    eight = run(source, tmp_path / "eight", bits=8)
    four = open_checkpoint(run(eight, tmp_path / "four", bits=4))
    again = open_checkpoint(run(tmp_path / "four", tmp_path / "again", bits=6))
    for checkpoint in (four, again):
        stored = checkpoint.load("model.layers.0.mlp.up_proj.weight")
        assert isinstance(stored, QTensor)
        assert (stored.bits, stored.group) == (4, 64)
        # embeddings with more bits are not requantized
        assert checkpoint.load("lm_head.weight").bits == 8
    quantization = four.config["quantization"]
    assert (quantization["bits"], quantization["lm_head"]) == (4, {"group_size": 64, "bits": 8, "mode": "affine"})
    assert close(mlx_logits(tmp_path / "four"), scores(tmp_path / "four"), 1e-4)
    assert torch.equal(scores(tmp_path / "four"), scores(tmp_path / "again"))


def test_widths_not_divisible_by_the_group_stay_dense(source: Path, tmp_path):
    target = run(source, tmp_path / "mlx", bits=4, group=128)
    stored = open_checkpoint(target).load("model.layers.0.mlp.down_proj.weight")
    assert isinstance(stored, Tensor)
    assert stored.dtype is torch.bfloat16
    assert close(mlx_logits(target), scores(target), 1e-4)


def test_routers_stay_dense():
    weights = object.__new__(module.FolderWriter)
    weights.bits, weights.group, weights.pool = 4, 64, ThreadPoolExecutor(1)
    dense = torch.randn(8, 64)
    for name in ("model.layers.0.mlp.gate", "model.layers.0.mlp.router", "model.layers.0.mlp.shared_expert_gate"):
        assert weights.quantized(dense, f"{name}.weight") is dense
    assert isinstance(weights.quantized(dense, "model.layers.0.mlp.gate_proj.weight"), QTensor)


def test_existing_folder_is_replaced_only_with_force(source: Path, tmp_path):
    target = run(source, tmp_path / "mlx", bits=4)
    with pytest.raises(FormatError, match=r"mlx already exists\. Use --force"):
        run(source, target, bits=8)
    run(source, target, bits=8, force=True)
    assert json.loads((target / "config.json").read_text())["quantization"]["bits"] == 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mlx"]


def test_unrelated_folder_is_never_replaced(source: Path, tmp_path):
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").touch()
    with pytest.raises(FormatError, match="is not a model folder, so it is not replaced"):
        run(source, tmp_path / "home", force=True)
    with pytest.raises(FormatError, match="is the source model"):
        run(source, source, force=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, FormatError])
def test_interruption_leaves_no_files(source: Path, tmp_path, error):
    def stop(nbytes: int) -> None:
        raise error

    with pytest.raises(error):
        run(source, tmp_path / "mlx", advance=stop)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_interruption_leaves_the_existing_folder(source: Path, tmp_path):
    target = run(source, tmp_path / "mlx", bits=4)
    before = (target / "model.safetensors").read_bytes()

    def stop(folder: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source, target, bits=8, force=True, add=stop)
    assert (target / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "mlx"]


def test_missing_tensor_raises_and_leaves_no_files(source: Path, tmp_path):
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(FormatError, match=r"1 missing: model\.norm\.weight"):
        run(source, tmp_path / "mlx")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_full_disk_raises(source: Path, tmp_path, monkeypatch):
    def full(*args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "save_file", full)
    with pytest.raises(FormatError, match="mlx cannot be written: No space left on device"):
        run(source, tmp_path / "mlx")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_unknown_format_raises_first(source: Path, tmp_path):
    with pytest.raises(FormatError, match="7 bits in groups of 64 is not a format"):
        run(source, tmp_path / "mlx", bits=7)


def test_requantized_scales_have_the_source_dtype():
    weights = object.__new__(module.FolderWriter)
    weights.bits, weights.group, weights.pool = 4, 64, ThreadPoolExecutor(1)
    made = weights.quantized(quantize(torch.randn(8, 64).to(torch.bfloat16), 8, 64), "x.weight")
    assert isinstance(made, QTensor)
    assert (made.bits, made.scales.dtype) == (4, torch.bfloat16)


# config values of published files that transformers does not write
PUBLISHED: dict[str, dict] = {
    "glm4_moe": {"rope_scaling": None},
    "minimax_m2": {"rotary_dim": 16, "shared_intermediate_size": 0},
    "gemma4_text": {"global_head_dim": 64, "per_layer_config": None},
}


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.slow) for kind in LATER)])
def test_families_that_both_packages_load(kind: str, tmp_path):
    source = save(tiny(kind), tmp_path / "hf")
    if kind in PUBLISHED:
        path = source / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **PUBLISHED[kind]}))
    target = run(source, tmp_path / "mlx", bits=6, group=32)
    mine = scores(target)
    assert close(mlx_logits(target), mine, 1e-3)
    # mlx-lm transposes some matrices, so their quantization groups differ
    assert close(mine, scores(source, bits=6, group=32), 0.01)
