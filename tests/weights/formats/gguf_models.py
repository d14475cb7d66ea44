"""Tiny transformers models of GGUF architectures, and their tensors converted like llama.cpp does."""

from typing import Any

import numpy as np
import torch

from tests.models.test_deepseek_v3 import sharpen_routers
from tests.models.test_gemma4_text import randomize_scales
from tests.weights.formats.gguf_files import HEADS, HIDDEN, INNER, KV_HEADS, LAYERS, VOCAB, WIDTH

SHARED: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": WIDTH,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": HEADS,
    "rms_norm_eps": 1e-6,
    "intermediate_size": INNER,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 2.5,
    "q_lora_rank": 64,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": WIDTH,
    "qk_rope_head_dim": 16,
    "head_dim": 16,
    "v_head_dim": 64,
}


QWENS = "qwen3next", "qwen35", "qwen35moe"
KEY_HEADS, VALUE_HEADS = 2, 6
HYBRID: dict[str, Any] = {
    "intermediate_size": INNER,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": KEY_HEADS,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_key_head_dim": WIDTH,
    "linear_value_head_dim": WIDTH,
}


def _qwen(kind: str, **options: Any) -> Any:
    import transformers as hf

    mixed = {
        "num_experts": 5,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 96,
    }
    if kind == "qwen3next":
        return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**options, **mixed, norm_topk_prob=True))
    if kind == "qwen35":
        return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**options))
    return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**options, **mixed))


SLIDING, FULL = "sliding_attention", "full_attention"
# layers with shared KV and per-layer inputs
SMALL_GEMMA4: dict[str, Any] = {
    "hidden_size_per_layer_input": 64,
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
}


def gemma4(**changes: Any) -> Any:
    import transformers as hf

    sizes: dict[str, Any] = {
        "intermediate_size": INNER,
        "global_head_dim": 64,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": VOCAB,
        "num_experts": 5,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
        "enable_moe_block": True,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "final_logit_softcapping": 30.0,
    }
    torch.manual_seed(0)
    return randomize_scales(hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**sizes | changes)))


def small_gemma4() -> Any:
    return gemma4(**SHARED | SMALL_GEMMA4)


def _biased(kind: str, options: dict[str, Any]) -> Any:
    import transformers as hf

    sizes = {"intermediate_size": INNER, "moe_intermediate_size": 64, "norm_topk_prob": True}
    if kind == "dots1":
        more = {"n_routed_experts": 5, "n_shared_experts": 2, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
        return sharpen_routers(hf.Dots1ForCausalLM(hf.Dots1Config(**options | sizes | more | {"num_key_value_heads": HEADS})))
    sizes |= {"num_experts": 5, "num_shared_experts": 2, "sliding_window": 16}
    if kind == "afmoe":
        more = {"num_dense_layers": 1, "route_scale": 1.5, "mup_enabled": True}
        return sharpen_routers(hf.AfmoeForCausalLM(hf.AfmoeConfig(**options | sizes | more)))
    more = {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "layer_types": [SLIDING, FULL]}
    return sharpen_routers(hf.ExaoneMoeForCausalLM(hf.ExaoneMoeConfig(**options | sizes | more)))


def tiny(kind: str, moe_intermediate_size: int = 64):
    """Build a transformers model with the sizes that `write_gguf` writes."""
    import transformers as hf

    shared = SHARED
    experts: dict = {"num_experts_per_tok": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    torch.manual_seed(0)
    if kind == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(**shared, intermediate_size=INNER))
    if kind == "qwen3moe":
        sizes = {"moe_intermediate_size": moe_intermediate_size, "num_experts": 5}
        config = hf.Qwen3MoeConfig(**shared, **experts, **sizes, norm_topk_prob=True)
        return hf.Qwen3MoeForCausalLM(config)
    if kind == "gemma3":
        bases = {"sliding_attention": 10000.0, "full_attention": 1000000.0}
        ropes = {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()}
        sizes = {"intermediate_size": INNER, "sliding_window": 16, "query_pre_attn_scalar": WIDTH}
        kinds = list(bases)
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**shared, **sizes, layer_types=kinds, rope_parameters=ropes))
    if kind == "glm4moe":
        experts["rope_parameters"] |= {"partial_rotary_factor": 0.5}
        sizes = {"intermediate_size": INNER, "moe_intermediate_size": 64, "n_routed_experts": 5, "num_mtp_layers": 0}
        options = {"use_qk_norm": True, "attention_bias": True, "routed_scaling_factor": 1.5}
        return sharpen_routers(hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**shared, **experts, **sizes, **options)))
    if kind in ("dots1", "exaone-moe", "afmoe"):
        return _biased(kind, shared | experts)
    if kind == "minimax-m2":
        experts["rope_parameters"] |= {"partial_rotary_factor": 0.5}
        config = hf.MiniMaxM2Config(**shared, **experts, intermediate_size=64, num_local_experts=5)
        return sharpen_routers(hf.MiniMaxM2ForCausalLM(config))
    if kind == "gemma4":
        return gemma4(**shared)
    if kind == "llama4":
        sizes = {"intermediate_size": 64, "intermediate_size_mlp": INNER, "num_local_experts": 5, "num_hidden_layers": 4}
        config = hf.Llama4TextConfig(**shared | experts | sizes | {"num_experts_per_tok": 1, "interleave_moe_layer_step": 2})
        return hf.Llama4ForCausalLM(config)
    if kind in QWENS:
        plain = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
        return _qwen(kind, **shared | HYBRID | {"rope_parameters": plain})
    if kind == "deepseek2":
        return sharpen_routers(hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**shared | DEEPSEEK | {"rope_parameters": YARN})))
    config = hf.GptOssConfig(**shared, **experts, intermediate_size=96, num_local_experts=5, sliding_window=16)
    return hf.GptOssForCausalLM(config)


def deepseek_v2() -> Any:
    """Return a model of DeepSeek V2, which GGUF files call as they call V3."""
    import transformers as hf

    torch.manual_seed(0)
    older = {"topk_method": "group_limited_greedy", "rope_parameters": YARN}
    return sharpen_routers(hf.DeepseekV2ForCausalLM(hf.DeepseekV2Config(**SHARED | DEEPSEEK | older)))


def gguf_tensors(model: Any, kind: str) -> dict[str, np.ndarray]:
    """Return all tensors of a model in GGUF's layout."""
    found: dict[str, np.ndarray] = {}
    if kind == "gemma4":
        # a quarter of the frequencies of its wide heads rotate
        found["rope_freqs.weight"] = np.repeat(np.float32([1.0, 1e30]), [8, 24])
    for name, tensor in model.state_dict().items():
        found |= unpacked(name, tensor.detach().numpy(), kind)
    return found


def unpacked(name: str, array: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """Convert one tensor of transformers to those of llama.cpp's converter."""
    if kind == "minimax-m2":
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if kind == "llama4":
        name = name.replace(".feed_forward.", ".mlp.").replace(".mlp.router.", ".mlp.gate.")
        array = array.swapaxes(1, 2).copy() if ".experts." in name else array
    if kind == "exaone-moe":
        name = name.replace(".mlp.gate.e_score", ".mlp.e_score")
    if kind == "deepseek2" and name.endswith(".kv_b_proj.weight"):
        home, rows = name.removesuffix(".kv_b_proj.weight"), array.reshape(HEADS, -1, array.shape[1])
        keys, values = np.split(rows, [DEEPSEEK["qk_nope_head_dim"]], axis=1)
        return {f"{home}.embed_q.weight": keys.swapaxes(1, 2).copy(), f"{home}.unembed_out.weight": values.copy()}
    if kind in QWENS and ".experts." not in name:
        return _hybrid(name, array, kind)
    stem, _, part = name.rpartition(".experts.")
    if not stem or kind == "gemma4":
        return {name: array}
    if kind != "gpt-oss":
        home = f"{stem}.switch_mlp"
        if part == "down_proj":
            return {f"{home}.down_proj.weight": array}
        gate, up = np.split(array, 2, axis=1)
        return {f"{home}.gate_proj.weight": gate.copy(), f"{home}.up_proj.weight": up.copy()}
    module, end = part.removesuffix("_bias"), "bias" if part.endswith("_bias") else "weight"
    transposed = array if end == "bias" else array.swapaxes(1, 2)
    home = f"{stem}.experts"
    if module == "down_proj":
        return {f"{home}.down_proj.{end}": transposed.copy()}
    return {f"{home}.gate_proj.{end}": transposed[:, 0::2].copy(), f"{home}.up_proj.{end}": transposed[:, 1::2].copy()}


def _hybrid(name: str, array: np.ndarray, kind: str) -> dict[str, np.ndarray]:
    """Convert a tensor of a hybrid Qwen model."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: array + 1}
    if ".linear_attn." not in name or name.endswith("linear_attn.norm.weight"):
        return {name: array}
    shared = VALUE_HEADS // KEY_HEADS
    if name.endswith("in_proj_qkvz.weight"):
        each = array.reshape(KEY_HEADS, -1, HIDDEN)
        q, k, v, z = np.split(each, np.cumsum([WIDTH, WIDTH, shared * WIDTH]), axis=1)
        qkv = np.concatenate([part.reshape(-1, HIDDEN) for part in (q, k, v)])
        home = name.removesuffix("in_proj_qkvz.weight")
        return {f"{home}in_proj_qkv.weight": qkv, f"{home}in_proj_z.weight": z.reshape(-1, HIDDEN).copy()}
    if name.endswith("A_log"):
        array = -np.exp(array)
    if "conv1d" in name:
        array = array.squeeze()
    if kind != "qwen3next":
        axis = 1 if "out_proj" in name else 0
        first = 2 * KEY_HEADS * WIDTH if "in_proj_qkv" in name or "conv1d" in name else 0
        queries_keys, values = np.split(array, [first], axis=axis)
        # the value heads of a key head are adjacent; in the file they are strided by the number of key heads
        parts = values.reshape(*values.shape[:axis], KEY_HEADS, shared, -1, *values.shape[axis + 1 :])
        array = np.concatenate([queries_keys, parts.swapaxes(axis, axis + 1).reshape(values.shape)], axis)
    return {name: array}


HYBRID_METADATA: dict[str, Any] = {
    "attention.key_length": WIDTH,
    "attention.value_length": WIDTH,
    "rope.dimension_count": WIDTH // 2,
    "full_attention_interval": 2,
    "ssm.conv_kernel": 4,
    "ssm.state_size": WIDTH,
    "ssm.group_count": KEY_HEADS,
    "ssm.time_step_rank": VALUE_HEADS,
    "ssm.inner_size": VALUE_HEADS * WIDTH,
}
MOE_METADATA: dict[str, Any] = {
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_feed_forward_length": 64,
    "expert_shared_feed_forward_length": 96,
}
GEMMA4_METADATA: dict[str, Any] = {
    "attention.key_length": 64,
    "attention.value_length": 64,
    "attention.key_length_swa": WIDTH,
    "attention.value_length_swa": WIDTH,
    "attention.sliding_window": 16,
    "rope.freq_base": 1000000.0,
    "rope.freq_base_swa": 10000.0,
    "rope.dimension_count": 64,
    "rope.dimension_count_swa": WIDTH,
    "final_logit_softcapping": 30.0,
}
SMALL_GEMMA4_METADATA: dict[str, Any] = GEMMA4_METADATA | {
    "block_count": 4,
    "feed_forward_length": [INNER, INNER, 2 * INNER, 2 * INNER],
    "attention.shared_kv_layers": 2,
    "attention.sliding_window_pattern": [True, False] * 2,
    "embedding_length_per_layer_input": 64,
}
BIASED: dict[str, Any] = {
    "expert_count": 5,
    "expert_used_count": 2,
    "expert_shared_count": 2,
    "expert_feed_forward_length": 64,
    "expert_gating_func": 2,
    "expert_weights_scale": 1.5,
    "expert_weights_norm": True,
    "leading_dense_block_count": 1,
    "attention.key_length": WIDTH,
}
SECTIONS = {"rope.dimension_sections": [3, 3, 2, 0]}
METADATA: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3moe": {
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
        "attention.key_length": WIDTH,
    },
    "glm4moe": {
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 64,
        "expert_gating_func": 2,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "leading_dense_block_count": 1,
        "attention.key_length": WIDTH,
        "rope.dimension_count": WIDTH // 2,
    },
    # llama.cpp takes dots.llm1 to have as many KV heads as heads
    "dots1": BIASED | {"attention.head_count_kv": HEADS},
    "exaone-moe": BIASED
    | {
        "expert_shared_feed_forward_length": 128,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": [True, False],
    },
    "afmoe": BIASED | {"attention.sliding_window": 16},
    "deepseek2": {
        "attention.head_count_kv": 1,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.key_length": 96 + 16,
        "attention.value_length": 96,
        "attention.key_length_mla": WIDTH + 16,
        "attention.value_length_mla": 64,
        "attention.q_lora_rank": 64,
        "attention.kv_lora_rank": 96,
        "rope.dimension_count": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 16,
        "rope.scaling.yarn_log_multiplier": 0.1,
        "leading_dense_block_count": 1,
        "vocab_size": VOCAB,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_shared_count": 2,
        "expert_feed_forward_length": 64,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    },
    "llama4": {
        "block_count": 4,
        "expert_count": 5,
        "expert_used_count": 1,
        "expert_feed_forward_length": 64,
        "interleave_moe_layer_step": 2,
        "attention.key_length": WIDTH,
        "attention.value_length": WIDTH,
        "rope.dimension_count": WIDTH,
    },
    "minimax-m2": {
        "feed_forward_length": 64,
        "expert_gating_func": 2,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
        "attention.key_length": WIDTH,
        "rope.dimension_count": WIDTH // 2,
    },
    "gpt-oss": {
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 96,
        "attention.key_length": WIDTH,
        "attention.sliding_window": 16,
    },
    "gemma3": {
        "attention.key_length": WIDTH,
        "attention.sliding_window": 16,
        "attention.sliding_window_pattern": 2,
        "rope.freq_base": 1000000.0,
    },
    "qwen3next": HYBRID_METADATA | MOE_METADATA,
    "qwen35": HYBRID_METADATA | SECTIONS,
    "qwen35moe": HYBRID_METADATA | MOE_METADATA | SECTIONS,
    "gemma4": {
        **GEMMA4_METADATA,
        "attention.head_count_kv": [KV_HEADS, 1],
        "attention.shared_kv_layers": 0,
        "attention.sliding_window_pattern": [True, False],
        "embedding_length_per_layer_input": 0,
        "expert_count": 5,
        "expert_used_count": 2,
        "expert_feed_forward_length": 64,
    },
}
