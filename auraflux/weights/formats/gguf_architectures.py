"""GGUF architectures: llama.cpp's tensor names and settings mapped to Hugging Face's."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from auraflux.errors import FormatError
from auraflux.weights.fields import COUNT, NAME, fields_of
from auraflux.weights.formats.gguf_config import (
    GGUFMetadata,
    afmoe,
    deepseek2,
    dots1,
    exaone_moe,
    gemma3,
    gemma4,
    gemma_embedding,
    glm4_moe,
    gpt_oss,
    llama4,
    minimax_m2,
    qwen3_moe,
    qwen3_next,
    qwen3_next_moe,
)
from auraflux.weights.formats.gguf_tensor_order import Order, grouped_value_heads, rope_half_rows

Shape = tuple[int, ...]
INSTEAD = "Use the model's safetensors folder, which supports more families."

ENDS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
    # numbered by sentence-transformers' folders, after 1_Pooling
    "dense_2": "dense.0",
    "dense_3": "dense.1",
}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _renamed_norm(names: dict[str, str]) -> dict[str, str]:
    """Rename ffn_norm to post_attention_norm, as some architectures call it."""
    return {"post_attention_norm" if name == "ffn_norm" else name: module for name, module in names.items()}


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
# a shared expert in every MoE layer, and dense MLPs in the first layers
SHARED = {
    **MLP,
    **EXPERTS,
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
GLM4_MOE = _renamed_norm(SHARED)
LLAMA4 = {name: module.replace("shared_experts", "shared_expert") for name, module in SHARED.items()}
AFMOE = {
    **SHARED,
    "attn_gate": "self_attn.gate_proj",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_mlp_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
    "ffn_gate_inp": "mlp.router.gate",
}
# newer files split kv_b_proj as mlx-lm does: a transposed stack for keys and one for values
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
# older files fuse qkv and z in ssm_in, as Hugging Face does
HYBRID = {
    **ATTENTION,
    **HEAD_NORMS,
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
    **_renamed_norm(EXPERTS),
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
GEMMA4 = {
    **GEMMA3,
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
GEMMA4_VECTORS = {
    "ffn_gate_inp.scale": "router.scale",
    "ffn_gate_up_exps.weight": "experts.gate_up_proj",
    "ffn_down_exps.weight": "experts.down_proj",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "layer_output_scale.weight": "layer_scalar",
}


class Architecture(NamedTuple):
    """Mapping of one value of general.architecture.

    model_type    Hugging Face's name
    layer         names of modules within a layer
    vectors       full names of tensors within a layer that are not a module's weight or bias
    order         row and column order in the file, by name, config and shape of a tensor
    values        inverse of the converter's changes to values, by suffix of the name; the first match wins
    shapes        inverse of the converter's squeezed shapes, by suffix of the name
    extra_config  config keys specific to this architecture
    mtp_prefix    prefix for layers past the last, an MTP head; None if the model numbers them as layers
    """

    model_type: str
    layer: dict[str, str]
    order: Callable[[str, dict[str, Any], Shape], Order] = lambda name, config, shape: Order()
    values: Mapping[str, Callable[[Tensor], Tensor]] = {}
    shapes: Mapping[str, Callable[[Shape], Shape]] = {}
    extra_config: Callable[[GGUFMetadata], dict[str, Any]] = lambda meta: {}
    vectors: Mapping[str, str] = {}
    mtp_prefix: str | None = None

    def restore_values(self, name: str, found: Tensor) -> Tensor:
        """Undo the converter's changes to the values of a dense tensor."""
        return next((undo(found) for end, undo in self.values.items() if name.endswith(end)), found)

    def shape(self, name: str, found: Shape) -> Shape:
        """Return Hugging Face's shape of a tensor."""
        return next((undo(found) for end, undo in self.shapes.items() if name.endswith(end)), found)


def _score_bias(home: str) -> dict[str, str]:
    """Map the router's score correction bias to a module."""
    return {"exp_probs_b.bias": f"{home}.e_score_correction_bias"}


def _minus_one(weight: Tensor) -> Tensor:
    return weight - 1


SINKS = {"attn_sinks.weight": "self_attn.sinks"}
GEMMA_NORMS = {"norm.weight": _minus_one}
DELTA: dict[str, Any] = {
    "vectors": {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"},
    "values": {
        "linear_attn.norm.weight": lambda weight: weight,
        **dict.fromkeys(("norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"), _minus_one),
        # the file stores -exp(A_log)
        "A_log": lambda rate: (-rate).log(),
    },
    "shapes": {
        "conv1d.weight": lambda shape: (shape[0], 1, *shape[1:]),
        "shared_expert_gate.weight": lambda shape: (1, shape[-1]),
    },
}
ARCHITECTURES = {
    "llama": Architecture("llama", ATTENTION | MLP, order=rope_half_rows),
    "llama4": Architecture("llama4_text", ATTENTION | LLAMA4, extra_config=llama4),
    "qwen2": Architecture("qwen2", ATTENTION | MLP),
    "qwen3": Architecture("qwen3", ATTENTION | HEAD_NORMS | MLP),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | HEAD_NORMS | EXPERTS, extra_config=qwen3_moe),
    "gpt-oss": Architecture("gpt_oss", ATTENTION | GPT_OSS, extra_config=gpt_oss, vectors=SINKS),
    "glm4moe": Architecture(
        "glm4_moe", ATTENTION | HEAD_NORMS | GLM4_MOE, extra_config=glm4_moe, vectors=_score_bias("mlp.gate")
    ),
    "dots1": Architecture("dots1", ATTENTION | HEAD_NORMS | SHARED, extra_config=dots1, vectors=_score_bias("mlp.gate")),
    "exaone-moe": Architecture(
        "exaone_moe", ATTENTION | HEAD_NORMS | SHARED, extra_config=exaone_moe, vectors=_score_bias("mlp")
    ),
    "afmoe": Architecture(
        "afmoe", ATTENTION | HEAD_NORMS | AFMOE, extra_config=afmoe, vectors={"exp_probs_b.bias": "mlp.expert_bias"}
    ),
    "deepseek2": Architecture("deepseek_v3", LATENT | SHARED, extra_config=deepseek2, vectors=_score_bias("mlp.gate")),
    "minimax-m2": Architecture(
        "minimax_m2", ATTENTION | HEAD_NORMS | MINIMAX_M2, extra_config=minimax_m2, vectors=_score_bias("block_sparse_moe")
    ),
    "gemma3": Architecture("gemma3_text", ATTENTION | HEAD_NORMS | MLP | GEMMA3, values=GEMMA_NORMS, extra_config=gemma3),
    "gemma-embedding": Architecture(
        "gemma3_text", ATTENTION | HEAD_NORMS | MLP | GEMMA3, values=GEMMA_NORMS, extra_config=gemma_embedding
    ),
    "gemma4": Architecture("gemma4_text", ATTENTION | HEAD_NORMS | MLP | GEMMA4, extra_config=gemma4, vectors=GEMMA4_VECTORS),
    "qwen3next": Architecture("qwen3_next", HYBRID | QWEN_SHARED, extra_config=qwen3_next_moe, **DELTA, mtp_prefix="mtp"),
    "qwen35": Architecture(
        "qwen3_5_text",
        HYBRID | _renamed_norm(MLP),
        extra_config=qwen3_next,
        **DELTA,
        order=grouped_value_heads,
        mtp_prefix="mtp",
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        HYBRID | QWEN_SHARED,
        extra_config=qwen3_next_moe,
        **DELTA,
        order=grouped_value_heads,
        mtp_prefix="mtp",
    ),
}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    fields = fields_of(metadata, "the GGUF file")
    name = fields.read("general.architecture", NAME)
    if name not in ARCHITECTURES:
        raise FormatError(f"GGUF architecture {name!r} is not supported. Supported: {', '.join(ARCHITECTURES)}. {INSTEAD}")
    if name == "llama" and fields.get("llama.expert_count", COUNT, None):
        raise FormatError("GGUF files of architecture 'llama' with experts (Mixtral) are not supported. " + INSTEAD)
    return ARCHITECTURES[name]
