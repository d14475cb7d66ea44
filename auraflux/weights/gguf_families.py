"""The architectures of GGUF files: what llama.cpp calls tensors and settings, and what Hugging Face does."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from auraflux.errors import FormatError
from auraflux.weights.gguf_order import Order, grouped, halves

Shape = tuple[int, ...]

ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
MLP = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
EXPERTS = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
}
# one beside every mixture and an MLP in the first layers
SHARED = {
    **MLP,
    **EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GLM4_MOE = {"post_attention_norm" if name == "ffn_norm" else name: module for name, module in SHARED.items()}
# newer files have the rows of kv_b_proj as mlx-lm keeps them: those for keys turned over, and those for values
LATENT = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.embed_q",
    "attn_v_b": "self_attn.unembed_out",
    "attn_output": "self_attn.o_proj",
}
MINIMAX_M2 = {name: module.replace("mlp.", "block_sparse_moe.", 1) for name, module in EXPERTS.items()}
# older files have qkv and z as Hugging Face does, in ssm_in
HYBRID = {
    **ATTENTION,
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
QWEN_SHARED = {
    **EXPERTS,
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
GPT_OSS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
GEMMA3 = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


class Words:
    """The metadata of one architecture, by keys without its name."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str):
        self._metadata, self._architecture = metadata, architecture

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._architecture}.{key}", default)
        # the file holds single precision; 1e-5 is meant where it says 9.999999747e-6
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise FormatError(f"the GGUF file has no {self._architecture}.{key}.")
        return value


class Architecture(NamedTuple):
    """One value of general.architecture.

    model_type  Hugging Face's name
    layer       names of modules within a layer
    vectors     whole names of tensors within a layer that are no module's weight or bias
    order       of the file, by name, config and shape of a tensor
    values      what undoes the converter's changes to numbers, by the ends of names; the first that fits
    shapes      the same of shapes that it made smaller
    more        config keys that only this one has
    beyond      what layers after the last are called, which predict further tokens; None where models know them as layers
    """

    model_type: str
    layer: dict[str, str]
    order: Callable[[str, dict[str, Any], Shape], Order] = lambda name, config, shape: Order()
    values: Mapping[str, Callable[[Tensor], Tensor]] = {}
    shapes: Mapping[str, Callable[[Shape], Shape]] = {}
    more: Callable[[Words], dict[str, Any]] = lambda words: {}
    vectors: Mapping[str, str] = {}
    beyond: str | None = None

    def restored(self, name: str, found: Tensor) -> Tensor:
        """The numbers of a dense tensor as Hugging Face has them."""
        return next((undo(found) for end, undo in self.values.items() if name.endswith(end)), found)

    def shape(self, name: str, found: Shape) -> Shape:
        """The shape of a tensor as Hugging Face has it."""
        return next((undo(found) for end, undo in self.shapes.items() if name.endswith(end)), found)


def _qwen3_moe(words: Words) -> dict[str, Any]:
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


def _glm4_moe(words: Words) -> dict[str, Any]:
    return {
        **_partial(words),
        **_shared(words),
        "n_shared_experts": words.get("expert_shared_count", 1),
        "norm_topk_prob": words.get("expert_weights_norm", True),
    }


def _deepseek2(words: Words) -> dict[str, Any]:
    if words.get("attention.temperature_scale"):
        raise FormatError("GGUF files of architecture 'deepseek2' whose queries grow with their positions are not supported.")
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


def _minimax_m2(words: Words) -> dict[str, Any]:
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


def _gpt_oss(words: Words) -> dict[str, Any]:
    layers = words["block_count"]
    return {
        "intermediate_size": words["expert_feed_forward_length"],
        "num_local_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
        "sliding_window": words["attention.sliding_window"],
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "swiglu_limit": 7.0,
    }


def _gemma3(words: Words) -> dict[str, Any]:
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


def _qwen3_next(words: Words) -> dict[str, Any]:
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


def _qwen3_next_moe(words: Words) -> dict[str, Any]:
    return {
        **_qwen3_moe(words),
        **_qwen3_next(words),
        "shared_expert_intermediate_size": words["expert_shared_feed_forward_length"],
    }


def _biased(home: str) -> dict[str, str]:
    """Where the bias in the choice of experts is."""
    return {"exp_probs_b.bias": f"{home}.e_score_correction_bias"}


def _less_one(weight: Tensor) -> Tensor:
    return weight - 1


SINKS = {"attn_sinks.weight": "self_attn.sinks"}
GEMMA_NORMS = {"norm.weight": _less_one}
DELTA: dict[str, Any] = {
    "vectors": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    "values": {
        "linear_attn.norm.weight": lambda weight: weight,
        "norm.weight": _less_one,
        # it has the -exp of it
        "A_log": lambda rate: (-rate).log(),
    },
    "shapes": {
        "conv1d.weight": lambda shape: (shape[0], 1, *shape[1:]),
        "shared_expert_gate.weight": lambda shape: (1, shape[-1]),
    },
}
ARCHITECTURES = {
    "llama": Architecture("llama", ATTENTION | MLP, order=halves),
    "qwen2": Architecture("qwen2", ATTENTION | MLP),
    "qwen3": Architecture("qwen3", ATTENTION | HEAD_NORMS | MLP),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | HEAD_NORMS | EXPERTS, more=_qwen3_moe),
    "gpt-oss": Architecture("gpt_oss", ATTENTION | GPT_OSS, more=_gpt_oss, vectors=SINKS),
    "glm4moe": Architecture("glm4_moe", ATTENTION | HEAD_NORMS | GLM4_MOE, more=_glm4_moe, vectors=_biased("mlp.gate")),
    "deepseek2": Architecture("deepseek_v3", LATENT | SHARED, more=_deepseek2, vectors=_biased("mlp.gate")),
    "minimax-m2": Architecture(
        "minimax_m2", ATTENTION | HEAD_NORMS | MINIMAX_M2, more=_minimax_m2, vectors=_biased("block_sparse_moe")
    ),
    "gemma3": Architecture("gemma3_text", ATTENTION | HEAD_NORMS | MLP | GEMMA3, values=GEMMA_NORMS, more=_gemma3),
    "qwen3next": Architecture("qwen3_next", QWEN_SHARED | HYBRID, more=_qwen3_next_moe, **DELTA),
    "qwen35": Architecture("qwen3_5_text", MLP | HYBRID, more=_qwen3_next, **DELTA, order=grouped, beyond="mtp"),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text", QWEN_SHARED | HYBRID, more=_qwen3_next_moe, **DELTA, order=grouped, beyond="mtp"
    ),
}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise FormatError(f"GGUF architecture {name!r} is not supported. Those that are: {', '.join(ARCHITECTURES)}.")
    if name == "llama" and metadata.get("llama.expert_count"):
        raise FormatError("GGUF files of architecture 'llama' with experts (Mixtral) are not supported.")
    return ARCHITECTURES[name]
