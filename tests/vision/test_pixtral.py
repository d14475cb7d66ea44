"""Mistral 3's images against transformers: pixels, the tower's embeddings, and logits."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Mistral3Config, Mistral3ForConditionalGeneration
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.vision.families import Vision, open_vision
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded, save
from tests.tested import external_oracle
from tests.vision.greedy import COUNT, greedy_tokens
from tests.vision.qwen_models import picture
from tests.vision.test_qwen import step_logits

IMAGE, BREAK, END = 100, 101, 102
PREPROCESSOR = {"size": {"longest_edge": 70}, "patch_size": {"height": 8, "width": 8}}
TEXT = {"vocab_size": 120, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "patch_size": 4,
    "image_size": 70,
    "hidden_act": "silu",
}


def make(path: Path, kind: str) -> Any:
    """Save a model of transformers, whose text part has this type."""
    torch.manual_seed(0)
    text = {**TEXT, "model_type": kind, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
    config = Mistral3Config(text_config=text, vision_config=VISION, image_token_index=IMAGE, tie_word_embeddings=False)
    model = Mistral3ForConditionalGeneration(config).eval()
    save(model, path)
    (path / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return model


@pytest.fixture(scope="module", params=["mistral", "ministral3"])
def made(request, tmp_path_factory) -> tuple[Any, Path, Vision]:
    """A model of transformers, its folder, and its tower here."""
    path = tmp_path_factory.mktemp(request.param)
    model = make(path, request.param)
    checkpoint = open_checkpoint(path)
    language = family(checkpoint.config).Config.from_hf(checkpoint.config)
    names = {"[IMG_BREAK]": BREAK, "[IMG_END]": END}
    vision = open_vision(checkpoint, language, torch.device("cpu"), torch.float32, names.get)
    assert isinstance(vision, Vision), vision
    return model, path, vision


def pixels(image: Image.Image) -> Tensor:
    """Return the pixels that transformers makes of an image, [1, 3, H, W]."""
    return PixtralImageProcessorPil(**PREPROCESSOR)([image], return_tensors="pt")["pixel_values"]


@external_oracle("transformers")
def theirs(model: Any, ids: list[int], images: list[Image.Image]) -> Tensor:
    """Return the logits of transformers after each token of a prompt with images, [T, V]."""
    found = PixtralImageProcessorPil(**PREPROCESSOR)(images, return_tensors="pt")
    with torch.no_grad():
        return model(torch.tensor([ids]), **found).logits[0].float()


@pytest.mark.parametrize("size", [(37, 91), (17, 8), (200, 31), (5, 90), (131, 77)])
def test_embeddings(made, size):
    model, _, vision = made
    image = picture(*size)
    wanted, prepared = pixels(image), vision.processor.prepare(image)
    blocks = vision.encoder.tower.patchify(prepared)
    height, width = wanted.shape[2:]
    assert prepared.grid == (height // 8, width // 8)
    cut = wanted[0].view(3, height // 4, 4, width // 4, 4).permute(1, 3, 0, 2, 4)
    assert torch.equal(blocks, cut.reshape(blocks.shape))
    with torch.no_grad():
        features = model.model.get_image_features(wanted, torch.tensor([[height, width]]), vision_feature_layer=-1)
    assert error(vision.encoder.encode(prepared), features.pooler_output[0]) < 1e-5


def test_pixels_of_odd_images(made):
    vision, chance = made[2], np.random.default_rng(5)
    for number in range(200):
        width, height = chance.integers(1, 150, 2).tolist()
        if 70 * min(width, height) < max(width, height):
            # transformers resizes it to no pixels
            continue
        image = picture(width, height, seed=number)
        prepared, wanted = vision.processor.prepare(image), pixels(image)
        found = vision.encoder.tower.patchify(prepared)
        rows, columns = (2 * side for side in prepared.grid)
        laid = found.view(rows, columns, 3, 4, 4).permute(2, 0, 3, 1, 4).reshape(wanted.shape[1:])
        assert torch.equal(laid, wanted[0]), (width, height)


def test_logits(made):
    model, path, vision = made
    images = [picture(60, 33), picture(20, 50, seed=2)]
    ids, spans = place_images(
        [1, 5, IMAGE, 7, 8, IMAGE, 3, 9, 4], [vision.processor.prepare(image) for image in images], vision.processor
    )
    assert ids[spans[0].stop - 1] == END
    assert ids.count(BREAK) == sum(span.image.grid[0] - 1 for span in spans)
    wanted = theirs(model, ids, images)
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
    found = PixtralImageProcessorPil(**PREPROCESSOR)(images, return_tensors="pt")
    options = {"max_new_tokens": COUNT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    wanted = model.generate(torch.tensor([ids]), **found, **options)[0, len(ids) :].tolist()
    assert greedy_tokens(path, vision, ids, spans) == wanted
