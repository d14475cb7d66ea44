"""What the metadata of each architecture of GGUF files mean, as keys of config.json."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auraflux.errors import FormatError

FREQUENCIES = "rope_freqs.weight"
STILL = 1e29  # a frequency divided by as much turns nothing


class Words:
    """The metadata of one architecture, by keys without its name.

    tensors      names of what the file has, in Hugging Face's words
    frequencies  by which each rotary frequency is divided; None where the file does not say
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        architecture: str,
        tensors: Collection[str] = (),
        frequencies: NDArray[np.float32] | None = None,
    ):
        self._metadata, self._architecture = metadata, architecture
        self.tensors, self.frequencies = tensors, frequencies

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        # the file holds single precision; 1e-5 is meant where it says 9.999999747e-6
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise FormatError(f"the GGUF file has no {self._architecture}.{key}.")
        return value

    def each(self, key: str) -> list[Any]:
        """What is said of every layer, or of each by itself."""
        found, count = self[key], self["block_count"]
        listed = found if isinstance(found, list) else [found] * count
        if len(listed) != count:
            raise FormatError(f"the GGUF file has {self._architecture}.{key} for {len(listed)} layers, and {count} layers.")
        return listed


def qwen3_moe(words: Words) -> dict[str, Any]:
    return {
        "moe_intermediate_size": words["expert_feed_forward_length"],
        "num_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _shared(words: Words) -> dict[str, Any]:
    """What is said of mixtures with an expert beside them, in all layers but the first."""
    further = words.get("nextn_predict_layers", 0)
    return {
        "num_hidden_layers": words["block_count"] - further,
        "num_nextn_predict_layers": further,
        "moe_intermediate_size": words["expert_feed_forward_length"],
        "n_routed_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
        "first_k_dense_replace": words.get("leading_dense_block_count", 0),
        "routed_scaling_factor": words.get("expert_weights_scale", 1.0),
    }


def glm4_moe(words: Words) -> dict[str, Any]:
    return {
        **_partial(words),
        **_shared(words),
        "n_shared_experts": words.get("expert_shared_count", 1),
        "norm_topk_prob": words.get("expert_weights_norm", True),
        "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in words.tensors,
    }


def deepseek2(words: Words) -> dict[str, Any]:
    if words.get("attention.temperature_scale"):
        raise FormatError(
            "GGUF files of architecture 'deepseek2' whose queries grow with their positions are not supported. "
            "Use the model's folder of safetensors."
        )
    heads, rope = words["attention.head_count"], words["rope.dimension_count"]
    # newer files give the widths of what is cached as key_length and value_length
    key = words.get("attention.key_length_mla") or words["attention.key_length"]
    if key <= rope:
        raise FormatError(f"the GGUF file rotates {rope} of {key} channels of a head; less than all is needed.")
    return {
        **_shared(words),
        "n_shared_experts": words.get("expert_shared_count", 0),
        # it is said only where it is so
        "norm_topk_prob": words.get("expert_weights_norm", False),
        # DeepSeek V2's files do not say it
        "scoring_func": _scoring(words, 1),
        "n_group": words.get("expert_group_count", 1),
        "topk_group": words.get("expert_group_used_count", 1),
        "num_key_value_heads": heads,
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": words.get("attention.value_length_mla") or words["attention.value_length"],
        "q_lora_rank": words.get("attention.q_lora_rank"),
        "kv_lora_rank": words["attention.kv_lora_rank"],
    }


def minimax_m2(words: Words) -> dict[str, Any]:
    return {
        **_partial(words),
        "intermediate_size": words["expert_feed_forward_length"],
        "num_local_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
    }


def _partial(words: Words) -> dict[str, Any]:
    """What is said of heads of which a part is rotated, and of scores."""
    width = words["attention.key_length"]
    return {
        "partial_rotary_factor": words.get("rope.dimension_count", width) / width,
        "scoring_func": _scoring(words, 2),
    }


def _scoring(words: Words, default: int) -> str:
    found = words.get("expert_gating_func", default)
    return {1: "softmax", 2: "sigmoid"}.get(found, str(found))


def gpt_oss(words: Words) -> dict[str, Any]:
    layers = words["block_count"]
    return {
        "intermediate_size": words["expert_feed_forward_length"],
        "num_local_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
        "sliding_window": words["attention.sliding_window"],
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "swiglu_limit": 7.0,
    }


def gemma3(words: Words) -> dict[str, Any]:
    layers, heads = words["block_count"], words["attention.head_count"]
    every = words.get("attention.sliding_window_pattern", 6)
    return {
        "sliding_window": words["attention.sliding_window"],
        "sliding_window_pattern": every,
        "rope_theta": words.get("rope.freq_base", 1000000.0),
        "rope_local_base_freq": words.get("rope.freq_base_swa", 10000.0),
        # the file does not say it: the 27B model, and no other, divides its hidden width by its heads
        "query_pre_attn_scalar": words["embedding_length"] // heads if layers == 62 else words.get("attention.key_length", 256),
        "head_dim": words.get("attention.key_length", 256),
        "final_logit_softcapping": words.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
    }


def qwen3_next(words: Words) -> dict[str, Any]:
    further, heads = words.get("nextn_predict_layers", 0), words["ssm.time_step_rank"]
    if heads % words["ssm.group_count"]:
        raise FormatError(f"the GGUF file has {heads} value heads, which {words['ssm.group_count']} key heads cannot share.")
    if words["ssm.inner_size"] % heads:
        raise FormatError(f"the GGUF file has values of {words['ssm.inner_size']} channels, which {heads} heads cannot share.")
    return {
        "num_hidden_layers": words["block_count"] - further,
        "partial_rotary_factor": words.get("rope.dimension_count", 64) / words["attention.key_length"],
        "full_attention_interval": words.get("full_attention_interval", 4),
        "linear_num_key_heads": words["ssm.group_count"],
        "linear_num_value_heads": heads,
        "linear_key_head_dim": words["ssm.state_size"],
        "linear_value_head_dim": words["ssm.inner_size"] // heads,
        "linear_conv_kernel_dim": words["ssm.conv_kernel"],
    }


def qwen3_next_moe(words: Words) -> dict[str, Any]:
    return {
        **qwen3_moe(words),
        **qwen3_next(words),
        "shared_expert_intermediate_size": words["expert_shared_feed_forward_length"],
    }


def gemma4(words: Words) -> dict[str, Any]:
    layers, shared = words["block_count"], words.get("attention.shared_kv_layers", 0)
    kinds = ["sliding_attention" if local else "full_attention" for local in words.each("attention.sliding_window_pattern")]
    widths = {"sliding_attention": words["attention.key_length_swa"], "full_attention": words["attention.key_length"]}
    heads, inners = words.each("attention.head_count_kv"), words.each("feed_forward_length")
    double = [inners[0] * (2 if index >= layers - shared else 1) for index in range(layers)]
    if inners != double and len(set(inners)) > 1:
        raise FormatError(
            "the GGUF file has MLPs of several widths; only layers that read keys of others may be twice as wide."
        )
    full = [index for index, kind in enumerate(kinds[: max(layers - shared, 0)]) if kind == "full_attention"]
    without = [index for index in full if f"model.layers.{index}.self_attn.v_proj.weight" not in words.tensors]
    experts = words.get("expert_count", 0)
    return {
        "layer_types": kinds,
        "intermediate_size": inners[0],
        "use_double_wide_mlp": len(set(inners)) > 1,
        "head_dim": widths["sliding_attention"],
        "global_head_dim": widths["full_attention"],
        "num_key_value_heads": heads[0],
        "per_layer_config": {
            str(index): {"num_key_value_heads": heads[index], "head_dim": widths[kind]} for index, kind in enumerate(kinds)
        },
        "attention_k_eq_v": bool(without),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": words.get("embedding_length_per_layer_input", 0),
        "sliding_window": words["attention.sliding_window"],
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": words.get("expert_used_count", 0),
        "moe_intermediate_size": words.get("expert_feed_forward_length"),
        "final_logit_softcapping": words.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": _proportional(words, widths),
    }


def _proportional(words: Words, widths: dict[str, int]) -> dict[str, Any]:
    """The rotations of both kinds of layers: in those that see everything, some frequencies are divided to nothing."""
    for end, width in zip(("_swa", ""), widths.values(), strict=True):
        if (turned := words.get(f"rope.dimension_count{end}", width)) != width:
            raise FormatError(f"the GGUF file rotates {turned} of {width} channels of a head; all is supported.")
    width, divided = widths["full_attention"], words.frequencies
    if divided is None:
        divided = np.ones(width // 2, np.float32)
    turned = int((divided == 1).sum())
    if divided.shape != (width // 2,) or not ((divided[:turned] == 1).all() and (divided[turned:] >= STILL).all()):
        raise FormatError(f"{FREQUENCIES} in the GGUF file is not what Gemma 4 divides its frequencies by.")
    whole = {"rope_type": "proportional", "partial_rotary_factor": turned / (width // 2)}
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": words.get("rope.freq_base_swa", 10000.0)},
        "full_attention": {**whole, "rope_theta": words.get("rope.freq_base", 1000000.0)},
    }
