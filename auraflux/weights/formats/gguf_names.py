"""Translation of GGUF metadata and tensor names to config.json and Hugging Face's names."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from auraflux.errors import FormatError
from auraflux.ops import llama3_frequencies, rope_frequencies
from auraflux.weights.fields import COUNT, EPS, FACTOR, HEAD, NAME, POSITIONS, TOKEN, WIDTH, fields_of
from auraflux.weights.formats.gguf_architectures import ENDS, Architecture, architecture
from auraflux.weights.formats.gguf_config import FREQUENCIES, GGUFMetadata
from auraflux.weights.formats.untrusted import number

# RoPE scaling of all Llama 3 releases; the file has only the resulting factors
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# of MTP layers; the last two are copies
NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
# the same under a prefix, where MTP layers have numbers of their own
PREFIXED = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "shared_head.norm": "norm"}


def tensor_name(name: str, arch: Architecture) -> str:
    """Return Hugging Face's name of a tensor; an unknown name is returned unchanged."""
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found is None:
        module, _, part = name.rpartition(".")
        return f"{ENDS[module]}.{part}" if module in ENDS else name
    layer, rest = f"model.layers.{found[1]}", found[2]
    module, _, part = rest.rpartition(".")
    if module in NEXTN:
        return f"{layer}.{NEXTN[module]}.{part}"
    if rest in arch.vectors:
        return f"{layer}.{arch.vectors[rest]}"
    return f"{layer}.{arch.layer[module]}.{part}" if module in arch.layer else name


def mtp_tensor_name(name: str, config: Mapping[str, Any], arch: Architecture) -> str:
    """Return the name of a tensor, with the MTP prefix if its layer is past the last."""
    found, layers = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.([^.]+)", name), config["num_hidden_layers"]
    if arch.mtp_prefix is None or found is None or int(found[1]) < layers:
        return name
    number, module, part = int(found[1]) - layers, found[2], found[3]
    # the first of several heads is used
    if module in PREFIXED and not number:
        return f"{arch.mtp_prefix}.{PREFIXED[module]}.{part}"
    return f"{arch.mtp_prefix}.layers.{number}.{module}.{part}"


def make_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], frequencies: NDArray[np.float32] | None
) -> dict[str, Any]:
    """Build the equivalent of config.json.

    shapes       of the tensors, by Hugging Face's names
    frequencies  divisors of the rotary frequencies; None if the file has none
    """
    arch = architecture(metadata)
    meta = GGUFMetadata(metadata, metadata["general.architecture"], shapes, frequencies)
    hidden, heads = meta.read("embedding_length", WIDTH), meta.read("attention.head_count", COUNT)
    if "model.embed_tokens.weight" not in shapes:
        raise FormatError("the GGUF file has no token_embd.weight.")
    extra = arch.extra_config(meta)
    if "intermediate_size" not in extra:
        extra["intermediate_size"] = meta.get("feed_forward_length", WIDTH, None)
    if "num_key_value_heads" not in extra:
        extra["num_key_value_heads"] = meta.get("attention.head_count_kv", COUNT, heads)
    config = {
        "model_type": arch.model_type,
        "hidden_size": hidden,
        "num_hidden_layers": meta.layers,
        "num_attention_heads": heads,
        "head_dim": meta.get("attention.key_length", HEAD, hidden // heads),
        "rms_norm_eps": meta.read("attention.layer_norm_rms_epsilon", EPS),
        "rope_theta": meta.theta(10000.0),
        "max_position_embeddings": meta.read("context_length", POSITIONS),
        "vocab_size": shapes["model.embed_tokens.weight"][0],
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "hidden_act": "silu",
        **extra,
    }
    fields = fields_of(metadata, "the GGUF file")
    for key in ("bos", "eos"):
        if (token := fields.get(f"tokenizer.ggml.{key}_token_id", TOKEN, None)) is not None:
            config[f"{key}_token_id"] = token
    if "rope_parameters" in config:
        return config
    _check_rotary_width(meta, config)
    if (scaling := _scaling(meta, config, frequencies)) is not None:
        config["rope_scaling"] = scaling
    return config


def _check_rotary_width(meta: GGUFMetadata, config: dict[str, Any]) -> None:
    width = meta.rotated(config["head_dim"])
    if "partial_rotary_factor" not in config and width != config["head_dim"]:
        raise FormatError(
            f"the GGUF file rotates {width} of {config['head_dim']} channels of a head; only full rotation is supported."
        )


def _scaling(meta: GGUFMetadata, config: dict[str, Any], frequencies: NDArray[np.float32] | None) -> dict[str, Any] | None:
    if frequencies is not None:
        return _divided(meta, config, torch.from_numpy(frequencies.astype(np.float32)))
    kind = meta.get("rope.scaling.type", NAME, "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise FormatError(f"the GGUF file has rope scaling {kind!r}; none, linear and yarn are supported.")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": meta.read("rope.scaling.factor", FACTOR)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = meta.read("rope.scaling.original_context_length", POSITIONS)
        scaling["beta_fast"] = meta.get("rope.scaling.yarn_beta_fast", FACTOR, 32.0)
        scaling["beta_slow"] = meta.get("rope.scaling.yarn_beta_slow", FACTOR, 1.0)
        if config["model_type"] == "gpt_oss":
            scaling["truncate"] = False
        slope = meta.get("rope.scaling.yarn_log_multiplier", number(0, 1e5), 0)
        if config["model_type"] in ("deepseek_v2", "deepseek_v3") and slope:
            # llama.cpp stores a tenth; the factor scales all of queries and keys, not only the rotated channels
            scaling["mscale"] = scaling["mscale_all_dim"] = 10 * slope
    return scaling


def _divided(meta: GGUFMetadata, config: dict[str, Any], factors: torch.Tensor) -> dict[str, Any] | None:
    """Return the scaling that divides frequencies by the file's factors: Llama 3's where that gives them, else themselves."""
    width, theta = meta.rotated(config["head_dim"]), config["rope_theta"]
    if tuple(factors.shape) != (width // 2,) or not bool((factors > 0).all() and torch.isfinite(factors).all()):
        raise FormatError(f"{FREQUENCIES} in the GGUF file must have {width // 2} positive factors, one per frequency.")
    if bool((factors == 1).all()):
        return None
    factor = float(factors.max())
    wanted = rope_frequencies(width, theta) / llama3_frequencies(width, theta, factor, *LLAMA3.values())
    if torch.allclose(factors, wanted, rtol=1e-4):
        return {"rope_type": "llama3", "factor": factor, **LLAMA3}
    if (kind := meta.get("rope.scaling.type", NAME, "none")) != "none":
        raise FormatError(f"the GGUF file has {FREQUENCIES} and rope scaling {kind!r}; only one of them is supported.")
    listed = factors.tolist()
    trained = {"attention_factor": 1.0, "original_max_position_embeddings": config["max_position_embeddings"]}
    return {"rope_type": "longrope", "short_factor": listed, "long_factor": listed, **trained}
