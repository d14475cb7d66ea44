"""What a GGUF file says of its model, in Hugging Face's words: the keys of config.json and the names of tensors."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from auraflux.errors import FormatError
from auraflux.ops import llama3_frequencies, rope_frequencies
from auraflux.weights.gguf_families import ENDS, Architecture, architecture
from auraflux.weights.gguf_settings import FREQUENCIES, Words

# what every Llama 3 release says of its slow frequencies; the file holds only the factors that follow
LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def tensor_name(name: str, form: Architecture) -> str:
    """Hugging Face's name of a tensor; a name that is not known stays."""
    found = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    if found is None:
        module, _, part = name.rpartition(".")
        return f"{ENDS[module]}.{part}" if module in ENDS else name
    layer, rest = f"model.layers.{found[1]}", found[2]
    module, _, part = rest.rpartition(".")
    # of layers that predict more than one token
    if rest.startswith("nextn."):
        return f"{layer}.{rest}"
    if rest in form.vectors:
        return f"{layer}.{form.vectors[rest]}"
    return f"{layer}.{form.layer[module]}.{part}" if module in form.layer else name


def further(name: str, config: Mapping[str, Any], form: Architecture) -> str:
    """The name of a tensor where layers after the last have one of their own."""
    found = re.match(r"model\.layers\.(\d+)\.", name)
    beyond = form.beyond is not None and found is not None and int(found[1]) >= config["num_hidden_layers"]
    return f"{form.beyond}.{name}" if beyond else name


def make_config(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], frequencies: NDArray[np.float32] | None
) -> dict[str, Any]:
    """Give what config.json would say.

    shapes       of the tensors, by Hugging Face's names
    frequencies  by which each rotary frequency is divided; None where the file does not say
    """
    form = architecture(metadata)
    words = Words(metadata, metadata["general.architecture"], shapes, frequencies)
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
    if "rope_parameters" in config:
        return config
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
        if config["model_type"] == "deepseek_v3" and (slope := words.get("rope.scaling.yarn_log_multiplier")):
            # a tenth of it; it enlarges all of queries and keys, not what is rotated alone
            scaling["mscale"] = scaling["mscale_all_dim"] = 10 * slope
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
