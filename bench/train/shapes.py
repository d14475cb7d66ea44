"""The four architectures: config.json in the format of transformers, initial parameters, and checkpoint layouts.

Parameters have checkpoint names, except experts: `gate`, `up` [E, I, D] and `down` [E, D, I] stack all experts of a layer.
"""

import math
from typing import Any

import torch
from torch import Tensor

WIDTH, INNER, EXPERTS, CONTEXT, VOCABULARY = 256, 128, 16, 8192, 4096
SLIDING, FULL, DELTA = "sliding_attention", "full_attention", "linear_attention"
Config = dict[str, Any]
Parameters = dict[str, Tensor]

COMMON: Config = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_experts_per_tok": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.02,
    "attention_dropout": 0.0,
    "use_cache": True,
    "dtype": "bfloat16",
}
HEADS: Config = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
CONFIGS: dict[str, Config] = {
    "qwen3_moe": {
        **COMMON,
        **HEADS,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_hidden_layers": 6,
        "intermediate_size": 512,
        "moe_intermediate_size": INNER,
        "num_experts": EXPERTS,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": False,
    },
    "qwen3_5_moe": {
        **COMMON,
        **HEADS,
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "model_type": "qwen3_5_moe_text",
        "num_hidden_layers": 8,
        "layer_types": [DELTA, DELTA, DELTA, FULL] * 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts": EXPERTS,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        "attention_bias": False,
    },
    "gpt_oss": {
        **COMMON,
        **HEADS,
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "num_hidden_layers": 6,
        "layer_types": [SLIDING, FULL] * 3,
        "sliding_window": 128,
        "intermediate_size": INNER,
        "num_local_experts": EXPERTS,
        "swiglu_limit": 7.0,
        "attention_bias": True,
    },
    "deepseek_v3": {
        **COMMON,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "v_head_dim": 64,
        "intermediate_size": 512,
        "moe_intermediate_size": INNER,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "rope_interleave": True,
        "attention_bias": False,
    },
}


def init_parameters(config: Config, seed: int) -> Parameters:
    """Initialise parameters: matrices scaled by input width, smaller for outputs to the residual stream."""
    made = {"model.embed_tokens.weight": (config["vocab_size"], WIDTH), "model.norm.weight": (WIDTH,)}
    for index in range(config["num_hidden_layers"]):
        layer = _mixer(config, index) | _feed_forward(config, index)
        layer |= {"input_layernorm.weight": (WIDTH,), "post_attention_layernorm.weight": (WIDTH,)}
        made |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    torch.manual_seed(seed)
    depth = (2 * config["num_hidden_layers"]) ** -0.5
    return {name: _init(config, name, shape, depth) for name, shape in made.items()}


def _init(config: Config, name: str, shape: tuple[int, ...], depth: float) -> Tensor:
    if name.endswith("A_log"):
        # decay spans one to about a thousand tokens
        return torch.linspace(math.log(0.02), math.log(8), shape[0])
    if name.endswith("dt_bias"):
        return torch.full(shape, math.log(math.expm1(0.1)))
    if name.endswith("norm.weight"):
        # the weight is (1 + w), except in the norm of the delta layer
        centred = config["model_type"] == "qwen3_5_moe_text" and not name.endswith("linear_attn.norm.weight")
        return torch.zeros(shape) if centred else torch.ones(shape)
    if len(shape) == 1 or "bias" in name:
        return torch.zeros(shape)
    if "embed_tokens" in name:
        return 0.03 * torch.randn(shape)
    if "conv1d" in name:
        return 0.3 * torch.randn(shape)
    spread = 0.7 * shape[-1] ** -0.5
    writes = name.endswith((".down", "down_proj.weight", "o_proj.weight", "out_proj.weight"))
    return spread * (0.5 * depth if writes else 1) * torch.randn(shape)


def _mixer(config: Config, index: int) -> dict[str, tuple[int, ...]]:
    heads = config["num_attention_heads"]
    if config["model_type"] == "deepseek_v3":
        rank, latent = config["q_lora_rank"], config["kv_lora_rank"]
        nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
        made: dict[str, tuple[int, ...]] = {
            "q_a_proj.weight": (rank, WIDTH),
            "q_a_layernorm.weight": (rank,),
            "q_b_proj.weight": (heads * (nope + rope), rank),
            "kv_a_proj_with_mqa.weight": (latent + rope, WIDTH),
            "kv_a_layernorm.weight": (latent,),
            "kv_b_proj.weight": (heads * (nope + value), latent),
            "o_proj.weight": (WIDTH, heads * value),
        }
        return {f"self_attn.{name}": shape for name, shape in made.items()}
    if config.get("layer_types", [FULL] * 99)[index] == DELTA:
        return _delta(config)
    width, gated = config["head_dim"], config["model_type"] == "qwen3_5_moe_text"
    queries, keys = heads * width, config["num_key_value_heads"] * width
    rows = {"q_proj": queries * (2 if gated else 1), "k_proj": keys, "v_proj": keys}
    made = {f"{name}.weight": (count, WIDTH) for name, count in rows.items()} | {"o_proj.weight": (WIDTH, queries)}
    if config["model_type"] == "gpt_oss":
        made |= {f"{name}.bias": (count,) for name, count in (rows | {"o_proj": WIDTH}).items()} | {"sinks": (heads,)}
    else:
        made |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    return {f"self_attn.{name}": shape for name, shape in made.items()}


def _delta(config: Config) -> dict[str, tuple[int, ...]]:
    heads = config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values = heads * config["linear_value_head_dim"]
    made: dict[str, tuple[int, ...]] = {
        "in_proj_qkv.weight": (2 * keys + values, WIDTH),
        "in_proj_z.weight": (values, WIDTH),
        "in_proj_b.weight": (heads, WIDTH),
        "in_proj_a.weight": (heads, WIDTH),
        "conv1d.weight": (2 * keys + values, 1, config["linear_conv_kernel_dim"]),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (config["linear_value_head_dim"],),
        "out_proj.weight": (WIDTH, values),
    }
    return {f"linear_attn.{name}": shape for name, shape in made.items()}


def _feed_forward(config: Config, index: int) -> dict[str, tuple[int, ...]]:
    kind, inner = config["model_type"], config.get("moe_intermediate_size", config.get("intermediate_size"))
    if index < config.get("first_k_dense_replace", 0):
        return _mlp("mlp", config["intermediate_size"])
    stacks: dict[str, tuple[int, ...]] = {
        "mlp.experts.gate": (EXPERTS, inner, WIDTH),
        "mlp.experts.up": (EXPERTS, inner, WIDTH),
        "mlp.experts.down": (EXPERTS, WIDTH, inner),
    }
    if kind == "gpt_oss":
        biases = {"gate_bias": inner, "up_bias": inner, "down_bias": WIDTH}
        stacks |= {f"mlp.experts.{name}": (EXPERTS, width) for name, width in biases.items()}
        return stacks | {"mlp.router.weight": (EXPERTS, WIDTH), "mlp.router.bias": (EXPERTS,)}
    stacks["mlp.gate.weight"] = (EXPERTS, WIDTH)
    if kind == "deepseek_v3":
        return stacks | _mlp("mlp.shared_experts", inner) | {"mlp.gate.e_score_correction_bias": (EXPERTS,)}
    if kind == "qwen3_5_moe_text":
        shared = config["shared_expert_intermediate_size"]
        return stacks | _mlp("mlp.shared_expert", shared) | {"mlp.shared_expert_gate.weight": (1, WIDTH)}
    return stacks


def _mlp(name: str, inner: int) -> dict[str, tuple[int, ...]]:
    rows = {"gate_proj": (inner, WIDTH), "up_proj": (inner, WIDTH), "down_proj": (WIDTH, inner)}
    return {f"{name}.{part}.weight": shape for part, shape in rows.items()}


def checkpoint(config: Config, parameters: Parameters) -> Parameters:
    """Convert parameters to the names and layouts of the family's checkpoints."""
    made = {name: value for name, value in parameters.items() if ".experts." not in name}
    for index in range(config["num_hidden_layers"]):
        name = f"model.layers.{index}.mlp.experts"
        if f"{name}.gate" not in parameters:
            continue
        gate, up, down = (parameters[f"{name}.{part}"] for part in ("gate", "up", "down"))
        if config["model_type"] == "gpt_oss":
            # gate and up are interleaved, [E, inputs, outputs]
            made[f"{name}.gate_up_proj"] = torch.stack([gate, up], 2).flatten(1, 2).transpose(1, 2)
            made[f"{name}.down_proj"] = down.transpose(1, 2)
            biases = [parameters[f"{name}.{part}_bias"] for part in ("gate", "up")]
            made[f"{name}.gate_up_proj_bias"] = torch.stack(biases, 2).flatten(1)
            made[f"{name}.down_proj_bias"] = parameters[f"{name}.down_bias"]
        elif config["model_type"] == "qwen3_5_moe_text":
            made[f"{name}.gate_up_proj"], made[f"{name}.down_proj"] = torch.cat([gate, up], 1), down
        else:
            for part, stack in (("gate", gate), ("up", up), ("down", down)):
                made |= {f"{name}.{expert}.{part}_proj.weight": each for expert, each in enumerate(stack)}
    return {name: value.detach().contiguous() for name, value in made.items()}
