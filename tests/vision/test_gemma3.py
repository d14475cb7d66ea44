"""Gemma 3's images against transformers: pixels, the tower's embeddings, logits, and greedy tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.engine.request import Request
from auraflux.engine.sampling import Sampling
from auraflux.models import family
from auraflux.scheduler.scheduler import Scheduler
from auraflux.vision.families import Vision, open_vision
from auraflux.vision.processor import encode_prompt, place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded, save
from tests.models.test_gemma3_text import SMALL
from tests.tested import external_oracle
from tests.vision.qwen_models import picture
from tests.vision.test_generation import run
from tests.vision.test_qwen import step_logits

START, END, IMAGE = 250, 251, 252
# pixels and patches of a side, tokens of an image, the window of sliding layers: shorter and longer than an image
SIZES = {"even": (32, 4, 16, 9), "odd": (42, 7, 9, 20)}
QUESTION = [7, 3, 99, 12, 45]


def preprocessor(edge: int) -> dict[str, Any]:
    return {"size": {"height": edge, "width": edge}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}


class Made:
    """A model of transformers, its folder, and its tower here."""

    def __init__(self, folder: Path, edge: int, patch: int, tokens: int, window: int):
        torch.manual_seed(0)
        vision = {"hidden_size": 36, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 3}
        config = Gemma3Config(
            text_config={**SMALL, "head_dim": 32, "sliding_window": window},
            vision_config={**vision, "image_size": edge, "patch_size": patch, "vision_use_head": False},
            mm_tokens_per_image=tokens,
            boi_token_index=START,
            eoi_token_index=END,
            image_token_index=IMAGE,
        )
        self.model = Gemma3ForConditionalGeneration(config).eval()
        with torch.no_grad():
            # a projection of zeros would hide the tower
            self.model.model.multi_modal_projector.mm_input_projection_weight.normal_()
            self.model.get_input_embeddings().weight.mul_(8)
        self.folder, self.edge = save(self.model, folder), edge
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor(edge)))
        checkpoint = open_checkpoint(folder)
        language = family(checkpoint.config).Config.from_hf(checkpoint.config)
        found = open_vision(checkpoint, language, torch.device("cpu"), torch.float32)
        assert isinstance(found, Vision), found
        self.vision = found

    def pixels(self, images: list[Image.Image]) -> Tensor:
        """Return the pixels that transformers makes of images, [N, 3, H, W]."""
        return Gemma3ImageProcessorPil(**preprocessor(self.edge))(images, return_tensors="pt")["pixel_values"]

    def engine(self, kv: str = "none", **options: Any) -> Engine:
        source = loaded(self.folder)
        sizes = {"context": 256, "chunk": 64, "sequences": 4, **options}
        engine = Engine(source.model, source.shapes, CacheSettings(kv), exact=True, **sizes)
        engine.vision = self.vision
        return engine

    def prompt(self, images: list[Image.Image], question: list[int] = QUESTION) -> tuple[list[int], tuple]:
        prepared = [self.vision.processor.prepare(image) for image in images]
        return place_images([5, 17, *[START, 8] * len(images), *question], prepared, self.vision.processor)

    @external_oracle("transformers")
    def logits(self, ids: list[int], images: list[Image.Image]) -> Tensor:
        """Return the logits of transformers after each token of a prompt with images, [T, V]."""
        tokens = torch.tensor([ids])
        with torch.no_grad():
            types = (tokens == IMAGE).int()
            return self.model(tokens, pixel_values=self.pixels(images), token_type_ids=types).logits[0].float()


@pytest.fixture(scope="module", params=SIZES)
def made(request, tmp_path_factory) -> Made:
    return Made(tmp_path_factory.mktemp(request.param), *SIZES[request.param])


@pytest.mark.parametrize("size", [(37, 91), (8, 8), (200, 31)])
def test_embeddings(made, size):
    image = picture(*size)
    wanted, prepared = made.pixels([image]), made.vision.processor.prepare(image)
    with torch.no_grad():
        features = made.model.model.get_image_features(wanted).pooler_output
    assert error(made.vision.encoder.encode(prepared), features[0]) < 1e-5


def test_pixels_of_odd_images(made):
    chance, tower = np.random.default_rng(5), made.vision.encoder.tower
    for number in range(200):
        width, height = chance.integers(1, 150, 2).tolist()
        image = picture(width, height, seed=number)
        side, patch = tower.config.side, tower.config.patch
        cut = made.pixels([image])[0].view(3, side, patch, side, patch).permute(1, 3, 0, 2, 4).reshape(side * side, -1)
        assert torch.equal(tower.patchify(made.vision.processor.prepare(image)), cut), (width, height)


@pytest.mark.parametrize("kv", ["none", "k8v4"])
def test_logits(made, kv):
    images = [picture(60, 33), picture(20, 50, seed=2)]
    ids, spans = made.prompt(images)
    wanted, engine = made.logits(ids, images), made.engine(kv)
    for chunks in ([], [spans[0].stop], [spans[0].start, spans[0].tokens, spans[1].start - spans[0].stop]):
        assert error(step_logits(engine, made.vision, ids, spans, chunks), wanted) < (1e-5 if kv == "none" else 0.1)


def request(made: Made, images: list[Image.Image], question: list[int] = QUESTION) -> Request:
    ids, spans = made.prompt(images, question)
    return Request(tuple(ids), Sampling(temperature=0, max_tokens=20), images=spans)


def test_greedy_tokens_are_those_of_transformers(made, monkeypatch):
    images = [picture(60, 33), picture(20, 50, seed=2)]
    asked = request(made, images)
    tokens = torch.tensor([asked.prompt])
    wanted = made.model.generate(
        tokens,
        pixel_values=made.pixels(images),
        token_type_ids=(tokens == IMAGE).int(),
        max_new_tokens=20,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
    )[0, len(asked.prompt) :].tolist()
    alone = Scheduler(made.engine(), None, frozenset(), max_sequences=4)
    assert run(alone, asked) == [wanted]
    # beside a decoding sequence, whose budget is less than an image, and with chunks that are
    others = [request(made, []), request(made, images[:1], [9, 9, 4])]
    expected = [run(Scheduler(made.engine(), None, frozenset(), max_sequences=4), each)[0] for each in others]
    mixed = Scheduler(made.engine(chunk=32), None, frozenset(), max_sequences=4)
    monkeypatch.setattr(mixed._prefill.budget, "tokens", lambda *_: 5)
    assert run(mixed, others[0], asked, others[1]) == [expected[0], wanted, expected[1]]


def test_prefixes_end_outside_images(made):
    images = [picture(60, 33)]
    first, second = request(made, images), request(made, images, [200, 8, 31])
    wanted = run(Scheduler(made.engine(), None, frozenset(), max_sequences=4), second)
    serving = Scheduler(made.engine(cached_sequences=4), None, frozenset(), max_sequences=4)
    run(serving, first)
    assert run(serving, second) == wanted
    cut = serving.engine.vision.prompt_images(len(first.prompt), first.images)
    span = first.images[0]
    assert [cut.reusable(n) for n in (span.start, span.start + 1, span.stop - 1, span.stop)] == [span.start] * 3 + [span.stop]
    assert [cut.chunk(span.start - 2, n) for n in (1, 2, 3)] == [1, 2, 2]
    assert cut.chunk(span.start, 1) == span.tokens


def test_empty_lines_surround_images(made):
    processor = made.vision.processor
    prepared = processor.prepare(picture(9, 9))
    seen: list[str] = []

    def encode(text: str) -> list[int]:
        seen.append(text)
        return [3, START, 4]

    ids, _ = encode_prompt("user\n<start_of_image>What?", [prepared], processor, encode)
    assert seen == ["user\n\n\n<start_of_image>\n\nWhat?"]
    assert ids == [3, START, *[IMAGE] * prepared.grid[0] ** 2, END, 4]
