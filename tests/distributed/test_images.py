"""Images on several ranks equal those of one process: rank 0 encodes them, and the others get embeddings and positions."""

from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from torch import Tensor

from auraflux.engine.request import Output, Request
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.load import load
from auraflux.vision.processor import place_images
from tests.distributed.test_tensor import bound_of
from tests.distributed.threaded_ranks import threaded_ranks
from tests.models.oracles import error
from tests.vision import qwen_models, test_gemma3
from tests.vision.qwen_models import picture
from tests.vision.test_generation import GREEDY, run
from tests.vision.test_qwen import step_logits

OPTIONS: dict[str, Any] = {"context": 256, "chunk": 32, "max_sequences": 4, "exact": True}
PICTURES = [[(37, 91), (64, 20)], [], [(40, 40)]]
QUESTIONS = [7, 3, 99, 12, 45], [9, 31, 4]


@cache
def folder(name: str) -> tuple[Path, list[int]]:
    """Return the folder of a model, and the tokens of an image in a rendered prompt."""
    path = Path(mkdtemp(prefix="auraflux-ranks-"))
    if name == "gemma3":
        test_gemma3.Made(path, *test_gemma3.SIZES["even"])
        return path, [test_gemma3.START, 8]
    qwen_models.make(path, mixture=name == "qwen3_5_moe")
    return path, [qwen_models.START, qwen_models.IMAGE, qwen_models.END]


def request(model: LanguageModel, sizes: list[tuple[int, int]], seed: int, question: list[int], around: list[int]) -> Request:
    processor = model.vision.processor
    images = [processor.prepare(picture(*size, seed=seed + number)) for number, size in enumerate(sizes)]
    ids, spans = place_images([5, 17, *around * len(images), *question], images, processor)
    return Request(tuple(ids), GREEDY, images=spans)


def logits(model: LanguageModel, made: Request) -> Tensor:
    """Return the logits after each token of a prompt, whose second chunk begins behind the first image."""
    return step_logits(model.engine, model.vision, list(made.prompt), made.images, [made.images[0].stop])


def check(name: str, layout: str, **options: Any) -> None:
    """Compare ranks with one process: prompts with and without images in one batch, then another question about an image."""
    path, around = folder(name)
    options = {**OPTIONS, **options}
    alone = load(path, **options)
    batch = [request(alone, sizes, 10 * number, QUESTIONS[0], around) for number, sizes in enumerate(PICTURES)]
    again = request(alone, PICTURES[0], 0, QUESTIONS[1], around)
    wanted, answer = run(alone.scheduler, *batch), run(alone.scheduler, again)
    # a random Gemma repeats its last token
    assert name == "gemma3" or len({tuple(each) for each in [*wanted, *answer]}) == 4
    with threaded_ranks(path, layout, **options) as ranks:
        assert error(logits(ranks, batch[0]), logits(alone, batch[0])) < bound_of(options["kv"])
        assert run(ranks.scheduler, *batch) == wanted
        runs, kept = ranks.vision.encoder.runs, list[Output]()
        ranks.scheduler.submit(again, kept.append)
        while ranks.scheduler.step():
            pass
        assert [token for output in kept for token in output.tokens] == answer[0]
        # the image is neither encoded nor prefilled again
        assert ranks.vision.encoder.runs == runs
        assert kept[-1].stats.cached_tokens >= again.images[-1].stop


def test_a_pipeline():
    check("qwen3_5_moe", "pipeline=2", kv="k4v4")


@pytest.mark.parametrize("layout", ["tensor=2", "context=2"])
def test_ranks_in_lockstep(layout: str):
    check("qwen3_5", layout, kv="none")


def test_attention_in_both_directions_on_shards_of_pages():
    check("gemma3", "context=2", kv="none")


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["none", "k8v4"])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        *(("qwen3_5_moe", layout) for layout in ("experts=2", "context=2", "pipeline=2,experts=2")),
        *(("qwen3_5", layout) for layout in ("pipeline=2", "tensor=2", "context=2")),
        *(("gemma3", layout) for layout in ("pipeline=2", "tensor=2", "context=2")),
    ],
)
def test_every_layout(name: str, layout: str, kv: str):
    check(name, layout, kv=kv)


@pytest.mark.slow
def test_drafts_after_images():
    check("qwen3_5", "pipeline=2", kv="none", speculate="ngram")
