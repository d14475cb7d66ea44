"""Shapes of real models, to be filled with random weights: what a model costs does not depend on what it says."""

import re
from typing import Any

from auraflux.bench.more_shapes import MORE_SHAPES
from auraflux.errors import InputError

QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 262144,
}
QWEN36_35B_A3B = {
    "model_type": "qwen3_5_moe_text",
    "hidden_size": 2048,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 40,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "vocab_size": 248320,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e7,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 262144,
}
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
}
# of its 61 layers one that is dense and three with experts
DEEPSEEK_V3_4LAYER = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 163840,
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": QWEN3_30B_A3B,
    "qwen3.6-35b-a3b": QWEN36_35B_A3B,
    "llama-8b": LLAMA_8B,
    "deepseek-v3-4layer": DEEPSEEK_V3_4LAYER,
}


def shape_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """The configuration of a named shape, with fewer layers if so many are wanted."""
    every = SHAPES | MORE_SHAPES
    if name not in every:
        raise InputError(f"there is no shape {name!r}. Those there are: {', '.join(every)}.")
    found = dict(every[name])
    if layers is None:
        return found
    if "layer_types" in found:
        found["layer_types"] = found["layer_types"][-layers:]
    if "hybrid_override_pattern" in found:
        # a layer is one or two blocks; the first few have all kinds
        blocks = "".join(re.findall(r"[M*][E-]?", found["hybrid_override_pattern"])[:layers])
        return found | {"hybrid_override_pattern": blocks, "num_hidden_layers": len(blocks)}
    if "ple_layer_ids" in found:
        found["ple_layer_ids"] = [number for number in found["ple_layer_ids"] if number <= layers]
    if "num_kv_shared_layers" in found:
        gone = found["num_hidden_layers"] - layers
        found["num_kv_shared_layers"] = max(0, found["num_kv_shared_layers"] - gone)
    return found | {"num_hidden_layers": layers}
