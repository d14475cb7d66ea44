"""mlx-lm as an oracle: folders that it quantized, and its logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.oracles import chunked_logits, error, loaded, logits, tokens
from tests.tested import external_oracle

Change = Callable[[dict[str, Any]], dict[str, Any]]


def legacy_config(config: dict[str, Any]) -> dict[str, Any]:
    """Rewrite RoPE settings in the keys used before transformers 5, which mlx-lm reads."""
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    return {**config, "rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}


def quantized(
    folder: Path, target: Path, change: Change, bits: int | None = 4, group: int | None = 32, mode: str = "affine"
) -> Path:
    """Quantize the weights of a folder with mlx-lm; None for the mode's own bits and group."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    model, config = utils.load_model(folder)
    model, config = utils.quantize_model(model, config, group, bits, mode)
    utils.save_model(target, model)
    utils.save_config(config, target / "config.json")
    return target


@external_oracle("mlx-lm")
def mlx_logits(folder: Path, ids: list[int]) -> Tensor:
    """Return the logits of mlx-lm after every token, [T, V]."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    found = model(mx.array([ids]))[0].astype(mx.float32)
    return torch.tensor(found.tolist())


def check_mlx(model: Any, folder: Path, **load: Any) -> None:
    """Compare a folder written by mlx-lm with mlx-lm's logits: in one prefill chunk, and token by token past the windows."""
    ids = tokens(model)
    expected = mlx_logits(folder, ids)
    mine = loaded(folder, **load)
    for found in (logits, chunked_logits):
        assert error(found(mine, ids), expected) < 1e-2
