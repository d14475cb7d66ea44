"""Shapes of real models, to be filled with random weights: speed does not depend on the values of weights.

Each shape is a Hugging Face config in `NAME.json`. A name that ends with `-4layer` has four layers of its model, dense ones and
MoE ones. `qwen4-exp` has the defaults of its config class; which of its layers read n-grams is an assumption.
"""

import json
import re
from importlib import resources
from typing import Any

from auraflux.errors import InputError

# the shapes that docs/kernels.md shows and that are compiled ahead of time
MAIN_SHAPES = ("qwen3-30b-a3b", "qwen3.6-35b-a3b", "llama-8b", "deepseek-v3-4layer")


def shape_names() -> list[str]:
    """List all shapes, the main ones first."""
    stored = {entry.name.removesuffix(".json") for entry in resources.files(__name__).iterdir() if entry.name.endswith(".json")}
    return [*MAIN_SHAPES, *sorted(stored.difference(MAIN_SHAPES))]


def shape_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """Load the config of a named shape, with only `layers` layers if a number is given."""
    names = shape_names()
    if name not in names:
        raise InputError(f"there is no shape {name!r}. Those there are: {', '.join(names)}.")
    config: dict[str, Any] = json.loads((resources.files(__name__) / f"{name}.json").read_text("utf-8"))
    return config if layers is None else _cut(config, layers)


def _cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][-layers:]
    if "hybrid_override_pattern" in config:
        # a layer is one or two blocks; the first few have all kinds
        blocks = "".join(re.findall(r"[M*][E-]?", config["hybrid_override_pattern"])[:layers])
        return config | {"hybrid_override_pattern": blocks, "num_hidden_layers": len(blocks)}
    if "ple_layer_ids" in config:
        config["ple_layer_ids"] = [number for number in config["ple_layer_ids"] if number <= layers]
    if "num_kv_shared_layers" in config:
        removed = config["num_hidden_layers"] - layers
        config["num_kv_shared_layers"] = max(0, config["num_kv_shared_layers"] - removed)
    return config | {"num_hidden_layers": layers}
