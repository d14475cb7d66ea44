"""What the keys of a model's files may be. Families and tokenizers see only values that fit these tables.

The limits are far above what any model has, and low enough that nothing is built or computed from a value before the weights
themselves have confirmed it.
"""

from pathlib import Path
from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.boundary import FLAG, OBJECT, Kind, check, either, list_of, mapping_of, named, number, shown, text, whole

MOST_LAYERS = 1024
NAME = text(256)
COUNT, WIDTH, HEAD = whole(1, 1 << 16), whole(1, 1 << 20), whole(1, 1024)
TOKEN = whole(0, 1 << 31)
TOKENS = either(TOKEN, list_of(TOKEN, 1024))
POSITIONS, WINDOW = whole(1, 1 << 40), whole(1, 1 << 24)
FACTOR = number(1e-6, 1e6)
LAYERS = whole(0, MOST_LAYERS)

CONFIG: dict[str, Kind] = {
    "model_type": NAME,
    "text_config": OBJECT,
    "num_hidden_layers": whole(1, MOST_LAYERS),
    "layer_types": list_of(NAME, MOST_LAYERS),
    "vocab_size": whole(1, 1 << 24),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank"), WIDTH),
    "shared_expert_intermediate_size": whole(0, 1 << 20),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"), COUNT),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), HEAD),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), HEAD),
    "kv_lora_rank": whole(1, 4096),
    **dict.fromkeys(("index_n_heads", "index_topk_freq"), COUNT),
    "index_head_dim": HEAD,
    "index_topk": WINDOW,
    "index_skip_topk_offset": LAYERS,
    "o_groups": COUNT,
    "o_lora_rank": WIDTH,
    "hc_mult": whole(1, 64),
    "hc_sinkhorn_iters": whole(1, 1000),
    "hc_eps": number(0, 1),
    "compress_rope_theta": number(1, 1e12),
    "compress_rates": mapping_of(WINDOW, 16),
    "compress_ratios": list_of(whole(0, 1 << 24), MOST_LAYERS),
    **dict.fromkeys(("compress_rate_csa", "compress_rate_hca"), WINDOW),
    "num_hash_layers": LAYERS,
    **dict.fromkeys(("mamba_num_heads", "n_groups"), COUNT),
    **dict.fromkeys(("mamba_head_dim", "ssm_state_size", "attention_head_dim"), HEAD),
    "conv_kernel": whole(1, 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "moe_latent_size"), WIDTH),
    "layers_block_type": list_of(NAME, MOST_LAYERS),
    "hybrid_override_pattern": text(MOST_LAYERS),
    **dict.fromkeys(("use_conv_bias", "mlp_bias", "mamba_proj_bias"), FLAG),
    **dict.fromkeys(("mlp_hidden_act", "mamba_hidden_act"), NAME),
    "layer_norm_epsilon": number(0, 1),
    "time_step_limit": list_of(either(number(0, float("inf")), OBJECT), 2),
    "index_topk_pattern": either(text(MOST_LAYERS), list_of(NAME, MOST_LAYERS)),
    "indexer_types": list_of(NAME, MOST_LAYERS),
    "linear_conv_kernel_dim": whole(1, 64),
    "hc_count": whole(1, 64),
    "hc_lowrank": WIDTH,
    "ple_layer_ids": list_of(LAYERS, MOST_LAYERS),
    "ple_embed_dim": WIDTH,
    "ple_conv_kernel_size": whole(1, 64),
    "ngram_size": whole(2, 16),
    "heads_per_ngram": whole(1, 1024),
    "ngram_vocab_size_base": whole(1, 1 << 40),
    **dict.fromkeys(("indexer_n_heads", "indexer_kv_heads"), COUNT),
    "indexer_head_dim": HEAD,
    **dict.fromkeys(("indexer_budget", "indexer_compress_ratio"), WINDOW),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), whole(0, 1 << 16)),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), whole(0, 256)),
    **dict.fromkeys(("num_experts_per_token", "num_expert_group"), COUNT),
    **dict.fromkeys(("moe_renormalize", "mla_use_nope"), FLAG),
    "moe_router_activation_func": NAME,
    "linear_head_dim": HEAD,
    "linear_num_heads": COUNT,
    "linear_attn_config": OBJECT,
    "model_max_length": POSITIONS,
    "num_experts_per_tok": whole(0, 1 << 16),
    **dict.fromkeys(("n_group", "topk_group"), COUNT),
    **dict.fromkeys(("decoder_sparse_step", "full_attention_interval", "moe_layer_freq"), whole(1, MOST_LAYERS)),
    "sliding_window_pattern": whole(1, MOST_LAYERS),
    **dict.fromkeys(("first_k_dense_replace", "num_nextn_predict_layers"), LAYERS),
    "mlp_only_layers": list_of(LAYERS, MOST_LAYERS),
    "max_position_embeddings": POSITIONS,
    "sliding_window": whole(0, 1 << 24),
    **dict.fromkeys(("max_window_layers", "rotary_dim"), whole(0, 1 << 16)),
    "shared_intermediate_size": whole(0, 1 << 20),
    "mlp_layer_types": list_of(NAME, MOST_LAYERS),
    "clip_qkv": FACTOR,
    "global_head_dim": HEAD,
    "num_global_key_value_heads": COUNT,
    "vocab_size_per_layer_input": whole(1, 1 << 24),
    "hidden_size_per_layer_input": whole(0, 1 << 20),
    "num_kv_shared_layers": LAYERS,
    **dict.fromkeys(("top_k_experts", "moe_k", "moe_num_experts"), whole(0, 1 << 16)),
    "moe_num_shared_experts": whole(0, 256),
    **dict.fromkeys(("moe_layer_start_index", "moe_layer_interval"), LAYERS),
    "moe_layer_end_index": either(whole(-1, -1), LAYERS),
    "use_bias": FLAG,
    **dict.fromkeys(("moe_gate_act", "output_gate_type"), NAME),
    "per_layer_config": mapping_of(OBJECT, MOST_LAYERS),
    **dict.fromkeys(("attention_k_eq_v", "enable_moe_block", "use_double_wide_mlp"), FLAG),
    "use_qk_norm": FLAG,
    "rms_norm_eps": number(0, 1),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), number(1, 1e12)),
    "partial_rotary_factor": number(0, 1),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"), FACTOR),
    **dict.fromkeys(("routed_scaling_factor", "swiglu_alpha", "swiglu_limit"), FACTOR),
    **dict.fromkeys(("attention_bias", "attn_output_gate", "norm_topk_prob", "rope_interleave", "tie_word_embeddings"), FLAG),
    "use_sliding_window": FLAG,
    "use_bidirectional_attention": either(FLAG, NAME),
    **dict.fromkeys(("hidden_act", "hidden_activation", "scoring_func", "topk_method"), NAME),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization"), OBJECT),
    **dict.fromkeys(("quantization_config", "compression_config"), OBJECT),
    "eos_token_id": TOKENS,
}
# how many of them a token goes to, and how many there are
EXPERTS = {
    "num_experts_per_tok": ("num_experts", "num_local_experts", "n_routed_experts"),
    "num_experts_per_token": ("num_experts",),
    "moe_k": ("moe_num_experts",),
    "top_k_experts": ("num_experts",),
}
NUMBERED = list_of(LAYERS, MOST_LAYERS)
LINEAR_ATTENTION: dict[str, Kind] = {
    "head_dim": HEAD,
    "num_heads": COUNT,
    "short_conv_kernel_size": whole(1, 64),
    **dict.fromkeys(("full_attn_layers", "kda_layers"), NUMBERED),
}
LAYER: dict[str, Kind] = {"head_dim": HEAD, "num_key_value_heads": COUNT}
ROPE: dict[str, Kind] = {
    **dict.fromkeys(("rope_type", "type"), NAME),
    "rope_theta": number(1, 1e12),
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor", "attention_factor"), FACTOR),
    **dict.fromkeys(("beta_fast", "beta_slow"), FACTOR),
    **dict.fromkeys(("mscale", "mscale_all_dim"), number(0, 1e6)),
    "llama_4_scaling_beta": number(0, 1e6),
    "original_max_position_embeddings": POSITIONS,
    "partial_rotary_factor": number(0, 1),
    "truncate": FLAG,
}
QUANTIZATION: dict[str, Kind] = {"bits": whole(2, 8), "group_size": whole(1, 1024), "mode": NAME}
SPAN = either(whole(-1, -1), WIDTH)
# of quantization_config, whatever its method
METHOD: dict[str, Kind] = {
    **dict.fromkeys(("quant_method", "version", "format", "checkpoint_format"), NAME),
    **dict.fromkeys(("bits", "w_bit"), whole(1, 64)),
    **dict.fromkeys(("group_size", "q_group_size"), SPAN),
    **dict.fromkeys(("sym", "zero_point", "desc_act"), FLAG),
    "dynamic": either(OBJECT, FLAG),
    "weight_block_size": list_of(WIDTH, 2),
    **dict.fromkeys(("fmt", "expert_dtype", "quant_algo", "kv_cache_quant_algo"), NAME),
    "config_groups": mapping_of(OBJECT, 1024),
}
CONFIG_GROUP: dict[str, Kind] = {"weights": OBJECT, "input_activations": OBJECT, "format": NAME}
GROUP_WEIGHTS: dict[str, Kind] = {
    "num_bits": whole(1, 64),
    "group_size": SPAN,
    "symmetric": FLAG,
    "block_structure": list_of(WIDTH, 2),
    **dict.fromkeys(("type", "strategy"), NAME),
}
GENERATION: dict[str, Kind] = {"eos_token_id": TOKENS}
TOKENIZER: dict[str, Kind] = {
    **dict.fromkeys(("add_bos_token", "add_eos_token"), FLAG),
    "added_tokens_decoder": OBJECT,
    "chat_template": either(text(1 << 22), list_of(OBJECT, 64), mapping_of(text(1 << 22), 64)),
}
ADDED_TOKEN: dict[str, Kind] = {
    "content": text(1 << 12),
    **dict.fromkeys(("special", "lstrip", "rstrip", "single_word", "normalized"), FLAG),
}
INDEX: dict[str, Kind] = {"weight_map": OBJECT}
# of a GGUF file, without the name of its architecture
GGUF: dict[str, Kind] = {
    "block_count": whole(1, MOST_LAYERS),
    **dict.fromkeys(("embedding_length", "feed_forward_length", "expert_feed_forward_length"), WIDTH),
    **dict.fromkeys(("attention.head_count", "attention.head_count_kv", "expert_count", "expert_used_count"), COUNT),
    **dict.fromkeys(("attention.key_length", "rope.dimension_count"), HEAD),
    **{f"attention.{key}": HEAD for key in ("value_length", "key_length_mla", "value_length_mla")},
    "attention.q_lora_rank": WIDTH,
    "attention.kv_lora_rank": whole(1, 4096),
    "attention.temperature_scale": number(0, 1e6),
    **dict.fromkeys(("expert_group_count", "expert_group_used_count"), COUNT),
    "rope.scaling.yarn_log_multiplier": number(0, 1e5),
    **dict.fromkeys(("attention.key_length_swa", "rope.dimension_count_swa"), HEAD),
    "attention.shared_kv_layers": LAYERS,
    "embedding_length_per_layer_input": whole(0, 1 << 20),
    "expert_shared_feed_forward_length": whole(0, 1 << 20),
    "full_attention_interval": whole(1, MOST_LAYERS),
    "ssm.conv_kernel": whole(1, 64),
    "ssm.state_size": HEAD,
    **dict.fromkeys(("ssm.group_count", "ssm.time_step_rank"), COUNT),
    "ssm.inner_size": WIDTH,
    "attention.layer_norm_rms_epsilon": number(0, 1),
    **dict.fromkeys(("nextn_predict_layers", "leading_dense_block_count"), LAYERS),
    **dict.fromkeys(("expert_shared_count", "expert_gating_func"), whole(0, 256)),
    "expert_weights_scale": FACTOR,
    "expert_weights_norm": FLAG,
    **dict.fromkeys(("rope.freq_base", "rope.freq_base_swa"), number(1, 1e12)),
    "attention.sliding_window_pattern": whole(1, MOST_LAYERS),
    "final_logit_softcapping": FACTOR,
    **dict.fromkeys(("context_length", "rope.scaling.original_context_length"), POSITIONS),
    "attention.sliding_window": WINDOW,
    "rope.scaling.type": NAME,
    **dict.fromkeys(("rope.scaling.factor", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"), FACTOR),
}
# what an architecture may say of each layer by itself
GGUF_LISTS: dict[str, dict[str, Kind]] = {
    "gemma4": {
        "feed_forward_length": either(WIDTH, list_of(WIDTH, MOST_LAYERS)),
        "attention.head_count_kv": either(COUNT, list_of(COUNT, MOST_LAYERS)),
        "attention.sliding_window_pattern": list_of(FLAG, MOST_LAYERS),
    }
}
GGUF_TEXT: dict[str, Kind] = {
    "general.architecture": NAME,
    **dict.fromkeys(("tokenizer.ggml.model", "tokenizer.ggml.pre"), NAME),
    **dict.fromkeys(("tokenizer.ggml.tokens", "tokenizer.ggml.merges"), list_of(text(1 << 16), 1 << 24)),
    "tokenizer.ggml.token_type": list_of(whole(0, 255), 1 << 24),
    "tokenizer.ggml.scores": list_of(number(-3.5e38, 3.5e38), 1 << 24),
    **{f"tokenizer.ggml.{key}_token_id": TOKEN for key in ("bos", "eos", "unknown", "padding", "eot", "eom")},
    **{f"tokenizer.ggml.{key}": FLAG for key in ("add_bos_token", "add_eos_token", "add_space_prefix")},
    "tokenizer.chat_template": text(1 << 22),
}


def check_config(where: str | Path, config: dict[str, Any]) -> None:
    """Refuse a config.json, or what stands for one, of which a value is not of its kind."""
    inner = config.get("text_config")
    for part in (config, inner) if isinstance(inner, dict) else (config,):
        check(where, part, CONFIG)
        for layer, own in (part.get("per_layer_config") or {}).items():
            check(f"{where}: layer {layer}", own, LAYER)
        check(f"{where}: linear_attn_config", part.get("linear_attn_config") or {}, LINEAR_ATTENTION)
        for key in ("rope_scaling", "rope_parameters"):
            _check_rope(where, part.get(key) or {})
        for key in ("quantization_config", "compression_config"):
            check_method(where, part.get(key) or {})
    _check_quantization(where, config.get("quantization") or {})
    _check_counts(where, {**config, **(inner or {})})


def _check_rope(where: str | Path, found: dict[str, Any]) -> None:
    check(where, found, ROPE)
    # one for each type of layer
    for each in found.values():
        if isinstance(each, dict):
            check(where, each, ROPE)


def check_method(where: str | Path, found: dict[str, Any]) -> None:
    """Refuse a quantization_config of which a value is not of its kind."""
    check(where, found, METHOD)
    for name, group in (found.get("config_groups") or {}).items():
        check(f"{where}: {name}", group, CONFIG_GROUP)
        check(f"{where}: {name}", group.get("weights") or {}, GROUP_WEIGHTS)


def check_beside(where: str | Path, found: dict[str, Any]) -> dict[str, Any]:
    """What hf_quant_config.json says of the weights, refused where a value is not of its kind."""
    check(where, found, {"quantization": OBJECT}, ["quantization"])
    check_method(where, found["quantization"])
    return found["quantization"]


def _check_quantization(where: str | Path, found: dict[str, Any]) -> None:
    check(where, found, QUANTIZATION)
    # of some modules, another format is said under their names
    for module, own in found.items():
        if isinstance(own, dict):
            check(f"{where}: {module}", own, QUANTIZATION)


def _check_counts(where: str | Path, found: dict[str, Any]) -> None:
    """Refuse numbers that do not go with each other."""
    heads, kv_heads = found.get("num_attention_heads"), found.get("num_key_value_heads")
    if heads and kv_heads and heads % kv_heads and not found.get("kv_lora_rank"):
        raise FormatError(f"{named(where)} has {heads} num_attention_heads, which {kv_heads} num_key_value_heads cannot share.")
    for choice, counts in EXPERTS.items():
        chosen = found.get(choice)
        for key in counts:
            if chosen and found.get(key) and chosen > found[key]:
                raise FormatError(f"{named(where)} has {choice} = {chosen}, more than {key} = {found[key]}.")


def check_added_tokens(where: str | Path, listed: dict[str, Any]) -> None:
    """Refuse tokens of tokenizer_config.json that have no number or no content."""
    check(f"{where}: added_tokens_decoder", listed, dict.fromkeys(listed, OBJECT), tuple(listed))
    for key, about in listed.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise FormatError(f"{named(where)} has a token under {shown(key)} in added_tokens_decoder; a number is needed.")
        check(f"{where}: token {key}", about, ADDED_TOKEN, ("content",))


def check_index(where: Path, found: dict[str, Any]) -> dict[str, str]:
    """Give the file of each tensor; only files beside the index may be named."""
    check(where, found, INDEX, ("weight_map",))
    check(f"{where}: weight_map", found["weight_map"], dict.fromkeys(found["weight_map"], NAME), tuple(found["weight_map"]))
    for name in set(found["weight_map"].values()):
        if name in ("", ".", "..") or "/" in name or "\\" in name or "\0" in name:
            raise FormatError(f"{named(where)} names {shown(name)}; the name of a file beside it is needed.")
    return found["weight_map"]


def check_gguf(where: Path, metadata: dict[str, Any]) -> None:
    """Refuse metadata of a GGUF file of which a value is not of its kind."""
    check(where, metadata, GGUF_TEXT, ("general.architecture",))
    architecture = metadata["general.architecture"]
    kinds = GGUF | GGUF_LISTS.get(architecture, {})
    check(where, metadata, {f"{architecture}.{key}": kind for key, kind in kinds.items()})
    check(where, metadata, {key: text(1 << 22) for key in metadata if key.startswith("tokenizer.chat_template")})
