"""Every config key that transformers' code of a family reads is read here too, or is known not to change logits."""

import ast
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from auraflux.models import FAMILIES, family
from auraflux.weights.fields import Fields

SOURCE = Path(transformers.__file__).parent / "models"
# training, initial weights, and what transformers returns besides logits
NOT_INFERENCE = {
    "attention_dropout",
    "emb_pdrop",
    "initializer_range",
    "input_jitter_noise",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "rescale_prenorm_residual",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "time_step_floor",
    "time_step_max",
    "use_cache",
}
# the tensors of a checkpoint decide: a bias is used where there is one
BY_TENSORS = {
    "attention_bias",
    "mlp_bias",
    "qkv_bias",
    "use_bias",
    "use_conv_bias",
    "mamba_conv_bias",
    "conv_bias",
    "lm_head_bias",
}
# other code for the same result, and how many logits are returned
HOW = {"block_size", "chunk_size", "mamba_chunk_size", "num_logits_to_keep", "use_mamba_kernels"}
# latent attention: heads have the widths of other keys, and each has its own key
LATENT = {"head_dim", "num_key_value_heads"}
MLA = (
    "deepseek_v2",
    "deepseek_v3",
    "longcat_flash",
    "axk1",
    "kimi_k25",
    "glm4_moe_lite",
    "mistral4",
    "deepseek_v32",
    "glm_moe_dsa",
    "axk2",
    "hy_v4",
    "kimi_linear",
    "bailing_hybrid",
)
OTHERWISE: dict[str, set[str]] = {
    **dict.fromkeys(MLA, LATENT),
    # initial values
    "hy_v4": LATENT | {"learnable_sink_init"},
    # time steps are not clamped, see docs/models.md
    "nemotron_h": {"time_step_min"},
    # sums are float32 here
    "hy_v3": {"enable_moe_fp32_combine"},
    # with layer_types in the file, and where it is a pattern of letters
    "exaone_moe": {"sliding_window_pattern"},
    # the rows of its tables are read from their tensors
    "qwen4_exp_text": {"make_ngram_vocab_size_divisible_by"},
}
EXPERTS = {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64}
# for defaults that no checkpoint has, or with which not all keys matter
CHANGES: dict[str, dict[str, Any]] = {
    "qwen3_next": {"mlp_only_layers": [0]},
    "glm4_moe": {"head_dim": 128},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "dots1": {"num_experts_per_tok": 2, "n_routed_experts": 8},
    "gemma4_text": {"per_layer_config": None, "enable_moe_block": True, **EXPERTS},
    "gemma4_unified_text": {"per_layer_config": None},
    "qwen4_exp_text": {
        "indexer_compress_ratio": 64,
        "indexer_budget": 2048,
        "indexer_head_dim": 256,
        "indexer_n_heads": 4,
        "ple_layer_ids": [2],
        "eos_token_id": 1,
    },
}


def text_config(kind: str) -> Any:
    return CONFIG_MAPPING[kind]().get_text_config()


def keys_of_transformers(config: Any) -> set[str]:
    """Return the keys of a config that the modeling code of its model_type reads, by the names in config.json."""
    module = type(config).__module__.split(".")[-2]
    tree = ast.parse((SOURCE / module / f"modeling_{module}.py").read_text())
    names = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")) == "config"
    }
    alias = config.attribute_map
    return {alias.get(name, name) for name in names} & config.to_dict().keys()


def keys_read(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the keys that a family reads of a config, under all their names."""
    found: set[str] = set()
    originals = {name: getattr(Fields, name) for name in ("get", "only", "__contains__")}

    def watched(name: str) -> Any:
        def read(self: Fields, key: str, *rest: Any) -> Any:
            found.update((key, self.name_of(key)))
            return originals[name](self, key, *rest)

        return read

    module = family(config)
    with monkeypatch.context() as patch:
        for name in originals:
            patch.setattr(Fields, name, watched(name))
        module.make_caches(module.Config.from_hf(config))
    return found


@pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind in CONFIG_MAPPING])
def test_every_key_that_transformers_reads_is_read(kind: str, monkeypatch: pytest.MonkeyPatch):
    config = text_config(kind)
    alias = {theirs: name for name, theirs in config.attribute_map.items()}
    read = keys_read({**config.to_dict(), **CHANGES.get(config.model_type, {})}, monkeypatch)
    known = NOT_INFERENCE | BY_TENSORS | HOW | OTHERWISE.get(config.model_type, set())
    missing = {key for key in keys_of_transformers(config) - known if key not in read and alias.get(key) not in read}
    assert missing == set()


def test_the_lists_of_other_keys_name_keys_that_transformers_reads():
    every = set().union(*(keys_of_transformers(text_config(kind)) for kind in FAMILIES if kind in CONFIG_MAPPING))
    assert set().union(*OTHERWISE.values()) <= every | {"head_dim"}
