"""Gemma 4's images against transformers: pixels, the tower's embeddings, logits, and greedy tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Gemma4Config, Gemma4ForConditionalGeneration
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.engine.request import Request
from auraflux.engine.sampling import Sampling
from auraflux.models import family
from auraflux.scheduler.scheduler import Scheduler
from auraflux.vision.families import NoVision, Vision, open_vision
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded, save
from tests.models.test_gemma4_text import MIXTURE, SMALL, SMALL_VARIANT, randomize_scales
from tests.tested import external_oracle
from tests.vision.qwen_models import picture
from tests.vision.test_generation import run
from tests.vision.test_qwen import step_logits

START, END, IMAGE, PADDING = 250, 251, 252, 3
QUESTION = [7, 3, 99, 12, 45]
TOKENS = 70
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # in both directions, heads that share keys
    "mixture": (
        {**SMALL, **MIXTURE, "use_bidirectional_attention": "vision"},
        {"patch_size": 4, "pooling_kernel_size": 2, "num_key_value_heads": 1, "standardize": True},
    ),
    # per-layer inputs, clipped ranges
    "small": (
        {**SMALL, **SMALL_VARIANT},
        {"patch_size": 3, "pooling_kernel_size": 3, "num_key_value_heads": 3, "use_clipped_linears": True},
    ),
}
VISION = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "head_dim": 12,
    "position_embedding_size": 1024,
}


class Made:
    """A model of transformers, its folder, and its tower here."""

    def __init__(self, folder: Path, text: dict[str, Any], vision: dict[str, Any]):
        torch.manual_seed(0)
        config = Gemma4Config(
            text_config={**text, "pad_token_id": PADDING},
            vision_config={**VISION, **vision},
            boi_token_id=START,
            eoi_token_id=END,
            image_token_id=IMAGE,
            # other modalities that the prompts must not hit
            video_token_id=258,
            audio_token_id=257,
        )
        self.model = randomize_scales(Gemma4ForConditionalGeneration(config)).eval()
        with torch.no_grad():
            self.model.model.vision_tower.patch_embedder.position_embedding_table.normal_()
            for name, buffer in self.model.model.vision_tower.named_buffers():
                if name.endswith(("std_bias", "std_scale")):
                    buffer.uniform_(0.5, 1.5)
                elif name.endswith("_max"):
                    buffer.fill_(0.6)
                elif name.endswith("_min"):
                    buffer.fill_(-0.7)
        self.folder = save(self.model, folder)
        self.sizes = {key: vision[key] for key in ("patch_size", "pooling_kernel_size")}
        (folder / "preprocessor_config.json").write_text(json.dumps({**self.sizes, "max_soft_tokens": TOKENS}))
        checkpoint = open_checkpoint(folder)
        language = family(checkpoint.config).Config.from_hf(checkpoint.config)
        found = open_vision(checkpoint, language, torch.device("cpu"), torch.float32)
        assert isinstance(found, Vision), found
        self.vision, self.open = (
            found,
            lambda **options: open_vision(checkpoint, language, torch.device("cpu"), torch.float32, **options),
        )

    def pixels(self, images: list[Image.Image]) -> dict[str, Tensor]:
        """Return the patches of transformers and their places."""
        made = dict(Gemma4ImageProcessorPil(**self.sizes, max_soft_tokens=TOKENS)(images, return_tensors="pt"))
        made.pop("num_soft_tokens_per_image")
        return made

    def engine(self, kv: str = "none", **options: Any) -> Engine:
        source = loaded(self.folder)
        sizes = {"context": 320, "chunk": 96, "sequences": 4, **options}
        engine = Engine(source.model, source.shapes, CacheSettings(kv), exact=True, **sizes)
        engine.vision = self.vision
        return engine

    def prompt(self, images: list[Image.Image], question: list[int] = QUESTION) -> tuple[list[int], tuple]:
        prepared = [self.vision.processor.prepare(image) for image in images]
        return place_images([5, 17, *[IMAGE, 8] * len(images), *question], prepared, self.vision.processor)

    def tokens(self, ids: list[int], spans: tuple) -> dict[str, Tensor]:
        """Return a prompt as transformers takes it, with the token of images."""
        made = torch.tensor([ids])
        for span in spans:
            made[0, span.start : span.stop] = IMAGE
        return {"input_ids": made, "mm_token_type_ids": (made == IMAGE).int()}

    @external_oracle("transformers")
    def logits(self, ids: list[int], spans: tuple, images: list[Image.Image]) -> Tensor:
        """Return the logits of transformers after each token of a prompt with images, [T, V]."""
        places = self.pixels(images)
        with torch.no_grad():
            found = self.model(**self.tokens(ids, spans), pixel_values=places["pixel_values"],
                               image_position_ids=places["image_position_ids"])  # fmt: skip
        return found.logits[0].float()


@pytest.fixture(scope="module", params=VARIANTS)
def made(request, tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp(request.param), *VARIANTS[request.param])


@pytest.mark.parametrize("size", [(37, 91), (8, 8), (200, 31), (150, 1), (2, 180)])
def test_embeddings(made, size):
    image = picture(*size)
    prepared, places = made.vision.processor.prepare(image), made.pixels([image])
    with torch.no_grad():
        features = made.model.model.get_image_features(**places).pooler_output
    found = made.vision.encoder.encode(prepared)
    assert found.shape == features[0].shape
    assert error(found, features[0]) < 1e-5


def test_pixels_of_odd_images(made):
    chance, tower = np.random.default_rng(5), made.vision.encoder.tower
    for number in range(200):
        width, height = chance.integers(1, 150, 2).tolist()
        image = picture(width, height, seed=number)
        places = made.pixels([image])
        count = int((places["image_position_ids"][0, :, 0] >= 0).sum())
        found = tower.patchify(made.vision.processor.prepare(image))
        assert torch.equal(found, places["pixel_values"][0, :count].float()), (width, height)


@pytest.mark.parametrize("kv", ["none", "k8v4"])
def test_logits(made, kv):
    images = [picture(60, 33), picture(20, 50, seed=2)]
    ids, spans = made.prompt(images)
    wanted, engine = made.logits(ids, spans, images), made.engine(kv)
    for chunks in ([], [spans[0].stop], [spans[0].start, spans[0].tokens, spans[1].start - spans[0].stop]):
        assert error(step_logits(engine, made.vision, ids, spans, chunks), wanted) < (1e-5 if kv == "none" else 0.1)


def request(made: Made, images: list[Image.Image], question: list[int] = QUESTION) -> Request:
    ids, spans = made.prompt(images, question)
    return Request(tuple(ids), Sampling(temperature=0, max_tokens=20), images=spans)


def test_greedy_tokens_are_those_of_transformers(made):
    images = [picture(60, 33), picture(20, 50, seed=2)]
    asked = request(made, images)
    places = made.pixels(images)
    inputs = {**made.tokens(list(asked.prompt), asked.images), **places}
    wanted = made.model.generate(**inputs, max_new_tokens=20, do_sample=False, pad_token_id=0, eos_token_id=None)
    wanted = wanted[0, len(asked.prompt) :].tolist()
    alone = Scheduler(made.engine(), None, frozenset(), max_sequences=4)
    assert run(alone, asked) == [wanted]
    others = [request(made, []), request(made, images[:1], [9, 9, 4])]
    expected = [run(Scheduler(made.engine(), None, frozenset(), max_sequences=4), each)[0] for each in others]
    mixed = Scheduler(made.engine(), None, frozenset(), max_sequences=4)
    assert run(mixed, others[0], asked, others[1]) == [expected[0], wanted, expected[1]]


def test_a_chunk_has_room_for_an_image(made):
    found = made.open(chunk=32)
    if made.vision.both_ways is None:
        assert isinstance(found, Vision)
    else:
        assert isinstance(found, NoVision)
        assert "--chunk" in found.reason
    unit = (made.vision.processor.patch * made.vision.processor.merge) ** 2
    assert made.vision.processor.limited(20 * unit).most_tokens == 20
