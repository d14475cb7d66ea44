"""Steps with images are replayed as those of text are: decode steps, and on a GPU prefill chunks too, as CUDA graphs."""

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from auraflux.cache import Batch, CacheSettings, MixedBatch
from auraflux.engine.capture import record_launches
from auraflux.engine.engine import Engine
from auraflux.engine.graph_runner import GraphRunner, Step
from auraflux.models import family
from auraflux.ops.rope.reference import norm_rope, rope
from auraflux.vision.families import Vision, open_vision
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import error, loaded
from tests.vision.qwen_models import END, IMAGE, START, make, model_logits, picture
from tests.vision.test_generation import request, scheduler
from tests.vision.test_generation import run as generate

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


def prefilled(folder: Path, dtype: torch.dtype, kv: str, graphs: bool) -> tuple[Tensor, Engine]:
    """Return the logits after prompts with different images of the same sizes, prefilled on a GPU, and the engine."""
    checkpoint = open_checkpoint(folder)
    config = family(checkpoint.config).Config.from_hf(checkpoint.config)
    vision = open_vision(checkpoint, config, torch.device("cuda"), dtype)
    assert isinstance(vision, Vision), vision
    source = loaded(folder, device="cuda", dtype=dtype)
    sizes = {"context": 256, "sequences": 2, "chunk": 64}
    engine = Engine(source.model, source.shapes, CacheSettings(kv), dtype=dtype, device="cuda", graphs=graphs, **sizes)
    found = []
    for seed in range(4):
        images = [vision.processor.prepare(picture(*size, seed=seed)) for size in SIZES]
        ids, spans = place_images([5, *[START, IMAGE, END] * len(images), *TEXT], images, vision.processor)
        sequence = engine.cache.open()
        sequence.inputs = prompt = vision.prompt_images(len(ids), spans)
        prompt.found = [vision.encoder.encode(image) for image in images]
        # the second chunk begins inside an image
        cut = spans[0].start + 20
        for part in (ids[:cut], ids[cut:-1]):
            engine.prefill([sequence], [part])
        found.append(engine.decode(engine.cache.batch([sequence]), ids[-1:]))
        sequence.close()
    return torch.cat(found).float().cpu(), engine


@pytest.mark.gpu
@pytest.mark.parametrize("kv", ["none", "k8v4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_chunks_with_images_are_replayed_on_a_gpu(source, kv, dtype):
    found, engine = prefilled(source[1], dtype, kv, graphs=True)
    assert engine.graphs.prefill_refused is None
    assert {len(step.ids) for step in engine.graphs._steps.values() if step.recording and step.embeddings is not None}
    assert torch.equal(found, prefilled(source[1], dtype, kv, graphs=False)[0])
    # every prompt has its own images
    assert len({tuple(row.tolist()) for row in found}) == len(found)


class FakeGraphs:
    """Recordings on a CPU that run a step again with the tensors of its first run, as a CUDA graph does.

    replayed  token counts of replayed steps with images
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.replayed: list[int] = []
        made = GraphRunner.__init__

        def make(graphs: GraphRunner, runner: Any, enabled: bool) -> None:
            made(graphs, runner, enabled)
            graphs._capture = lambda work: self._capture(graphs, work)

        def drop_padding(batch: Batch) -> None:
            # the batch of a recording is run again, with its padding
            if batch.padding:
                batch.sequences[0].drop_padding(batch.padding)

        monkeypatch.setattr(GraphRunner, "__init__", make)
        monkeypatch.setattr(GraphRunner, "supports_prefill", True)
        monkeypatch.setattr(Batch, "drop_padding", drop_padding)

    def _capture(self, graphs: GraphRunner, work: Any) -> tuple[Any, Tensor]:
        recorded, result = record_launches(work)
        if recorded.rejected is None:
            # a decode step
            return recorded, result

        def steps() -> list[Step]:
            return [*graphs._steps.values(), *graphs._mixed.values()]

        def replay() -> None:
            step = next(step for step in steps() if step.recording is recording)
            self.replayed += [len(step.ids)] if step.embeddings is not None else []
            prefill = step.batch.prefill if isinstance(step.batch, MixedBatch) else step.batch
            assert prefill is not None
            # a graph computes it every time
            prefill._padding_mask = None
            result.copy_(work())

        recording = SimpleNamespace(rejected=None, replay=replay)
        return recording, result


PICTURES = [[(40, 40)], [(37, 91), (64, 20)]]


@pytest.mark.parametrize("kv", ["none", "k4v4"])
def test_prefill_chunks_with_images_are_replayed(kv: str, monkeypatch: pytest.MonkeyPatch):
    plain = scheduler(kv)
    # other images of the same sizes, and text of the same length between them
    requests = [request(plain, sizes, seed=10 * seed) for seed in range(4) for sizes in (*PICTURES, [])]
    wanted = [generate(plain, each)[0] for each in requests]
    graphs = FakeGraphs(monkeypatch)
    replaying = scheduler(kv)
    assert [generate(replaying, each)[0] for each in requests] == wanted
    assert replaying.engine.graphs.prefill_refused is None
    # of each size the first step runs, and the second is recorded
    assert len(graphs.replayed) >= 4
    assert set(graphs.replayed) <= {32, 64}


def test_a_chunk_that_is_padded_into_an_image_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch):
    plain = scheduler()
    early = request(plain, PICTURES[1], question=[9, 8, 7])
    FakeGraphs(monkeypatch)
    engine = scheduler().engine
    sequence = engine.cache.open()
    # no image is encoded
    sequence.inputs = engine.vision.prompt_images(len(early.prompt), early.images)
    start = early.images[0].start
    assert 1 < start < 32
    engine.prefill([sequence], [list(early.prompt[:start])])
    assert sequence.length == start


def test_chunks_with_images_join_mixed_batches(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("auraflux.engine.engine.MIXED_SIZES", (40, 64))
    texts = [request(scheduler(), [], seed=seed, question=[3 + seed, 9, 4, 2]) for seed in range(2)]
    pictured = [request(scheduler(), PICTURES[1], seed=10 * seed) for seed in range(4)]
    alone = [generate(scheduler(), each)[0] for each in (*texts, *pictured)]
    graphs = FakeGraphs(monkeypatch)
    mixed: list[bool] = []
    decode_mixed = Engine.decode_mixed

    def noted(engine: Engine, *arguments: Any) -> Tensor | None:
        ahead = arguments[2].inputs is not None
        found = decode_mixed(engine, *arguments)
        mixed.append(ahead and found is not None)
        return found

    monkeypatch.setattr(Engine, "decode_mixed", noted)
    serving = scheduler()
    assert generate(serving, *texts, *pictured) == alone
    assert any(mixed)
    assert graphs.replayed
