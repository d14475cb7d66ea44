"""Qwen3.5's images against transformers: pixels, the tower's embeddings, positions and logits."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.vision.families import Vision, open_vision
from auraflux.vision.image import decode_image
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded
from tests.vision.qwen_models import END, IMAGE, START, file_of, make, model_logits, patches, picture

CPU = torch.device("cpu")
SHAPES = [(37, 91), (8, 8), (200, 31), (64, 64), (5, 90), (131, 77)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return make(folder)


@pytest.fixture(scope="module")
def vision(folder: Path, model: Any) -> Vision:
    checkpoint = open_checkpoint(folder)
    found = open_vision(checkpoint, family(checkpoint.config).Config.from_hf(checkpoint.config), CPU, torch.float32)
    assert isinstance(found, Vision), found
    return found


def prompt(vision: Vision, sizes: list[tuple[int, int]], seed: int = 0) -> tuple[list[int], tuple, list]:
    """Return a prompt with random text around images, its spans, and the images."""
    chance = np.random.default_rng(seed)
    images = [picture(*size, seed=seed + number) for number, size in enumerate(sizes)]
    ids: list[int] = []
    for _ in images:
        ids += [*chance.integers(0, 240, chance.integers(0, 9)).tolist(), START, IMAGE, END]
    ids += chance.integers(0, 240, 7).tolist()
    made, spans = place_images(ids, [vision.processor.prepare(image) for image in images], vision.processor)
    return made, spans, images


def step_logits(engine: Engine, vision: Vision, ids: list[int], spans: tuple, chunks: list[int]) -> torch.Tensor:
    """Return the logits of a prompt computed in chunks of these sizes."""
    sequence = engine.cache.open()
    images = vision.prompt_images(len(ids), spans)
    images.found = [vision.encoder.encode(span.image) for span in spans]
    sequence.inputs = images
    found, at = [], 0
    for count in [*chunks, len(ids) - sum(chunks)]:
        batch = engine.cache.batch([sequence])
        found.append(engine.compute_logits(engine.step(batch, [ids[at : at + count]])))
        at += count
    sequence.close()
    return torch.cat(found)


@pytest.mark.parametrize("size", SHAPES)
def test_embeddings(model, vision, size):
    image = picture(*size)
    wanted = patches([image])
    prepared = vision.processor.prepare(image)
    assert torch.equal(vision.encoder.tower.patchify(prepared), wanted["pixel_values"])
    assert (1, *(2 * side for side in prepared.grid)) == tuple(wanted["image_grid_thw"][0].tolist())
    with torch.no_grad():
        theirs = model.model.visual(wanted["pixel_values"], wanted["image_grid_thw"]).pooler_output
    assert error(vision.encoder.encode(prepared), theirs) < 1e-5


@pytest.mark.parametrize("sizes", [[(40, 40)], [(37, 91), (64, 20)], [(9, 80), (50, 50), (31, 31)]])
def test_positions(model, vision, sizes):
    ids, spans, images = prompt(vision, sizes)
    tokens = torch.tensor([ids])
    wanted, delta = model.model.get_rope_index(tokens, (tokens == IMAGE).int(), patches(images)["image_grid_thw"])
    found = vision.prompt_images(len(ids), spans)
    each = found.positions(0, len(ids))
    axes = torch.from_numpy(found.axes)
    assert torch.equal(torch.from_numpy(each).long(), wanted[:, 0].T[:, axes])
    assert found.position(len(ids) + 3) == len(ids) + 3 + int(delta)
    assert found.positions(len(ids) - 2, len(ids) + 2).tolist() == [len(ids) + n + int(delta) for n in range(-2, 2)]


@pytest.mark.parametrize("kv", ["none", "k8v8"])
@pytest.mark.parametrize("sizes", [[(40, 72)], [(37, 91), (64, 20)]])
def test_logits(model, vision, folder, sizes, kv):
    ids, spans, images = prompt(vision, sizes, seed=3)
    wanted = model_logits(model, ids, images)
    source = loaded(folder)
    engine = Engine(source.model, source.shapes, CacheSettings(kv), context=512, chunk=512, exact=True)
    inside = spans[0].start + 1
    for chunks in ([], [inside, 1, 1], [spans[0].stop]):
        found = step_logits(engine, vision, ids, spans, chunks)
        assert error(found, wanted) < (1e-5 if kv == "none" else 0.05)


MODES = ("RGB", "RGBA", "L", "LA", "P", "1")


def test_preprocessing_equals_transformers_on_odd_images(vision):
    chance = np.random.default_rng(5)
    for number in range(200):
        width, height = chance.integers(1, 150, 2).tolist()
        if max(width, height) > 150 * min(width, height):
            continue
        file = file_of(picture(width, height, seed=number, mode=MODES[number % len(MODES)]))
        image = Image.open(io.BytesIO(file))
        wanted = patches([image])
        prepared = vision.processor.prepare(decode_image(file))
        assert torch.equal(vision.encoder.tower.patchify(prepared), wanted["pixel_values"]), (width, height, image.mode)
