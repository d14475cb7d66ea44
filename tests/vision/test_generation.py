"""Images in generation: greedy tokens against transformers, prefix reuse, batches, preemption and quantized caches."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from auraflux.cache import CacheSettings
from auraflux.engine.engine import Engine
from auraflux.engine.request import Output, Request
from auraflux.engine.sampling import Sampling
from auraflux.errors import InputError
from auraflux.scheduler.scheduler import Scheduler
from auraflux.vision.encoder import ImageEncoder
from auraflux.vision.families import open_vision
from auraflux.vision.processor import place_images
from auraflux.weights.formats.checkpoint import open_checkpoint
from tests.models.oracles import Loaded, loaded
from tests.speculative.test_speculation import OracleProposer, with_drafts
from tests.vision.qwen_models import END, IMAGE, START, make, patches, picture

GREEDY = Sampling(temperature=0, max_tokens=20)
TEXT = [7, 3, 99, 12, 45]


@cache
def sources() -> tuple[Any, Path, Loaded]:
    from tempfile import mkdtemp

    path = Path(mkdtemp(prefix="auraflux-tiny-"))
    model = make(path)
    return model, path, loaded(path)


def scheduler(kv: str = "none", **options: Any) -> Scheduler:
    """Return a scheduler for the model with its own encoder."""
    _, path, source = sources()
    sizes = {"context": 512, "chunk": 64, "sequences": 8, **options}
    engine = Engine(source.model, source.shapes, CacheSettings(kv), exact=True, **sizes)
    checkpoint = open_checkpoint(path)
    engine.vision = open_vision(checkpoint, source.model.config, torch.device("cpu"), torch.float32)
    return Scheduler(engine, None, frozenset(), max_sequences=8)


def request(serving: Scheduler, sizes: list[tuple[int, int]], seed: int = 0, question: list[int] = TEXT) -> Request:
    processor = serving.engine.vision.processor
    images = [processor.prepare(picture(*size, seed=seed + number)) for number, size in enumerate(sizes)]
    ids, spans = place_images([5, *[START, IMAGE, END] * len(images), *question], images, processor)
    return Request(tuple(ids), GREEDY, images=spans)


def run(serving: Scheduler, *requests: Request) -> list[list[int]]:
    outputs: list[list[Output]] = [[] for _ in requests]
    for each, kept in zip(requests, outputs, strict=True):
        serving.submit(each, kept.append)
    while not serving.idle:
        serving.step()
    assert [kept[-1].error for kept in outputs] == [None] * len(requests)
    return [[token for output in kept for token in output.tokens] for kept in outputs]


SIZES = [[(40, 40)], [(37, 91), (64, 20)], [(120, 64)]]


@pytest.mark.parametrize("sizes", [SIZES[1], *(pytest.param(each, marks=pytest.mark.slow) for each in SIZES[::2])])
def test_greedy_tokens_are_those_of_transformers(sizes):
    model, serving = sources()[0], scheduler()
    made = request(serving, sizes)
    tokens = torch.tensor([made.prompt])
    inputs = patches([picture(*size, seed=number) for number, size in enumerate(sizes)])
    model.model.rope_deltas = None
    wanted = model.generate(
        tokens, mm_token_type_ids=(tokens == IMAGE).int(), **inputs, max_new_tokens=20, do_sample=False, pad_token_id=0
    )
    assert run(serving, made) == [wanted[0, len(made.prompt) :].tolist()]


@pytest.mark.parametrize("kv", ["none", "k8v4"])
def test_drafts_beside_images_change_no_token(kv: str):
    plain = scheduler(kv)
    requests = [request(plain, sizes) for sizes in ([(37, 91), (64, 20)], [], [(40, 40)])]
    wanted = run(plain, *requests)
    known = [[*each.prompt, *output] for each, output in zip(requests, wanted, strict=True)]
    drafting = with_drafts(scheduler(kv), lambda: OracleProposer(known))
    assert run(drafting, *requests) == wanted
    assert drafting.speculation is not None
    # some of what the oracle drafts is wrong
    assert 0 < drafting.speculation.accepted < drafting.speculation.drafted


def test_batches_equal_single_runs():
    mixed = [[(40, 40)], [], [(37, 91), (64, 20)], []]
    alone = [run(each := scheduler(), request(each, sizes, seed=number))[0] for number, sizes in enumerate(mixed)]
    serving = scheduler()
    assert run(serving, *(request(serving, sizes, seed=number) for number, sizes in enumerate(mixed))) == alone


def test_a_prompt_that_arrives_while_others_decode_gets_the_same_tokens(monkeypatch):
    wanted = run(each := scheduler(), request(each, SIZES[1]))[0]
    # the encoder stops after every layer
    monkeypatch.setattr("auraflux.scheduler.prefill.ENCODE_PAUSE_S", 0.0)
    serving = scheduler()
    text: list[Output] = []
    late: list[Output] = []
    serving.submit(request(serving, []), text.append)
    while not text:
        serving.step()
    serving.submit(request(serving, SIZES[1]), late.append)
    serving.step()
    # its image is not encoded yet, and the other sequence goes on
    assert serving.engine.vision.encoder.runs == 0
    before = len(text)
    serving.step()
    assert len(text) > before
    while serving.step():
        pass
    assert [token for output in late for token in output.tokens] == wanted


def test_a_second_question_reuses_the_image():
    serving = scheduler(cached_sequences=4)
    encoder: ImageEncoder = serving.engine.vision.encoder
    first, second = request(serving, SIZES[0]), request(serving, SIZES[0], question=[200, 8, 31])
    wanted = run(each := scheduler(), request(each, SIZES[0], question=[200, 8, 31]))
    run(serving, first)
    assert encoder.runs == 1
    kept: list[Output] = []
    serving.submit(second, kept.append)
    while serving.step():
        pass
    assert [[token for output in kept for token in output.tokens]] == wanted
    assert encoder.runs == 1
    assert kept[-1].stats.cached_tokens >= second.images[0].stop


def test_another_image_of_the_same_size_is_not_a_prefix_hit():
    serving = scheduler(cached_sequences=4)
    run(serving, request(serving, SIZES[0]))
    wanted = run(each := scheduler(), request(each, SIZES[0], seed=9))
    assert run(serving, request(serving, SIZES[0], seed=9)) == wanted
    assert serving.engine.vision.encoder.runs == 2


def test_embeddings_stay_within_the_budget():
    serving = scheduler()
    encoder: ImageEncoder = serving.engine.vision.encoder
    processor = serving.engine.vision.processor
    made = [processor.prepare(picture(40, 40, seed=seed)) for seed in range(3)]
    nbytes = encoder.encode(made[0]).nbytes
    encoder.limit_nbytes = 2 * nbytes
    for each in made[1:]:
        encoder.encode(each)
    assert (encoder.nbytes, [encoder.find(each) is not None for each in made]) == (2 * nbytes, [False, True, True])


def test_preempted_sequences_end_with_the_same_tokens():
    wanted = [run(each := scheduler(), request(each, [(48, 56)], seed=seed))[0] for seed in range(3)]
    # three pages, and each sequence grows into a second one
    serving = scheduler(tokens=192)
    assert run(serving, *(request(serving, [(48, 56)], seed=seed) for seed in range(3))) == wanted
    assert serving.counts.preemptions > 0


@pytest.mark.parametrize("kv", ["k4v4", "k8v4"])
def test_quantized_caches(kv):
    serving = scheduler(kv)
    made = request(serving, SIZES[1])
    alone = run(serving, made)
    other = scheduler(kv)
    assert run(other, request(other, [], seed=1), request(other, SIZES[1]))[1:] == alone


@pytest.mark.parametrize("spans", ["missing", "last", "disordered"])
def test_requests_that_do_not_fit_are_refused(spans):
    serving = scheduler()
    good = request(serving, SIZES[1])
    if spans == "missing":
        serving.engine.vision = None
        bad = good
    elif spans == "last":
        bad = Request(good.prompt[: good.images[-1].stop], GREEDY, images=good.images)
    else:
        bad = Request(good.prompt, GREEDY, images=good.images[::-1])
    with pytest.raises(InputError, match="image"):
        serving.submit(bad)
