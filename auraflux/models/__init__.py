"""Model families, one file each, named after the model_type in config.json.

A family's module has `Config`, `Model`, `rename` and `make_caches`; see docs/adding-a-model.md.
"""

import importlib
from types import ModuleType
from typing import Any

from auraflux.errors import FormatError
from auraflux.models.config import WRAPPERS, text_type
from auraflux.weights.formats.untrusted import shown

# model_type -> module; several types share a file where only numbers differ
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "llama4": "llama4_text",
    "llama4_text": "llama4_text",
    "qwen2": "llama",
    "qwen3": "llama",
    "ministral3": "llama",
    "qwen3_moe": "qwen3_moe",
    "qwen2_moe": "qwen3_moe",
    "olmoe": "qwen3_moe",
    "mixtral": "qwen3_moe",
    "dbrx": "dbrx",
    "phimoe": "phimoe",
    "flex_olmo": "flex_olmo",
    "qwen3_next": "qwen3_5_moe",
    "qwen3_5": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen4_exp": "qwen4_exp",
    "qwen4_exp_text": "qwen4_exp",
    "deepseek_v2": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "kimi_k2": "deepseek_v3",
    "kimi_k25": "deepseek_v3",
    "glm4_moe_lite": "deepseek_v3",
    "mistral4": "deepseek_v3",
    "deepseek_v32": "deepseek_v32",
    "glm_moe_dsa": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "kimi_linear": "kimi_linear",
    "bailing_hybrid": "bailing_hybrid",
    "nemotron_h": "nemotron_h",
    "glm4_moe": "glm4_moe",
    "minimax": "minimax",
    "minimax_m2": "glm4_moe",
    "solar_open": "glm4_moe",
    "dots1": "glm4_moe",
    "hy_v3": "glm4_moe",
    "hy_v4": "hy_v4",
    "exaone_moe": "glm4_moe",
    "mellum": "qwen3_moe",
    "afmoe": "afmoe",
    "muse_glimmer": "muse_glimmer_text",
    "muse_glimmer_text": "muse_glimmer_text",
    "laguna": "laguna",
    "mimo_v2_flash": "mimo_v2_flash",
    "axk1": "deepseek_v3",
    "axk2": "axk2",
    "granitemoe": "granitemoe",
    "granitemoeshared": "granitemoe",
    "granitemoe_swa": "granitemoe",
    "granitemoehybrid": "granitemoehybrid",
    "step3p7": "step3p7",
    "step3p5": "step3p7",
    "hunyuan_v1_moe": "hunyuan_v1_moe",
    "kolibri1": "kolibri1",
    "longcat_flash": "longcat_flash",
    "minimax_m3_vl": "minimax_m3_vl",
    "minimax_m3_vl_text": "minimax_m3_vl",
    "cohere2_moe": "cohere2_moe",
    "lfm2_moe": "lfm2_moe",
    "ernie4_5_moe": "ernie4_5_moe",
    "gpt_oss": "gpt_oss",
    "gemma3": "gemma3_text",
    "gemma3_text": "gemma3_text",
    "gemma4": "gemma4_text",
    "gemma4_text": "gemma4_text",
    "gemma4_unified": "gemma4_text",
    "gemma4_unified_text": "gemma4_text",
}


def family_name(config: dict[str, Any]) -> str:
    """Return the family of a checkpoint's model_type."""
    kind = text_type(config)
    if kind not in FAMILIES:
        known = ", ".join(sorted({*FAMILIES, *WRAPPERS}))
        raise FormatError(f"model_type {shown(kind)} is not supported. Those that are: {known}.")
    return FAMILIES[kind]


def family(config: dict[str, Any]) -> ModuleType:
    """Import the module of a checkpoint's model_type."""
    return importlib.import_module(f"auraflux.models.{family_name(config)}")
