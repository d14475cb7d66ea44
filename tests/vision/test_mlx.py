"""Towers as mlx-vlm stores them: other prefixes, and convolutions whose channels are last."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from auraflux.models import family
from auraflux.vision.families import Vision, open_vision
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.vision.qwen_models import picture
from tests.vision.test_mmproj import MODELS, NAMES

PREFIXES = {"model.visual.": "vision_tower.", "model.vision_tower.": "vision_tower.", "model.": ""}
CONVOLUTIONS = "patch_embed.proj.weight", "patch_conv.weight", "patch_embedding.weight"


def as_mlx(folder: Path, target: Path) -> Path:
    """Write a folder's tensors with mlx-vlm's names and layouts."""
    shutil.copytree(folder, target)
    made = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        prefix = next((each for each in PREFIXES if name.startswith(each)), "")
        renamed = PREFIXES.get(prefix, "") + name.removeprefix(prefix)
        made[renamed] = tensor.movedim(1, -1).contiguous() if name.endswith(CONVOLUTIONS) else tensor
    save_file(made, target / "model.safetensors", {"format": "mlx"})
    return target


def opened(folder: Path) -> Vision:
    checkpoint: Any = open_checkpoint(folder)
    language = family(checkpoint.config).Config.from_hf(checkpoint.config)
    found = open_vision(checkpoint, language, torch.device("cpu"), torch.float32, NAMES.get)
    assert isinstance(found, Vision), found
    return found


@pytest.mark.parametrize("name", ["qwen", "gemma3", "gemma4", "pixtral"])
def test_embeddings_are_those_of_the_folder(name, tmp_path):
    (tmp_path / "hf").mkdir()
    MODELS[name][0](tmp_path / "hf")
    theirs, ours = opened(tmp_path / "hf"), opened(as_mlx(tmp_path / "hf", tmp_path / "mlx"))
    image = ours.processor.prepare(picture(37, 91))
    assert torch.equal(ours.encoder.encode(image), theirs.encoder.encode(image))
