"""Default sampling settings of a model, for requests that leave settings out.

Each setting comes from the first that has it: the options the model was loaded with (`--temperature` and the like), the
model's recommendation, `defaults.TEMPERATURE`. The recommendation is generation_config.json of a folder, or
`general.sampling.*` of a GGUF file; for files without one, `defaults.SAMPLING_OF` lists those of known models.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from auraflux.defaults import SAMPLING_OF, TEMPERATURE
from auraflux.engine.sampling import MAX_PENALTY, MAX_TEMPERATURE, DefaultSampling
from auraflux.tokenizer.tokenizer_config import read_fields
from auraflux.weights.fields import Fields
from auraflux.weights.formats.stored import Checkpoint
from auraflux.weights.formats.untrusted import FLAG, Kind, integer, number

GENERATION_CONFIG = "generation_config.json"
UNFILTERED = 1.0  # temperature of transformers where do_sample is true and there is no other
LEAST_TOP_P = 1e-6
SHARE, PENALTY = number(0, 1), number(-MAX_PENALTY, MAX_PENALTY)
KINDS: dict[str, Kind[Any]] = {
    "temperature": number(0, MAX_TEMPERATURE),
    "top_p": SHARE,
    "top_k": integer(-1, 1 << 31),
    "min_p": SHARE,
    "repetition_penalty": number(1e-6, MAX_PENALTY),
    "presence_penalty": PENALTY,
    "frequency_penalty": PENALTY,
}
# llama.cpp's keys; it has more, of samplers that this package lacks
GGUF_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def default_sampling(checkpoint: Checkpoint, options: Mapping[str, Any]) -> DefaultSampling:
    """Return the default sampling settings of a model that is loaded with options."""
    recommended, source = _recommended(checkpoint)
    if options:
        source = f"options, {source}" if recommended else "options"
    return DefaultSampling(**{"temperature": TEMPERATURE, **recommended, **options}, source=source)


def _recommended(checkpoint: Checkpoint) -> tuple[dict[str, Any], str]:
    """Return the settings that are recommended for a model, and where they come from."""
    folder = checkpoint.path.is_dir()
    found = _of_folder(checkpoint.path) if folder else _of_gguf(checkpoint)
    if found:
        return found, GENERATION_CONFIG if folder else "GGUF metadata"
    kind, name = checkpoint.config.get("model_type"), _name(checkpoint).lower()
    for model_type, title, settings in SAMPLING_OF:
        if kind == model_type and title.lower() in name:
            return dict(settings), f"recommended for {title}"
    return {}, "default"


def _of_folder(folder: Path) -> dict[str, Any]:
    config = read_fields(folder, GENERATION_CONFIG)
    found = _accepted(config, {name: name for name in KINDS})
    sampled = config.get("do_sample", FLAG, None)
    if sampled is not None:
        found.setdefault("temperature", UNFILTERED if sampled else 0.0)
    return found


def _of_gguf(checkpoint: Checkpoint) -> dict[str, Any]:
    metadata: Mapping[str, Any] = checkpoint.metadata  # type: ignore[attr-defined]
    keys = {name: f"general.sampling.{key}" for name, key in GGUF_KEYS.items()}
    # the file stores float32: 0.949999988 means 0.95
    stored = {key: float(str(np.float32(value))) if isinstance(value, float) else value for key, value in metadata.items()}
    return _accepted(Fields(checkpoint.path, {key: stored.get(key) for key in keys.values()}), keys)


def _accepted(config: Fields, keys: Mapping[str, str]) -> dict[str, Any]:
    found = {name: value for name, key in keys.items() if (value := config.get(key, KINDS[name], None)) is not None}
    if "top_k" in found:
        found["top_k"] = max(found["top_k"], 0)
    if "top_p" in found:
        found["top_p"] = max(found["top_p"], LEAST_TOP_P)
    return found


def _name(checkpoint: Checkpoint) -> str:
    """Return the model's name: that in GGUF metadata, the repository's in a Hugging Face cache, or the folder's."""
    path = checkpoint.path
    if not path.is_dir():
        metadata: Mapping[str, Any] = checkpoint.metadata  # type: ignore[attr-defined]
        return f"{metadata.get('general.basename', '')} {metadata.get('general.name', path.stem)}"
    return next((part for part in path.parts if part.startswith("models--")), path.name)
