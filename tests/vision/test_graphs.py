"""Decode steps after an image are replayed, as those after text are: on a CPU, and on a GPU as CUDA graphs."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.models import family
from auraflux.ops.rope.reference import norm_rope, rope
from auraflux.vision.families import Vision, open_vision
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded
from tests.vision.qwen_models import END, IMAGE, START, make, model_logits, picture

SIZES = [(40, 72), (33, 50)]
TEXT, STEPS = [7, 3, 99, 12, 45, 8], 24


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("qwen")
    return make(folder), folder


def run(folder: Path, device: str, dtype: torch.dtype, kv: str, graphs: bool) -> tuple[Tensor, Engine, list[int]]:
    """Return the logits after a prompt with two images and after each decode step; the engine; the tokens."""
    checkpoint = open_checkpoint(folder)
    config = family(checkpoint.config).Config.from_hf(checkpoint.config)
    vision = open_vision(checkpoint, config, torch.device(device), dtype)
    assert isinstance(vision, Vision), vision
    source = loaded(folder, device=device, dtype=dtype)
    sizes = {"context": 256, "sequences": 2, "chunk": 64}
    engine = Engine(source.model, source.shapes, CacheSettings(kv), dtype=dtype, device=device, graphs=graphs, **sizes)
    images = [vision.processor.prepare(picture(*size)) for size in SIZES]
    ids, spans = place_images([5, *[START, IMAGE, END] * len(images), *TEXT], images, vision.processor)
    sequence = engine.cache.open()
    sequence.inputs = prompt = vision.prompt_images(len(ids), spans)
    prompt.found = [vision.encoder.encode(image) for image in images]
    # chunks end inside both images
    ends = [0, spans[0].start + 7, spans[1].start + 3, len(ids)]
    for start, stop in pairwise(ends):
        hidden = engine.step(engine.cache.batch([sequence]), [ids[start:stop]])
    found = [engine.compute_logits(hidden[-1:])]
    batch = engine.cache.batch([sequence])
    text = [(37 * number) % 240 for number in range(STEPS)]
    found += [engine.decode(batch, [token]) for token in text]
    return torch.cat(found).float().cpu(), engine, [*ids, *text]


@pytest.mark.parametrize("kv", ["none", "k8v4"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_decode_steps_after_images_are_replayed(source, device, kv):
    model, folder = source
    for op in (rope, norm_rope):
        op.declined.clear()
    found, engine, ids = run(folder, device, torch.float32, kv, graphs=True)
    assert engine.graphs.refused is None
    # the position of the last token is smaller than its number
    replayed = [key[0] for key, step in engine.graphs._steps.items() if step.recording and len(step.ids) == 1]
    assert replayed
    assert 0 < min(index.positions.item() for index in replayed) < len(ids) - 30
    # no chunk fell back to the reference
    assert not [reasons for op in (rope, norm_rope) for reasons in op.declined.values()]
    assert torch.equal(found, run(folder, device, torch.float32, kv, graphs=False)[0])
    wanted = model_logits(model, ids, [picture(*size) for size in SIZES])[-STEPS - 1 :]
    if device == "cpu" and kv == "none":
        assert error(found, wanted) < 1e-4
    assert error(found, run(folder, "cpu", torch.float32, kv, graphs=True)[0]) < 1e-3
    assert error(found, wanted) < (1e-3 if kv == "none" else 0.1)


@pytest.mark.gpu
def test_decode_steps_after_images_in_bfloat16(source):
    found, engine, _ = run(source[1], "cuda", torch.bfloat16, "none", graphs=True)
    assert engine.graphs.refused is None
    assert error(found, run(source[1], "cpu", torch.float32, "none", graphs=True)[0]) < 0.03
