"""Kimi K2.5's images against transformers: the tower's embeddings and logits, and the hub's names and settings."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, Kimi_K25Config, Kimi_K25ForConditionalGeneration

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.vision.families import NoVision, Vision, open_vision
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded
from tests.models.test_deepseek_v3 import SMALL, saved, sharpen_routers
from tests.tested import external_oracle
from tests.vision.greedy import COUNT, greedy_tokens
from tests.vision.qwen_models import picture
from tests.vision.test_qwen import step_logits

IMAGE = 250
VISION = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": 4,
    "pos_emb_height": 6,
    "pos_emb_width": 6,
}
MEAN, STD = [0.5, 0.4, 0.3], [0.5, 0.6, 0.7]
HUB_SETTINGS = {"patch_size": 4, "merge_kernel_size": 2, "in_patch_limit": 128, "patch_limit_on_one_side": 24}
HUB_KEYS = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}


def make(path: Path) -> Any:
    """Save a model of transformers in the layout of the hub; return it."""
    torch.manual_seed(0)
    text = DeepseekV3Config(**SMALL)
    sizes = {"projection_hidden_size": 48, "vision_config": VISION, "tie_word_embeddings": False}
    model = sharpen_routers(Kimi_K25ForConditionalGeneration(Kimi_K25Config(text_config=text, image_token_id=IMAGE, **sizes)))
    with torch.no_grad():
        model.model.vision_tower.patch_embed.pos_emb.position_embeddings.normal_()
    saved(model.eval(), path)
    (path / "preprocessor_config.json").write_text(
        json.dumps({"media_proc_cfg": {**HUB_SETTINGS, "image_mean": MEAN, "image_std": STD}})
    )
    return model


def opened(path: Path) -> Vision | NoVision:
    checkpoint = open_checkpoint(path)
    language = family(checkpoint.config).Config.from_hf(checkpoint.config)
    return open_vision(checkpoint, language, torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> tuple[Any, Path, Vision]:
    """A model of transformers, its folder, and its tower here."""
    path = tmp_path_factory.mktemp("kimi")
    model, vision = make(path), opened(path)
    assert isinstance(vision, Vision), vision
    return model, path, vision


def pixels(vision: Vision, images: list[Image.Image]) -> dict[str, Tensor]:
    """Return what transformers' tower takes for images resized and padded by Pillow, as the hub's processor does it."""
    found, grids = [], []
    for image in images:
        (height, width), (rows, columns) = (
            vision.processor.size(image.height, image.width),
            vision.processor.prepare(image).grid,
        )
        padded = Image.new("RGB", (8 * columns, 8 * rows))
        padded.paste(image.resize((width, height), Image.Resampling.BICUBIC))
        scaled = (np.asarray(padded) / 255 - MEAN) / STD
        cut = torch.tensor(scaled).float().view(2 * rows, 4, 2 * columns, 4, 3).permute(0, 2, 4, 1, 3)
        found.append(cut.flatten(0, 1))
        grids.append([1, 2 * rows, 2 * columns])
    return {"pixel_values": torch.cat(found), "image_grid_thw": torch.tensor(grids)}


@external_oracle("transformers")
def theirs(model: Any, vision: Vision, ids: list[int], images: list[Image.Image]) -> Tensor:
    """Return the logits of transformers after each token of a prompt with images, [T, V]."""
    with torch.no_grad():
        return model(torch.tensor([ids]), **pixels(vision, images)).logits[0].float()


# width and height -> height and width after resizing, and the grid of patches: those of transformers 5.22.2's navit_resize
RESIZED = {
    (37, 31): ((31, 37), (8, 10)),
    (48, 48): ((45, 45), (12, 12)),
    (200, 31): ((14, 96), (4, 24)),
    (5, 90): ((90, 5), (24, 2)),
    (131, 77): ((35, 60), (10, 16)),
    (1, 1): ((1, 1), (2, 2)),
    (400, 10): ((2, 96), (2, 24)),
    (64, 32): ((32, 64), (8, 16)),
    (33, 97): ((79, 26), (20, 8)),
}


@pytest.mark.parametrize("size", RESIZED)
def test_sizes(made, size):
    processor = made[2].processor
    wanted, (rows, columns) = RESIZED[size]
    assert processor.size(*size[::-1]) == wanted
    assert processor.prepare(picture(*size)).grid == (rows // 2, columns // 2)


@pytest.mark.parametrize("size", [(37, 91), (17, 8), (24, 24), (200, 31), (5, 90), (131, 77), (3, 3)])
def test_embeddings(made, size):
    model, _, vision = made
    image = picture(*size)
    wanted, prepared = pixels(vision, [image]), vision.processor.prepare(image)
    blocks = vision.encoder.tower.patchify(prepared)
    assert error(blocks, wanted["pixel_values"].flatten(1)) < 1e-6
    with torch.no_grad():
        features = model.model.get_image_features(**wanted).pooler_output[0]
    assert error(vision.encoder.encode(prepared), features) < 1e-5


def test_logits(made):
    model, path, vision = made
    images = [picture(60, 33), picture(20, 50, seed=2)]
    ids, spans = place_images(
        [1, 5, IMAGE, 7, 8, IMAGE, 3, 9, 4], [vision.processor.prepare(image) for image in images], vision.processor
    )
    wanted = theirs(model, vision, ids, images)
    source = loaded(path)
    engine = Engine(source.model, source.shapes, CacheSettings("none"), context=512, chunk=512, exact=True)
    for chunks in ([], [spans[0].start + 3, 1], [spans[0].stop]):
        assert error(step_logits(engine, vision, ids, spans, chunks), wanted) < 1e-5


def test_greedy_tokens_are_those_of_transformers(made):
    model, path, vision = made
    images = [picture(60, 33), picture(20, 50, seed=2)]
    ids, spans = place_images(
        [1, 5, IMAGE, 7, 8, IMAGE, 3, 9, 4], [vision.processor.prepare(image) for image in images], vision.processor
    )
    options = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(torch.tensor([ids]), **pixels(vision, images), **options)[0, len(ids) :].tolist()
    assert greedy_tokens(path, vision, ids, spans) == wanted


def hub_keys(model: Any, folder: Path) -> None:
    """Write a config.json with the keys of the hub."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["media_placeholder_token_id"] = config.pop("image_token_id")
    config["vision_config"] = {HUB_KEYS.get(key, key): value for key, value in config["vision_config"].items()}
    path.write_text(json.dumps(config))


def own_names(model: Any, folder: Path) -> None:
    """Write the tower's tensors as the model of transformers names them."""
    text = {name: each for name, each in load_file(folder / "model.safetensors").items() if "language_model" in name}
    tower = {name: each for name, each in model.state_dict().items() if "vision_tower" in name or "mm_projector" in name}
    save_file({**text, **tower}, folder / "model.safetensors")


def mlx_names(model: Any, folder: Path) -> None:
    """Write the tower's tensors with mlx-vlm's names and layouts."""
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("vision_tower.encoder.", "vision_tower."): each for name, each in tensors.items()}
    tensors = {name.replace(".wqkv.", ".attn.wqkv.").replace(".wo.", ".attn.wo."): each for name, each in tensors.items()}
    weight = "vision_tower.patch_embed.proj.weight"
    tensors[weight] = tensors[weight].movedim(1, -1).contiguous()
    save_file(tensors, folder / "model.safetensors", {"format": "mlx"})


@pytest.mark.parametrize("rewrite", [hub_keys, own_names, mlx_names])
def test_other_names(made, tmp_path, rewrite):
    model, path, vision = made
    folder = Path(shutil.copytree(path, tmp_path / "model"))
    rewrite(model, folder)
    other = opened(folder)
    assert isinstance(other, Vision), other
    assert other.processor == vision.processor
    prepared = vision.processor.prepare(picture(37, 91))
    assert error(other.encoder.encode(prepared), vision.encoder.encode(prepared)) < 1e-6


def test_a_tower_with_another_projector_is_refused(made, tmp_path):
    folder = Path(shutil.copytree(made[1], tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["mm_projector_type"] = "mlp"
    (folder / "config.json").write_text(json.dumps(config))
    found = opened(folder)
    assert isinstance(found, NoVision)
    assert "mm_projector_type" in found.reason
