"""GGUF metadata of each architecture translated to keys of config.json."""

from collections.abc import Collection, Mapping
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from auraflux.errors import FormatError
from auraflux.weights.fields import (
    COUNT,
    FACTOR,
    HEAD,
    LATENT,
    LAYER_COUNT,
    LAYER_INTERVAL,
    LAYERS,
    MOST_LAYERS,
    SHARED_EXPERTS,
    TAPS,
    THETA,
    TOKEN_COUNT,
    WIDTH,
    WIDTH_OR_NONE,
    Fields,
    fields_of,
)
from auraflux.weights.formats.untrusted import FLAG, Kind, either, integer, list_of, number

T = TypeVar("T")

FREQUENCIES = "rope_freqs.weight"
DELTA = {"group_count": COUNT, "time_step_rank": COUNT, "inner_size": WIDTH}
SECTIONS = list_of(integer(0, 1024), 4)
LLAMA4_CHUNK = 8192
UNROTATED = 1e29  # a frequency divided by this factor or more does not rotate


class GGUFMetadata(Fields):
    """Metadata of one architecture, read by keys without its prefix.

    tensors      Hugging Face's names of the file's tensors
    frequencies  divisors of the rotary frequencies; None if the file has none
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        architecture: str,
        tensors: Collection[str] = (),
        frequencies: NDArray[np.float32] | None = None,
    ):
        super().__init__(fields_of(metadata, "the GGUF file").where, metadata)
        self._architecture = architecture
        self.tensors, self.frequencies = tensors, frequencies

    def _value(self, key: str) -> Any:
        value = self._found.get(self.name_of(key))
        # the file stores float32: 9.999999747e-6 means 1e-5
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def name_of(self, key: str) -> str:
        return f"{self._architecture}.{key}"

    def each(self, key: str, kind: Kind[T]) -> list[T]:
        """Return a value per layer, from one value or from a list."""
        found, count = self.read(key, either(kind, list_of(kind, MOST_LAYERS))), self.layers
        listed = found if isinstance(found, list) else [found] * count
        if len(listed) != count:
            raise FormatError(f"the GGUF file has {self.name_of(key)} for {len(listed)} layers, and {count} layers.")
        return listed

    @property
    def layers(self) -> int:
        return self.read("block_count", LAYER_COUNT)

    @property
    def experts(self) -> tuple[int, int]:
        """Number of experts in a layer, and number of experts per token."""
        return self.read("expert_count", COUNT), self.read("expert_used_count", COUNT)

    @property
    def expert_inner(self) -> int:
        return self.read("expert_feed_forward_length", WIDTH)

    @property
    def key_width(self) -> int:
        return self.read("attention.key_length", HEAD)

    @property
    def window(self) -> int:
        return self.read("attention.sliding_window", TOKEN_COUNT)

    @property
    def mtp_layers(self) -> int:
        """Number of MTP layers."""
        return self.get("nextn_predict_layers", LAYERS, 0)

    def theta(self, default: float, suffix: str = "") -> float:
        return self.get(f"rope.freq_base{suffix}", THETA, default)

    def rotated(self, default: int, suffix: str = "") -> int:
        """Return the number of rotated channels of a head."""
        return self.get(f"rope.dimension_count{suffix}", HEAD, default)


def qwen3_moe(meta: GGUFMetadata) -> dict[str, Any]:
    return {
        "moe_intermediate_size": meta.expert_inner,
        "num_experts": meta.experts[0],
        "num_experts_per_tok": meta.experts[1],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _shared_experts(meta: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of MoE layers with shared experts, after leading dense layers."""
    mtp_layers = meta.mtp_layers
    return {
        "num_hidden_layers": meta.layers - mtp_layers,
        "num_nextn_predict_layers": mtp_layers,
        "moe_intermediate_size": meta.expert_inner,
        "n_routed_experts": meta.experts[0],
        "num_experts_per_tok": meta.experts[1],
        "first_k_dense_replace": meta.get("leading_dense_block_count", LAYERS, 0),
        "routed_scaling_factor": meta.get("expert_weights_scale", FACTOR, 1.0),
    }


def glm4_moe(meta: GGUFMetadata) -> dict[str, Any]:
    return {
        **_partial_rotary(meta),
        **_shared_experts(meta),
        "n_shared_experts": meta.get("expert_shared_count", SHARED_EXPERTS, 1),
        "norm_topk_prob": meta.get("expert_weights_norm", FLAG, True),
        "use_qk_norm": "model.layers.0.self_attn.q_norm.weight" in meta.tensors,
    }


def deepseek2(meta: GGUFMetadata) -> dict[str, Any]:
    if meta.get("attention.temperature_scale", number(0, 1e6), None):
        raise FormatError(
            "GGUF files of architecture 'deepseek2' with attention temperature scaling are not supported. "
            "Use the model's safetensors folder."
        )
    heads, rope = meta.read("attention.head_count", COUNT), meta.read("rope.dimension_count", HEAD)
    # in newer files key_length and value_length are the widths of the cached latent
    key = meta.get("attention.key_length_mla", HEAD, None) or meta.key_width
    if key <= rope:
        raise FormatError(f"the GGUF file rotates {rope} of {key} channels of a head; fewer than all are expected.")
    # missing from DeepSeek V2's files
    scoring, groups = _scoring(meta, 1), meta.get("expert_group_count", COUNT, 1)
    older = {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy" if groups > 1 else "greedy"}
    return {
        **(older if scoring == "softmax" else {}),
        **_shared_experts(meta),
        "n_shared_experts": meta.get("expert_shared_count", SHARED_EXPERTS, 0),
        # written only if true
        "norm_topk_prob": meta.get("expert_weights_norm", FLAG, False),
        "scoring_func": scoring,
        "n_group": groups,
        "topk_group": meta.get("expert_group_used_count", COUNT, 1),
        "num_key_value_heads": heads,
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": meta.get("attention.value_length_mla", HEAD, None) or meta.read("attention.value_length", HEAD),
        "q_lora_rank": meta.get("attention.q_lora_rank", WIDTH, None),
        "kv_lora_rank": meta.read("attention.kv_lora_rank", LATENT),
    }


def dots1(meta: GGUFMetadata) -> dict[str, Any]:
    return {
        **_shared_experts(meta),
        "n_shared_experts": meta.get("expert_shared_count", SHARED_EXPERTS, 0),
        "norm_topk_prob": meta.get("expert_weights_norm", FLAG, False),
        "scoring_func": _scoring(meta, 2),
    }


def _windows(meta: GGUFMetadata, layers: int) -> dict[str, Any]:
    """Return the keys of sliding windows: of the layers listed, or of all but every so many."""
    local = meta.get("attention.sliding_window_pattern", either(LAYER_INTERVAL, list_of(FLAG, MOST_LAYERS)), 4)
    listed = local[:layers] if isinstance(local, list) else [bool((index + 1) % local) for index in range(layers)]
    kinds = ["sliding_attention" if each else "full_attention" for each in listed]
    return {"sliding_window": meta.window, "layer_types": kinds}


def exaone_moe(meta: GGUFMetadata) -> dict[str, Any]:
    found = dots1(meta)
    shared = {
        "num_experts": found.pop("n_routed_experts"),
        "num_shared_experts": meta.get("expert_shared_count", SHARED_EXPERTS, 1),
    }
    return {**found, **shared, **_windows(meta, found["num_hidden_layers"])}


def afmoe(meta: GGUFMetadata) -> dict[str, Any]:
    if _scoring(meta, 2) != "sigmoid":
        raise FormatError("GGUF files of architecture 'afmoe' with other scores than sigmoid are not supported.")
    return {
        **_windows(meta, meta.layers),
        "moe_intermediate_size": meta.expert_inner,
        "num_experts": meta.experts[0],
        "num_experts_per_tok": meta.experts[1],
        "num_shared_experts": meta.get("expert_shared_count", SHARED_EXPERTS, 0),
        "num_dense_layers": meta.get("leading_dense_block_count", LAYERS, 0),
        "route_scale": meta.get("expert_weights_scale", FACTOR, 1.0),
        # llama.cpp scales the embeddings of all of them
        "mup_enabled": True,
    }


def llama4(meta: GGUFMetadata) -> dict[str, Any]:
    """Return what llama.cpp sets for Llama 4: its files say little of their attention."""
    count, chosen = meta.experts
    if not meta.get("attention.sliding_window", either(TOKEN_COUNT, integer(0, 0)), LLAMA4_CHUNK):
        raise FormatError("GGUF files of architecture 'llama4' without attention in chunks are not supported.")
    return {
        "intermediate_size": meta.expert_inner,
        "intermediate_size_mlp": meta.read("feed_forward_length", WIDTH),
        "num_local_experts": count,
        "num_experts_per_tok": chosen,
        "interleave_moe_layer_step": meta.read("interleave_moe_layer_step", LAYER_INTERVAL),
        "attention_chunk_size": LLAMA4_CHUNK,
        "no_rope_layer_interval": 4,
        "floor_scale": 8192,
        "attn_scale": 0.1,
        # Maverick has 128 experts, and no norms of queries and keys
        "use_qk_norm": count != 128,
    }


def minimax_m2(meta: GGUFMetadata) -> dict[str, Any]:
    return {
        **_partial_rotary(meta),
        "intermediate_size": meta.expert_inner,
        "num_local_experts": meta.experts[0],
        "num_experts_per_tok": meta.experts[1],
    }


def _partial_rotary(meta: GGUFMetadata) -> dict[str, Any]:
    """Return the keys of partial rotary embeddings and of router scoring."""
    width = meta.key_width
    return {
        "partial_rotary_factor": meta.rotated(width) / width,
        "scoring_func": _scoring(meta, 2),
    }


def _scoring(meta: GGUFMetadata, default: int) -> str:
    found = meta.get("expert_gating_func", integer(0, 255), default)
    return {1: "softmax", 2: "sigmoid"}.get(found, str(found))


def gpt_oss(meta: GGUFMetadata) -> dict[str, Any]:
    layers = meta.layers
    return {
        "intermediate_size": meta.expert_inner,
        "num_local_experts": meta.experts[0],
        "num_experts_per_tok": meta.experts[1],
        "sliding_window": meta.window,
        "layer_types": ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)],
        "swiglu_limit": 7.0,
    }


def gemma3(meta: GGUFMetadata) -> dict[str, Any]:
    layers, heads = meta.layers, meta.read("attention.head_count", COUNT)
    every = meta.get("attention.sliding_window_pattern", LAYER_INTERVAL, 6)
    return {
        "sliding_window": meta.window,
        "sliding_window_pattern": every,
        "rope_theta": meta.theta(1000000.0),
        "rope_local_base_freq": meta.theta(10000.0, "_swa"),
        # not in the file: only the 27B model scales by hidden size over heads
        "query_pre_attn_scalar": meta.read("embedding_length", WIDTH) // heads
        if layers == 62
        else meta.get("attention.key_length", HEAD, 256),
        "head_dim": meta.get("attention.key_length", HEAD, 256),
        "final_logit_softcapping": meta.get("final_logit_softcapping", FACTOR, None),
        "hidden_activation": "gelu_pytorch_tanh",
        # Ollama's files of EmbeddingGemma are of the same architecture
        "use_bidirectional_attention": "dense.0.weight" in meta.tensors,
    }


def gemma_embedding(meta: GGUFMetadata) -> dict[str, Any]:
    return {**gemma3(meta), "use_bidirectional_attention": True}


def qwen3_next(meta: GGUFMetadata) -> dict[str, Any]:
    groups, heads, inner = (meta.read(f"ssm.{key}", kind) for key, kind in DELTA.items())
    if heads % groups:
        raise FormatError(f"the GGUF file has {heads} value heads, which is not a multiple of {groups} key heads.")
    if inner % heads:
        raise FormatError(f"the GGUF file has values of {inner} channels, which is not a multiple of {heads} heads.")
    return {
        "num_hidden_layers": meta.layers - meta.mtp_layers,
        "partial_rotary_factor": meta.rotated(64) / meta.key_width,
        # frequencies that turn by time, rows and columns in images
        "mrope_section": meta.get("rope.dimension_sections", SECTIONS, [11, 11, 10])[:3],
        "full_attention_interval": meta.get("full_attention_interval", LAYER_INTERVAL, 4),
        "linear_num_key_heads": groups,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": meta.read("ssm.state_size", HEAD),
        "linear_value_head_dim": inner // heads,
        "linear_conv_kernel_dim": meta.read("ssm.conv_kernel", TAPS),
    }


def qwen3_next_moe(meta: GGUFMetadata) -> dict[str, Any]:
    return {
        **qwen3_moe(meta),
        **qwen3_next(meta),
        "shared_expert_intermediate_size": meta.read("expert_shared_feed_forward_length", WIDTH_OR_NONE),
    }


def gemma4(meta: GGUFMetadata) -> dict[str, Any]:
    layers, shared = meta.layers, meta.get("attention.shared_kv_layers", LAYERS, 0)
    kinds = [
        "sliding_attention" if local else "full_attention" for local in meta.each("attention.sliding_window_pattern", FLAG)
    ]
    widths = {"sliding_attention": meta.read("attention.key_length_swa", HEAD), "full_attention": meta.key_width}
    heads, inners = meta.each("attention.head_count_kv", COUNT), meta.each("feed_forward_length", WIDTH)
    widened = [inners[0] * (2 if index >= layers - shared else 1) for index in range(layers)]
    if inners != widened and len(set(inners)) > 1:
        raise FormatError("the GGUF file has MLPs of several widths; only layers with shared KV may be twice as wide.")
    full = [index for index, kind in enumerate(kinds[: max(layers - shared, 0)]) if kind == "full_attention"]
    without_values = [index for index in full if f"model.layers.{index}.self_attn.v_proj.weight" not in meta.tensors]
    experts = meta.get("expert_count", COUNT, 0)
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
        "attention_k_eq_v": bool(without_values),
        "num_kv_shared_layers": shared,
        "hidden_size_per_layer_input": meta.get("embedding_length_per_layer_input", WIDTH_OR_NONE, 0),
        "sliding_window": meta.window,
        "enable_moe_block": experts > 0,
        "num_experts": experts,
        "top_k_experts": meta.get("expert_used_count", COUNT, 0),
        "moe_intermediate_size": meta.get("expert_feed_forward_length", WIDTH, None),
        "final_logit_softcapping": meta.get("final_logit_softcapping", FACTOR, None),
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": _rope_parameters(meta, widths),
    }


def _rope_parameters(meta: GGUFMetadata, widths: dict[str, int]) -> dict[str, Any]:
    """Return the RoPE parameters of both layer types; full attention rotates only some of its frequencies."""
    for end, width in zip(("_swa", ""), widths.values(), strict=True):
        if (rotated := meta.rotated(width, end)) != width:
            raise FormatError(
                f"the GGUF file rotates {rotated} of {width} channels of a head; only full rotation is supported."
            )
    width, factors = widths["full_attention"], meta.frequencies
    if factors is None:
        factors = np.ones(width // 2, np.float32)
    rotated = int((factors == 1).sum())
    if factors.shape != (width // 2,) or not ((factors[:rotated] == 1).all() and (factors[rotated:] >= UNROTATED).all()):
        raise FormatError(f"{FREQUENCIES} in the GGUF file does not match Gemma 4's frequency factors.")
    proportional = {"rope_type": "proportional", "partial_rotary_factor": rotated / (width // 2)}
    return {
        "sliding_attention": {"rope_type": "default", "rope_theta": meta.theta(10000.0, "_swa")},
        "full_attention": {**proportional, "rope_theta": meta.theta(1000000.0)},
    }
