"""config.json: every key that a family reads is validated, and an invalid value gives a one-sentence error."""

import ast
import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import auraflux.models
from auraflux.bench.shapes import shape_names, shape_of
from auraflux.errors import FormatError
from auraflux.models import FAMILIES, family, family_name
from auraflux.models.config import Keys, experts_per_token, has_experts
from auraflux.weights.fields import COUNT, ConfigFile, Fields
from auraflux.weights.formats.untrusted import Kind

# NaN first: no type accepts it
INVALID_VALUES: list[Any] = [
    math.nan,
    "x",
    "x" * 5000,
    1.5,
    -1,
    0,
    10**30,
    True,
    False,
    [],
    [[]],
    {},
    {"a": {"b": []}},
    ["x"] * 2000,
]
# shapes that no benchmark has
MORE: dict[str, dict[str, Any]] = {
    "mistral3": {**shape_of("llama-8b", 2), "model_type": "mistral3"},
    "llama-scaled": {
        **shape_of("llama-8b", 2),
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
    },
}
PLAIN = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "rms_norm_eps": 1e-6,
    "sliding_window": 32,
}
MORE |= {
    "gpt-oss": {
        **PLAIN,
        "model_type": "gpt_oss",
        "layer_types": ["sliding_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "gemma-3": {**PLAIN, "model_type": "gemma3_text"},
    "gemma-3-listed": {
        **PLAIN,
        "model_type": "gemma3_text",
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "linear", "factor": 8.0}},
    },
}
MIXED = {
    **PLAIN,
    "layer_types": ["sliding_attention", "full_attention"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LATENT = {
    **PLAIN,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
BY_KIND = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6, "partial_rotary_factor": 0.5}}
MORE |= {
    "afmoe": {**MIXED, "model_type": "afmoe"},
    "exaone": {**MIXED, "model_type": "exaone_moe"},
    "laguna": {**MIXED, "model_type": "laguna", "rope_parameters": BY_KIND, "mlp_layer_types": ["dense", "sparse"]},
    "mimo": {**MIXED, "model_type": "mimo_v2_flash", "head_dim": 24, "n_routed_experts": 4},
    "mellum": {**MIXED, "model_type": "mellum", "rope_parameters": BY_KIND, "mlp_layer_types": ["dense", "sparse"]},
    "step": {
        **MIXED,
        "model_type": "step3p7",
        "n_routed_experts": 4,
        "share_expert_dim": 32,
        "rope_parameters": BY_KIND,
        "mlp_layer_types": ["dense", "sparse"],
        "swiglu_limits": [None, 7.0],
    },
    "hunyuan": {**PLAIN, "model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [2, 2]},
    "lfm2": {**MIXED, "model_type": "lfm2_moe", "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "cohere": {
        **{key: value for key, value in MIXED.items() if key != "layer_types"},
        "model_type": "cohere2_moe",
        "prefix_dense_intermediate_size": 64,
        "first_k_dense_replace": 1,
    },
    "minimax-m3": {
        **PLAIN,
        "model_type": "minimax_m3_vl",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "kolibri": {**MIXED, "model_type": "kolibri1"},
    "minimax": {**PLAIN, "model_type": "minimax", "num_local_experts": 4, "num_experts_per_tok": 2},
    "flex-olmo": {**PLAIN, "model_type": "flex_olmo", "num_experts": 4, "num_experts_per_tok": 2},
    "llama-4": {
        **PLAIN,
        "model_type": "llama4_text",
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "layer_types": ["chunked_attention", "full_attention"],
        "attention_chunk_size": 64,
        "no_rope_layers": [1, 0],
        "moe_layers": [1],
    },
    "phimoe": {
        **PLAIN,
        "model_type": "phimoe",
        "max_position_embeddings": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "short_mscale": 1.1,
            "long_mscale": 1.2,
            "original_max_position_embeddings": 64,
        },
    },
    "granite": {**PLAIN, "model_type": "granitemoe", "num_local_experts": 4, "num_experts_per_tok": 2},
    "granite-swash": {
        **PLAIN,
        "model_type": "granitemoe_swa",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention", "sliding_attention"],
        "layer_rope_theta": [0, 1e4],
    },
    "granite-hybrid": {
        **PLAIN,
        "model_type": "granitemoehybrid",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_n_heads": 8,
        "layer_types": ["mamba", "attention"],
    },
    "longcat": {
        **LATENT,
        "model_type": "longcat_flash",
        "num_layers": 1,
        "q_lora_rank": 32,
        "ffn_hidden_size": 96,
        "expert_ffn_hidden_size": 32,
        "moe_topk": 2,
    },
    "axk2": {
        **LATENT,
        "model_type": "axk2",
        "q_lora_rank": 32,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "hunyuan-4": {
        **LATENT,
        "model_type": "hy_v4",
        "q_lora_rank": 32,
        "index_n_heads": 4,
        "index_head_dim": 16,
        "index_topk": 8,
    },
    "dbrx": {
        "model_type": "dbrx",
        "d_model": 64,
        "n_heads": 4,
        "n_layers": 2,
        "vocab_size": 128,
        "max_seq_len": 256,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 5e5},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2, "moe_normalize_expert_weights": 1},
    },
    "ling": {
        **{key: value for key, value in LATENT.items() if key not in ("n_routed_experts", "num_experts_per_tok")},
        "model_type": "bailing_hybrid",
        "num_experts": 4,
        "num_experts_per_token": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "deepseek-v2": {**LATENT, "model_type": "deepseek_v2", "topk_method": "group_limited_greedy", "n_group": 2},
    "muse-glimmer": {**PLAIN, "model_type": "muse_glimmer_text", "layer_rope_theta": [1e4, 0]},
}
CONFIGS = {name: shape_of(name, 4) for name in shape_names()} | MORE


def keys_read(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, ...], set[str]]:
    """Map the path of every key that a family reads to the types it accepts."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    original, only = Fields.get, Fields.only

    def path_of(fields: Fields) -> tuple[str, ...]:
        return tuple(str(fields.where).split(": ")[1:])

    def get(self: Fields, key: str, kind: Kind[Any], default: Any) -> Any:
        found[(*path_of(self), self.name_of(key))].add(kind.expected)
        return original(self, key, kind, default)

    def refuse(self: Fields, key: str, *accepted: Any) -> None:
        found[(*path_of(self), self.name_of(key))].add("one of a few")
        only(self, key, *accepted)

    with monkeypatch.context() as patch:
        patch.setattr(Fields, "get", get)
        patch.setattr(Fields, "only", refuse)
        read(config)
    return found


def read(config: dict[str, Any]) -> None:
    """Parse a config completely: family, cache shapes and experts."""
    module = family(config)
    module.make_caches(module.Config.from_hf(config))
    if has_experts(config):
        experts_per_token(config)


def refusal(config: dict[str, Any]) -> str:
    """Return the error message for a config, empty if it is accepted."""
    try:
        read(config)
    except FormatError as err:
        return str(err)
    return ""


def changed(config: dict[str, Any], key_path: tuple[str, ...], value: Any) -> dict[str, Any]:
    if len(key_path) == 1:
        return {**config, key_path[0]: value}
    return {**config, key_path[0]: changed(config.get(key_path[0]) or {}, key_path[1:], value)}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_key_is_validated(name: str, monkeypatch: pytest.MonkeyPatch):
    config = CONFIGS[name]
    found = keys_read(config, monkeypatch)
    assert len(found) > 15
    for key_path in found:
        with pytest.raises(FormatError, match=key_path[-1]):
            read(changed(config, key_path, math.nan))
        for value in INVALID_VALUES:
            message = refusal(changed(config, key_path, value))
            assert "\n" not in message
            assert len(message) < 2500


def test_every_family_has_a_test_config():
    assert {family_name(config) for config in CONFIGS.values()} == {*FAMILIES.values()}


def test_a_key_has_the_same_type_in_all_families(monkeypatch: pytest.MonkeyPatch):
    kinds = defaultdict(set)
    for config in CONFIGS.values():
        for key_path, kinds_named in keys_read(config, monkeypatch).items():
            kinds[key_path[-1]] |= kinds_named - {"one of a few"}
    assert {key: each for key, each in kinds.items() if len(each) > 1} == {}


def families() -> Iterator[ast.Module]:
    for path in sorted(Path(auraflux.models.__file__).parent.glob("*.py")):
        if path.name != "config.py":
            yield ast.parse(path.read_text())


def test_families_read_every_key_with_a_type():
    """Check that no family indexes a config or uses the dict behind `Keys`."""
    for tree in families():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and node.name == "from_hf":
                uses = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == "config"]
                handed = [arg for each in ast.walk(node) if isinstance(each, ast.Call) for arg in each.args]
                assert all(each in handed for each in uses), ast.dump(node)
            assert not (isinstance(node, ast.Attribute) and node.attr == "_found")


def test_errors_name_file_key_value_and_limits():
    config = ConfigFile({**shape_of("llama-8b"), "hidden_size": "64"}, "a/config.json")
    with pytest.raises(
        FormatError, match=r"^a/config\.json has hidden_size = '64'; an integer from 1 to 1,048,576 is needed\.$"
    ):
        family(config).Config.from_hf(config)
    del config["hidden_size"]
    with pytest.raises(FormatError, match=r"^a/config\.json of model_type 'llama' has no 'hidden_size'\. The keys it has: "):
        family(config).Config.from_hf(config)


def test_errors_name_the_alias_in_the_file():
    keys = Keys({"model_type": "x", "theirs": "y"}, {"ours": "theirs"})
    with pytest.raises(FormatError, match=r"^config\.json has theirs = 'y'; an integer"):
        keys.read("ours", COUNT)
    assert Keys({"model_type": "x", "ours": 3}, {"ours": "theirs"}).read("ours", COUNT) == 3
    with pytest.raises(FormatError, match="has no 'theirs'"):
        Keys({"model_type": "x"}, {"ours": "theirs"}).read("ours", COUNT)


def test_inconsistent_numbers_are_refused():
    keys = Keys({"model_type": "x", "num_key_value_heads": 3, "num_experts": 4, "num_experts_per_tok": 5})
    with pytest.raises(FormatError, match="has 4 num_attention_heads, which 3 num_key_value_heads cannot share"):
        keys.kv_heads(4)
    with pytest.raises(FormatError, match="has num_experts_per_tok = 5, more than num_experts = 4"):
        keys.experts("num_experts")
