"""What mlx-lm makes of tiny models: folders it has quantized, and its scores."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.oracles import error, loaded, scores, tokens, written_scores
from tests.tested import outside

Change = Callable[[dict[str, Any]], dict[str, Any]]


def in_older_words(config: dict[str, Any]) -> dict[str, Any]:
    """Say rotation as config files did before transformers 5, and as mlx-lm reads it."""
    rope = config.pop("rope_parameters")
    theta = rope.pop("rope_theta")
    return {**config, "rope_theta": theta, "rope_scaling": None if rope["rope_type"] == "default" else rope}


def quantized(folder: Path, target: Path, change: Change, bits: int = 4, group: int = 32) -> Path:
    """Let mlx-lm round the weights of a folder to codes."""
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx-lm is not installed")
    path = folder / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    model, config = utils.load_model(folder)
    model, config = utils.quantize_model(model, config, group, bits)
    utils.save_model(target, model)
    utils.save_config(config, target / "config.json")
    return target


@outside("mlx-lm")
def mlx_scores(folder: Path, ids: list[int]) -> Tensor:
    """What mlx-lm says after every token, [T, V]."""
    import mlx.core as mx
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    found = model(mx.array([ids]))[0].astype(mx.float32)
    return torch.tensor(found.tolist())


def check_mlx(model: Any, folder: Path, **load: Any) -> None:
    """Hold a folder that mlx-lm wrote to what mlx-lm says: prefilled at once, and token by token past the windows."""
    ids = tokens(model)
    wanted = mlx_scores(folder, ids)
    mine = loaded(folder, **load)
    for found in (scores, written_scores):
        assert error(found(mine, ids), wanted) < 1e-2
