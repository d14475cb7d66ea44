"""Tiny random transformers models, one per tested family."""

import torch
import transformers as hf


def tiny(kind: str):
    """Build a tiny random model of a family, with odd numbers of experts."""
    shared = {
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 256,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    turning = {"rope_type": "default", "rope_theta": 1000.0}
    torch.manual_seed(0)
    if kind == "qwen3_moe":
        experts = {"moe_intermediate_size": 64, "num_experts": 5, "num_experts_per_tok": 2, "norm_topk_prob": True}
        config = hf.Qwen3MoeConfig(**shared, **experts, intermediate_size=192, head_dim=32, mlp_only_layers=[1])
        return hf.Qwen3MoeForCausalLM(config)
    if kind == "gpt_oss":
        # mlx-lm truncates the YaRN correction range, which this family does not
        options = {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 16, "rope_parameters": turning}
        return hf.GptOssForCausalLM(hf.GptOssConfig(**shared, **options, intermediate_size=96, head_dim=32))
    if kind.startswith("qwen3_"):
        experts = {
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "num_experts": 5,
            "num_experts_per_tok": 2,
        }
        delta = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        options = shared | delta | {"head_dim": 32, "num_hidden_layers": 4}
        if kind == "qwen3_next":
            return hf.Qwen3NextForCausalLM(hf.Qwen3NextConfig(**options, **experts))
        if kind == "qwen3_5":
            return hf.Qwen3_5ForCausalLM(hf.Qwen3_5TextConfig(**options, intermediate_size=192))
        return hf.Qwen3_5MoeForCausalLM(hf.Qwen3_5MoeTextConfig(**options, **experts))
    if kind == "gemma3_text":
        options = {"sliding_window": 16, "query_pre_attn_scalar": 32, "intermediate_size": 192, "head_dim": 32}
        return hf.Gemma3ForCausalLM(hf.Gemma3TextConfig(**shared | {"num_hidden_layers": 7}, **options))
    latent = {"kv_lora_rank": 64, "q_lora_rank": 96, "qk_rope_head_dim": 32, "v_head_dim": 64, "qk_nope_head_dim": 64}
    experts = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    options = {"intermediate_size": 192, "first_k_dense_replace": 1}
    if kind == "deepseek_v3":
        options |= {"num_key_value_heads": 4, "n_group": 4, "topk_group": 2}
        return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**shared | options, **latent, **experts))
    if kind == "mistral4":
        rope = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "original_max_position_embeddings": 32}
        rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
        options |= {"num_key_value_heads": 4, "rope_parameters": rope}
        return hf.Mistral4ForCausalLM(hf.Mistral4Config(**shared | options, **latent, **experts))
    if kind == "glm4_moe":
        return hf.Glm4MoeForCausalLM(hf.Glm4MoeConfig(**shared, **options, **experts, head_dim=32, num_mtp_layers=0))
    return _later(kind, shared)


def _later(kind: str, shared: dict):
    if kind == "minimax_m2":
        options = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 32}
        rope = {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.5}
        return hf.MiniMaxM2ForCausalLM(hf.MiniMaxM2Config(**shared, **options, rope_parameters=rope))
    if kind == "mixtral":
        options = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 64}
        return hf.MixtralForCausalLM(hf.MixtralConfig(**shared, **options))
    if kind == "ernie4_5_moe":
        options = {"moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 64, "intermediate_size": 192}
        return hf.Ernie4_5_MoeForCausalLM(hf.Ernie4_5_MoeConfig(**shared, **options))
    assert kind == "gemma4_text"
    experts = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 64}
    sizes = {"head_dim": 32, "global_head_dim": 64, "intermediate_size": 192, "sliding_window": 16}
    fed = {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 1}
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    return hf.Gemma4ForCausalLM(hf.Gemma4TextConfig(**shared, **experts, **sizes, **fed, layer_types=kinds))
