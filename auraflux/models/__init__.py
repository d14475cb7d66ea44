"""Model families, one file each, named after the model_type in config.json.

A family's module has `Config`, `Model`, `rename` and `make_caches`; see docs/adding-a-model.md.
"""

import importlib
from types import ModuleType
from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.boundary import shown

# model_type -> module; several types share a file where only numbers differ
FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "qwen3_moe": "qwen3_moe",
    "qwen3_next": "qwen3_5_moe",
    "qwen3_5": "qwen3_5_moe",
    "qwen3_5_text": "qwen3_5_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "deepseek_v3": "deepseek_v3",
    "gpt_oss": "gpt_oss",
    "gemma3": "gemma3_text",
    "gemma3_text": "gemma3_text",
}


def family_name(config: dict[str, Any]) -> str:
    """The family of a checkpoint's model_type."""
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise FormatError(f"model_type {shown(kind)} is not supported. Those that are: {', '.join(sorted(FAMILIES))}.")
    return FAMILIES[kind]


def family(config: dict[str, Any]) -> ModuleType:
    """The module that knows a checkpoint's model_type."""
    return importlib.import_module(f"auraflux.models.{family_name(config)}")
