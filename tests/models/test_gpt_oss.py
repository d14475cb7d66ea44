"""gpt-oss against transformers and mlx-lm."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from auraflux.errors import FormatError
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.mlx_oracle import check_mlx, legacy_config, quantized
from tests.models.oracles import agreement, check_family, error, logits, save, tokens, transformers_logits

SLIDING, FULL = "sliding_attention", "full_attention"
PLAIN = {"rope_type": "default", "rope_theta": 150000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "beta_fast": 16.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
SMALL = {
    "vocab_size": 259,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 20,
    "rope_parameters": {**YARN, "truncate": False},
}


def gpt_oss(**changes: Any) -> GptOssForCausalLM:
    torch.manual_seed(0)
    model = GptOssForCausalLM(GptOssConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        # near-ties turn a small error into another expert: wide margins, small weights
        model.model.embed_tokens.weight.mul_(16)
        for layer in model.model.layers:
            layer.mlp.router.weight.mul_(20)
            # so that some gate and up values are clamped
            layer.mlp.experts.gate_up_proj.mul_(8)
            layer.mlp.experts.down_proj.mul_(0.1)
            layer.self_attn.sinks.uniform_(-2, 2)
    return model


VARIANTS: dict[str, dict[str, Any]] = {
    "yarn": {},
    "yarn-truncated": {"rope_parameters": YARN},
    "plain-rope": {"rope_parameters": PLAIN},
    "full-first": {"layer_types": [FULL, SLIDING, SLIDING], "num_attention_heads": 6, "num_key_value_heads": 6},
    "one-key-head": {"num_key_value_heads": 1, "tie_word_embeddings": True},
    # a dense and a quantized matrix have the same shape
    "square-down": {"intermediate_size": 128},
    "square-gate-up": {"intermediate_size": 64, "swiglu_limit": 1.0},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_transformers(variant: str, tmp_path: Path):
    model = gpt_oss(**VARIANTS[variant])
    check_family(model, save(model, tmp_path))


def rewrite(folder: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """Replace the tensors of a folder and update its config."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def experts(model: GptOssForCausalLM) -> list[tuple[str, Any]]:
    return [(f"model.layers.{i}.mlp.experts", layer.mlp.experts) for i, layer in enumerate(model.model.layers)]


@pytest.mark.parametrize("inner", [192, 128, 64])
def test_mxfp4_blocks_match_transformers(inner: int, tmp_path: Path):
    model, generator = gpt_oss(intermediate_size=inner), torch.Generator().manual_seed(3)
    blocks = {}
    for name, module in experts(model):
        for kind in ("gate_up_proj", "down_proj"):
            count, width, rows = getattr(module, kind).shape
            codes = torch.randint(0, 256, (count, rows, width // 32, 16), generator=generator, dtype=torch.uint8)
            scales = torch.randint(119, 122, codes.shape[:3], generator=generator, dtype=torch.uint8)
            blocks |= {f"{name}.{kind}_blocks": codes, f"{name}.{kind}_scales": scales}
    save(model, tmp_path)
    for name, module in experts(model):
        for kind in ("gate_up_proj", "down_proj"):
            pair = blocks[f"{name}.{kind}_blocks"], blocks[f"{name}.{kind}_scales"]
            getattr(module, kind).data.copy_(convert_moe_packed_tensors(*pair, dtype=torch.float32))
    found = load_file(tmp_path / "model.safetensors")
    dense = {k: v for k, v in found.items() if not k.endswith(("gate_up_proj", "down_proj"))}
    rewrite(tmp_path, dense | blocks, quantization_config={"quant_method": "mxfp4"})
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    for chunk in (512, 1):
        assert error(logits(tmp_path, ids, chunk=chunk), expected) < 2e-4


def test_blocks_without_scales_are_refused(tmp_path: Path):
    save(gpt_oss(), tmp_path)
    rewrite(tmp_path, {"model.layers.0.mlp.experts.down_proj_blocks": torch.zeros(1, 1, 1, 16, dtype=torch.uint8)})
    with pytest.raises(FormatError, match=r"down_proj_blocks and no model\.layers\.0\.mlp\.experts\.down_proj_scales"):
        open_checkpoint(tmp_path).sizes()


@pytest.mark.parametrize(
    ("blocks", "scales", "message"),
    [
        ((1, 1, 1, 2), (1, 1, 1), r"blocks are \[1, 1, 1, 2\].*16 bytes each"),
        ((1, 1, 2, 16), (1, 1, 1), r"scales are \[1, 1, 1\].*one byte per block"),
    ],
)
def test_blocks_of_another_shape_are_refused(blocks: tuple[int, ...], scales: tuple[int, ...], message: str, tmp_path: Path):
    save(gpt_oss(), tmp_path)
    name = "model.layers.0.mlp.experts.down_proj"
    rewrite(tmp_path, {name + "_blocks": torch.zeros(blocks).byte(), name + "_scales": torch.zeros(scales).byte()})
    with pytest.raises(FormatError, match=f"{re.escape(name)}.*not a valid MXFP4 weight.*{message}"):
        open_checkpoint(tmp_path).load(name)


def under_mlx_names(model: GptOssForCausalLM, folder: Path) -> Path:
    """Save the experts' projections separately, the only dense layout that mlx-lm reads."""
    tensors = {k: v for k, v in load_file(save(model, folder) / "model.safetensors").items() if ".experts." not in k}
    for name, module in experts(model):
        both, bias = module.gate_up_proj.data.transpose(1, 2), module.gate_up_proj_bias.data
        tensors |= {f"{name}.gate_proj.weight": both[:, ::2], f"{name}.up_proj.weight": both[:, 1::2]}
        tensors |= {f"{name}.gate_proj.bias": bias[:, ::2], f"{name}.up_proj.bias": bias[:, 1::2]}
        tensors[f"{name}.down_proj.weight"] = module.down_proj.data.transpose(1, 2)
        tensors[f"{name}.down_proj.bias"] = module.down_proj_bias.data
    return rewrite(folder, tensors)


def test_separate_dense_projections_are_loaded(tmp_path: Path):
    model = gpt_oss()
    ids = tokens(model)
    folder = under_mlx_names(model, tmp_path)
    assert error(logits(folder, ids), transformers_logits(model, ids)) < 2e-4


# mlx-lm supports YaRN only with bounds truncated to whole channels
@pytest.mark.parametrize("rope", [YARN, PLAIN], ids=["yarn", "plain-rope"])
def test_logits_match_mlx_lm(rope: dict[str, Any], tmp_path: Path):
    model = gpt_oss(rope_parameters=rope)
    folder = quantized(under_mlx_names(model, tmp_path / "hf"), tmp_path / "mlx", legacy_config)
    check_mlx(model, folder)


def test_weights_are_quantized_while_loading(tmp_path: Path):
    model = gpt_oss()
    save(model, tmp_path)
    ids = tokens(model)
    expected = transformers_logits(model, ids)
    assert error(logits(tmp_path, ids, bits=8), expected) < 0.05
    found = logits(tmp_path, ids, bits=4)
    assert error(found, expected) < 0.35
    assert agreement(found, expected) > 0.9


def test_missing_and_misshapen_tensors_are_named(tmp_path: Path):
    model = gpt_oss()
    save(model, tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    found.pop("model.layers.0.self_attn.sinks")
    found["model.layers.1.mlp.experts.gate_up_proj"] = found["model.layers.1.mlp.experts.gate_up_proj"].transpose(1, 2)
    rewrite(tmp_path, found)
    with pytest.raises(FormatError, match=r"1 missing: \S+\.0\.self_attn\.sinks; 1 of the wrong shape: .*gate_up_proj"):
        logits(tmp_path, tokens(model, 3))
