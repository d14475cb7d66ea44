"""`read_embedding`: how a checkpoint's files say to make an embedding from hidden states.

They are those of sentence-transformers (modules.json and a pooling config), or a GGUF file's pooling type.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from auraflux.errors import FormatError
from auraflux.weights.formats.headers import pooling_type
from auraflux.weights.formats.model_files import check_files

# names of sentence-transformers, newer and older
POOLINGS = {
    "lasttoken": "last",
    "mean": "mean",
    "cls": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
GGUF_POOLINGS = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True)
class Embedding:
    """Settings of embeddings.

    pooling         "last", "mean" or "cls": which hidden states of the tokens are taken
    normalize       whether embeddings have length 1
    prompts         strings to put before the input, by name
    default_prompt  name of the prompt of requests that name none
    refusal         why embeddings cannot be computed as the files say; None if they can
    """

    pooling: str = "last"
    normalize: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    refusal: str | None = None


def read_embedding(path: Path) -> Embedding | None:
    """Return how a model embeds; None for one whose files do not say."""
    config = check_files(path)
    if config is None:
        kind = pooling_type(path)
        return None if kind not in GGUF_POOLINGS else Embedding(GGUF_POOLINGS[kind])
    if not (path / "modules.json").is_file():
        return None
    modules = _json(path / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(each, dict) for each in modules):
        raise FormatError(f"{path / 'modules.json'} is not a list of modules.")
    kinds = [str(each.get("type", "")).rpartition(".")[2] for each in modules]
    options = path / "config_sentence_transformers.json"
    about = _json(options) if options.is_file() else {}
    prompts = {str(name): str(text) for name, text in (about.get("prompts") or {}).items() if text is not None}
    pooling, refusal = _pooling(path, modules, kinds)
    refusal = refusal or _unsupported(config, kinds)
    return Embedding(pooling, "Normalize" in kinds, prompts, about.get("default_prompt_name"), refusal)


def _pooling(path: Path, modules: list[dict[str, Any]], kinds: list[str]) -> tuple[str, str | None]:
    if "Pooling" not in kinds:
        return "last", "its modules.json has no Pooling module"
    file = path / str(modules[kinds.index("Pooling")].get("path", "")) / "config.json"
    settings = _json(file)
    named = settings.get("pooling_mode")
    given = [named] if isinstance(named, str) else [key for key, value in settings.items() if "_mode_" in key and value is True]
    if len(given) != 1 or given[0] not in POOLINGS:
        return "last", f"its pooling is {', '.join(map(str, given)) or 'not given'}; last token, mean and cls are supported"
    if settings.get("include_prompt") is False:
        return "last", "its pooling leaves the prompt's tokens out (include_prompt)"
    return POOLINGS[given[0]], None


def _unsupported(config: dict[str, Any], kinds: list[str]) -> str | None:
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    for settings in (config, text or {}):
        if settings.get("use_bidirectional_attention") or settings.get("is_causal") is False:
            return "it needs bidirectional attention, and attention here is causal"
    others = [kind for kind in kinds if kind not in ("Transformer", "Pooling", "Normalize")]
    return f"its {others[0]} module is not supported" if others else None


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as err:
        raise FormatError(f"{file} cannot be read: {getattr(err, 'strerror', None) or err}.") from err
