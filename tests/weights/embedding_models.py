"""Tiny models like EmbeddingGemma in the files of sentence-transformers, and their embeddings by transformers."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tested import external_oracle
from tests.tokenizer.toy_tokenizers import byte_level
from tests.weights.formats.gguf_files import VOCAB, write_gguf

SLIDING, FULL = "sliding_attention", "full_attention"
PROMPTS = {"query": "task: search result | query: ", "document": "title: none | text: "}
# three query heads on one key head, windows shorter than the prompts, both kinds of layers
GEMMA: dict[str, Any] = {
    "vocab_size": 720,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 24,
    "sliding_window": 23,
    "layer_types": [SLIDING, FULL, SLIDING],
    "max_position_embeddings": 400,
    "use_bidirectional_attention": True,
}
WIDTHS = (48, 72, 48)  # of pooled vectors, between the Dense modules, of embeddings


# as architecture gemma-embedding has them: every sixth layer is global
GGUF_GEMMA: dict[str, Any] = {"num_hidden_layers": 7, "layer_types": None, "vocab_size": VOCAB, "query_pre_attn_scalar": 32}


def gemma(**changes: Any) -> Any:
    """Return a random Gemma3TextModel with bidirectional attention."""
    from transformers import Gemma3TextConfig, Gemma3TextModel

    torch.manual_seed(0)
    model = Gemma3TextModel(Gemma3TextConfig(**GEMMA | changes)).float().eval()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.mul_(3)
    return model


def dense_weights() -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(after, before, generator=generator) for before, after in pairwise(WIDTHS)]


def save_modules(folder: Path, weights: list[Tensor], **dense: Any) -> None:
    """Write the files of mean pooling, Dense modules and normalization; `dense` changes the modules' configs."""
    kinds = ["Transformer", "Pooling", *["Dense"] * len(weights), "Normalize"]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds[1:], 1))]
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": PROMPTS, "default_prompt_name": None}))
    for path in paths[1:-1]:
        (folder / path).mkdir(exist_ok=True)
    pooling = {"word_embedding_dimension": WIDTHS[0], "pooling_mode_mean_tokens": True, "include_prompt": True}
    (folder / paths[1] / "config.json").write_text(json.dumps(pooling))
    for path, weight in zip(paths[2:], weights, strict=False):
        sizes = {"in_features": weight.shape[1], "out_features": weight.shape[0], "bias": False}
        config = {**sizes, "activation_function": "torch.nn.modules.linear.Identity", **dense}
        (folder / path / "config.json").write_text(json.dumps(config))
        save_file({"linear.weight": weight}, folder / path / "model.safetensors")


def embedding_gemma(folder: Path, **changes: Any) -> Path:
    """Save a tiny model like EmbeddingGemma with a tokenizer."""
    gemma(**changes).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    save_modules(folder, dense_weights())
    return folder


@external_oracle("transformers")
def hidden_states(folder: Path, tokens: list[list[int]]) -> list[Tensor]:
    """Return transformers' final hidden states of each prompt, [T, H]."""
    from transformers import Gemma3TextModel

    # reloaded: the config halves the window each time it is read
    model = Gemma3TextModel.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([ids])).last_hidden_state[0] for ids in tokens]


def embeddings(folder: Path, tokens: list[list[int]]) -> np.ndarray:
    """Return transformers' embeddings of prompts: pooled, projected and normalized, [N, D]."""
    pooled = torch.stack([hidden.mean(0) for hidden in hidden_states(folder, tokens)])
    for weight in dense_weights():
        pooled = pooled @ weight.T
    return torch.nn.functional.normalize(pooled, dim=1).numpy()


def write_embedding_gguf(path: Path, model: Any, architecture: str = "gemma-embedding") -> Path:
    """Write a model like EmbeddingGemma as llama.cpp's converter does, or with the names of Ollama's."""
    config = model.config
    tensors = {f"model.{name}": tensor.numpy(force=True) for name, tensor in model.state_dict().items()}
    for number, weight in enumerate(dense_weights()):
        # the writer renames these like the model's own tensors
        tensors[f"dense.{number}.weight"] = weight.numpy()
    metadata = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.sliding_window": config.to_dict()["sliding_window"],
        "rope.freq_base": 1000000.0,
        "rope.freq_base_swa": 10000.0,
        "pooling_type": 1,
        "dense_2_feat_in": WIDTHS[0],
        "dense_2_feat_out": WIDTHS[1],
        "dense_3_feat_in": WIDTHS[1],
        "dense_3_feat_out": WIDTHS[2],
    }
    return write_gguf(path, tensors, "F32", architecture, metadata, tokenizer=True)
