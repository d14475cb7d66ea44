"""`read_embedding`: how a checkpoint's files say to make an embedding from hidden states.

They are those of sentence-transformers (modules.json and a config per module), or a GGUF file's pooling type.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from auraflux.errors import FormatError, InputError
from auraflux.weights.fields import NAME, Fields
from auraflux.weights.formats.headers import pooling_type
from auraflux.weights.formats.model_files import check_files
from auraflux.weights.formats.untrusted import FLAG, read_json, read_text

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
# of modules.json, in the order in which they are supported
MODULES = ("Transformer", "Pooling", "Dense", "Normalize")
# of Dense modules
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
SHORTEST = 1e-12  # length to which a vector of zeros is divided


@dataclass(frozen=True)
class Embedding:
    """Settings of embeddings.

    pooling         "last", "mean" or "cls": which hidden states of the tokens are taken
    normalize       whether embeddings have length 1
    prompts         strings to put before the input, by name
    default_prompt  name of the prompt of requests that name none
    refusal         why embeddings cannot be computed as the files say; None if they can
    dense           folders of the Dense modules that follow pooling; those of a GGUF file are tensors
    """

    pooling: str = "last"
    normalize: bool = True
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    refusal: str | None = None
    dense: tuple[str, ...] = ()

    def prompt(self, name: str | None) -> str:
        """Return the text of the prompt of this name; without a name, of the default one."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise InputError(f"The model has no prompt {chosen[:80]!r}. Its prompts: {known}.")
        return self.prompts[chosen]

    def vectors(self, outputs: list[bytes], dimensions: int | None = None) -> np.ndarray:
        """Return the embeddings [N, D] of outputs in float32, cut to `dimensions` and then normalized if the model's are."""
        if not outputs:
            raise InputError("there is no input to embed.")
        found = np.stack([np.frombuffer(output, "<f4") for output in outputs])
        if dimensions is not None and not 1 <= dimensions <= found.shape[1]:
            raise InputError(f"dimensions is {dimensions}, but the model's embeddings have {found.shape[1]}.")
        found = found[:, :dimensions]
        return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), SHORTEST) if self.normalize else found


def usable_embedding(embedding: Embedding | None, name: str) -> Embedding:
    """Return the settings of a model's embeddings; refuse a model that has none."""
    if embedding is None:
        raise InputError(f"The model {name} is not an embedding model: its files name no pooling.")
    if embedding.refusal is not None:
        raise InputError(f"The model {name} cannot embed inputs here: {embedding.refusal}.")
    return embedding


def gguf_embedding(kind: Any) -> Embedding | None:
    """Return how a GGUF file with this pooling type embeds."""
    return Embedding(GGUF_POOLINGS[kind]) if type(kind) is int and kind in GGUF_POOLINGS else None


def read_embedding(path: Path) -> Embedding | None:
    """Return how a model embeds; None for one whose files do not say."""
    config = check_files(path)
    if config is None:
        return gguf_embedding(pooling_type(path))
    if not (path / "modules.json").is_file():
        return None
    modules = _modules(path)
    options = path / "config_sentence_transformers.json"
    about = read_json(options, path) if options.is_file() else {}
    prompts = {str(name): str(text) for name, text in (about.get("prompts") or {}).items() if text is not None}
    pooling, refusal = _pooling(path, modules)
    refusal = refusal or _unsupported(path, config, modules)
    kinds, dense = [kind for kind, _ in modules], tuple(folder for kind, folder in modules if kind == "Dense")
    return Embedding(pooling, "Normalize" in kinds, prompts, about.get("default_prompt_name"), refusal, dense)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the kind and the folder of each module."""
    file = path / "modules.json"
    try:
        found = json.loads(read_text(file, path))
    except (ValueError, RecursionError) as err:
        raise FormatError(f"{file} cannot be read: {err}.") from err
    if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
        raise FormatError(f"{file} is not a list of modules.")
    return [(str(each.get("type", "")).rpartition(".")[2], str(each.get("path", ""))) for each in found]


def _pooling(path: Path, modules: list[tuple[str, str]]) -> tuple[str, str | None]:
    folder = next((folder for kind, folder in modules if kind == "Pooling"), None)
    if folder is None:
        return "last", "its modules.json has no Pooling module"
    settings = read_json(path / folder / "config.json", path)
    named = settings.get("pooling_mode")
    given = [named] if isinstance(named, str) else [key for key, value in settings.items() if "_mode_" in key and value is True]
    if len(given) != 1 or given[0] not in POOLINGS:
        return "last", f"its pooling is {', '.join(map(str, given)) or 'not given'}; last token, mean and cls are supported"
    if settings.get("include_prompt") is False:
        return "last", "its pooling leaves the prompt's tokens out (include_prompt)"
    return POOLINGS[given[0]], None


def _unsupported(path: Path, config: dict[str, Any], modules: list[tuple[str, str]]) -> str | None:
    """Return what the model needs for embeddings and is not supported; None for nothing."""
    text = config.get("text_config") if isinstance(config.get("text_config"), dict) else {}
    if any(settings.get("is_causal") is False for settings in (config, text or {})):
        return "it needs bidirectional attention, which is supported for EmbeddingGemma only"
    kinds = [kind for kind, _ in modules]
    others = [kind for kind in kinds if kind not in MODULES]
    if others:
        return f"its {others[0]} module is not supported"
    if kinds != sorted(kinds, key=MODULES.index):
        return f"its modules are {', '.join(kinds)}; they are supported in the order {', '.join(MODULES)}"
    reasons = (unsupported_dense(dense_config(path, folder)) for kind, folder in modules if kind == "Dense")
    return next((reason for reason in reasons if reason is not None), None)


def dense_config(path: Path, folder: str) -> Fields:
    """Return the config of a model's Dense module."""
    file = path / folder / "config.json"
    return Fields(file, read_json(file, path))


def activation_of(config: Fields) -> str:
    """Return the name of a Dense module's activation function."""
    return config.get("activation_function", NAME, "torch.nn.modules.activation.Tanh").rpartition(".")[2]


def unsupported_dense(config: Fields) -> str | None:
    """Return what a Dense module needs and is not supported; None for nothing."""
    if (activation := activation_of(config)) not in ACTIVATIONS:
        return f"its Dense module has the activation function {activation}; supported are {', '.join(ACTIVATIONS)}"
    if config.get("use_residual", FLAG, False):
        return "its Dense module has a residual connection (use_residual)"
    names = {config.get(key, NAME, "sentence_embedding") for key in ("module_input_name", "module_output_name")}
    if names != {"sentence_embedding"}:
        return f"its Dense module is not for pooled vectors ({', '.join(sorted(names))})"
    return None
