"""What a GGUF file says of its model, in Hugging Face's words: the keys of config.json and the names of tensors."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from auraflux.errors import FormatError
from auraflux.ops import llama3_frequencies, rope_frequencies

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
GLM4_MOE = {
    "post_attention_norm": "post_attention_layernorm",
    **{name: module for name, module in (MLP | EXPERTS).items() if name != "ffn_norm"},
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
MINIMAX_M2 = {name: module.replace("mlp.", "block_sparse_moe.", 1) for name, module in EXPERTS.items()}
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
# what every Llama 3 release says of its slow frequencies; the file holds only the factors that follow
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
FREQUENCIES = "rope_freqs.weight"


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
    vectors     names of tensors within a layer that are no module's weight or bias
    permuted    whether rows of q and k are in the order that rotates neighbouring channels
    norms_plus  what the file has added to the weights of norms
    more        config keys that only this one has
    """

    model_type: str
    layer: dict[str, str]
    permuted: bool = False
    norms_plus: float = 0.0
    more: Callable[[Words], dict[str, Any]] = lambda words: {}
    vectors: Mapping[str, str] = {}


def _qwen3_moe(words: Words) -> dict[str, Any]:
    return {
        "moe_intermediate_size": words["expert_feed_forward_length"],
        "num_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _glm4_moe(words: Words) -> dict[str, Any]:
    further = words.get("nextn_predict_layers", 0)
    return {
        **_partial(words),
        "num_hidden_layers": words["block_count"] - further,
        "num_nextn_predict_layers": further,
        "moe_intermediate_size": words["expert_feed_forward_length"],
        "n_routed_experts": words["expert_count"],
        "num_experts_per_tok": words["expert_used_count"],
        "n_shared_experts": words.get("expert_shared_count", 1),
        "first_k_dense_replace": words.get("leading_dense_block_count", 0),
        "routed_scaling_factor": words.get("expert_weights_scale", 1.0),
        "norm_topk_prob": words.get("expert_weights_norm", True),
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
    width, kinds = words["attention.key_length"], {1: "softmax", 2: "sigmoid"}
    scoring = words.get("expert_gating_func", 2)
    return {
        "partial_rotary_factor": words.get("rope.dimension_count", width) / width,
        "scoring_func": kinds.get(scoring, str(scoring)),
    }


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


def _biased(home: str) -> dict[str, str]:
    """Where the bias in the choice of experts is."""
    return {"exp_probs_b": f"{home}.e_score_correction_bias"}


SINKS = {"attn_sinks": "self_attn.sinks"}
ARCHITECTURES = {
    "llama": Architecture("llama", ATTENTION | MLP, permuted=True),
    "qwen2": Architecture("qwen2", ATTENTION | MLP),
    "qwen3": Architecture("qwen3", ATTENTION | HEAD_NORMS | MLP),
    "qwen3moe": Architecture("qwen3_moe", ATTENTION | HEAD_NORMS | EXPERTS, more=_qwen3_moe),
    "gpt-oss": Architecture("gpt_oss", ATTENTION | GPT_OSS, more=_gpt_oss, vectors=SINKS),
    "glm4moe": Architecture("glm4_moe", ATTENTION | HEAD_NORMS | GLM4_MOE, more=_glm4_moe, vectors=_biased("mlp.gate")),
    "minimax-m2": Architecture(
        "minimax_m2", ATTENTION | HEAD_NORMS | MINIMAX_M2, more=_minimax_m2, vectors=_biased("block_sparse_moe")
    ),
    "gemma3": Architecture("gemma3_text", ATTENTION | HEAD_NORMS | MLP | GEMMA3, norms_plus=1.0, more=_gemma3),
}


def architecture(metadata: Mapping[str, Any]) -> Architecture:
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise FormatError(f"GGUF architecture {name!r} is not supported. Those that are: {', '.join(ARCHITECTURES)}.")
    if name == "llama" and metadata.get("llama.expert_count"):
        raise FormatError("GGUF files of architecture 'llama' with experts (Mixtral) are not supported.")
    return ARCHITECTURES[name]


def tensor_name(name: str, form: Architecture) -> str:
    """Hugging Face's name of a tensor; a name that is not known stays."""
    found = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if found is None:
        # of layers that predict more than one token
        return re.sub(r"^blk\.(\d+)\.nextn\.", r"model.layers.\1.nextn.", name)
    layer, module, part = found.groups()
    if layer is None:
        return f"{ENDS[module]}.{part}" if module in ENDS else name
    if module in form.vectors:
        return f"model.layers.{layer}.{form.vectors[module]}"
    return f"model.layers.{layer}.{form.layer[module]}.{part}" if module in form.layer else name


def make_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], frequencies: NDArray[np.float32] | None
) -> dict[str, Any]:
    """Give what config.json would say.

    shapes       of the tensors, by Hugging Face's names
    frequencies  by which each rotary frequency is divided; None where the file does not say
    """
    form = architecture(metadata)
    words = Words(metadata, metadata["general.architecture"])
    hidden, heads = words["embedding_length"], words["attention.head_count"]
    if "model.embed_tokens.weight" not in shapes:
        raise FormatError("the GGUF file has no token_embd.weight.")
    config = {
        "model_type": form.model_type,
        "hidden_size": hidden,
        "intermediate_size": words.get("feed_forward_length"),
        "num_hidden_layers": words["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": words.get("attention.head_count_kv", heads),
        "head_dim": words.get("attention.key_length", hidden // heads),
        "rms_norm_eps": words["attention.layer_norm_rms_epsilon"],
        "rope_theta": words.get("rope.freq_base", 10000.0),
        "max_position_embeddings": words["context_length"],
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "hidden_act": "silu",
        **form.more(words),
    }
    for key in ("bos", "eos"):
        if (token := metadata.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            config[f"{key}_token_id"] = token
    if form.model_type == "glm4_moe":
        config["use_qk_norm"] = "model.layers.0.self_attn.q_norm.weight" in shapes
    _check_rotary_width(words, config)
    if (scaling := _scaling(words, config, frequencies)) is not None:
        config["rope_scaling"] = scaling
    return config


def _check_rotary_width(words: Words, config: dict[str, Any]) -> None:
    width = words.get("rope.dimension_count", config["head_dim"])
    if "partial_rotary_factor" not in config and width != config["head_dim"]:
        raise FormatError(f"the GGUF file rotates {width} of {config['head_dim']} channels of a head; all is supported.")


def _scaling(words: Words, config: dict[str, Any], frequencies: NDArray[np.float32] | None) -> dict[str, Any] | None:
    if frequencies is not None:
        return _llama3(config, torch.from_numpy(frequencies.astype(np.float32)))
    kind = words.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise FormatError(f"the GGUF file asks for rope scaling {kind!r}; none, linear and yarn are supported.")
    scaling = {"rope_type": kind, "factor": words["rope.scaling.factor"]}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = words["rope.scaling.original_context_length"]
        scaling["beta_fast"] = words.get("rope.scaling.yarn_beta_fast", 32.0)
        scaling["beta_slow"] = words.get("rope.scaling.yarn_beta_slow", 1.0)
        if config["model_type"] == "gpt_oss":
            scaling["truncate"] = False
    return scaling


def _llama3(config: dict[str, Any], factors: torch.Tensor) -> dict[str, Any] | None:
    """The settings that lead to the factors in the file; a FormatError if there are none."""
    factor = float(factors.max())
    if factor == 1.0 and float(factors.min()) == 1.0:
        return None
    width, theta = config["head_dim"], config["rope_theta"]
    wanted = rope_frequencies(width, theta) / llama3_frequencies(width, theta, factor, *LLAMA3.values())
    if factors.shape != wanted.shape or not torch.allclose(factors, wanted, rtol=1e-4):
        raise FormatError(f"{FREQUENCIES} in the GGUF file is not what Llama 3 scales its frequencies by.")
    return {"rope_type": "llama3", "factor": factor, **LLAMA3}
