"""The toy model answers questions about pictures that it was not trained on, through the server, with any KV cache."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Any

import anthropic
import openai
import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import auraflux
from auraflux.loading.language_model import LanguageModel
from tests.serve.server import NAME, Served, running
from tests.vision.shapes.asked import MODEL, RIGHT, Question, drawn, facts, question
from tests.vision.shapes.data import exchange, picture, things
from tests.vision.shapes.train import BLOCK, PREPROCESSOR, SIZES, patches
from tests.vision.test_qwen import step_logits

QUESTIONS = [question(seed) for seed in range(50)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
BITS = ["k8v4", "k4v4"]
# no token in full precision: these prompts are shorter than the default window
NO_WINDOW = {"sink_tokens": 0, "recent_window": 0}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(MODEL, exact=False, max_sequences=8) as server:
        yield server


def load(**options: Any) -> LanguageModel:
    return auraflux.load(MODEL, "cpu", context=1024, **options)


def by_openai(api: openai.OpenAI, asked: Question) -> str:
    image: list[Any] = [{"type": "image_url", "image_url": {"url": asked.url}}] if asked.image else []
    messages: Any = [{"role": "user", "content": [*image, {"type": "text", "text": asked.text}]}]
    return api.chat.completions.create(model=NAME, messages=messages, **GREEDY).choices[0].message.content or ""


def by_anthropic(api: anthropic.Anthropic, asked: Question) -> str:
    source = {"type": "base64", "media_type": "image/png", "data": asked.base64}
    image: list[Any] = [{"type": "image", "source": source}] if asked.image else []
    messages: Any = [{"role": "user", "content": [*image, {"type": "text", "text": asked.text}]}]
    extra = {"temperature": 0}
    made = api.messages.create(model=NAME, messages=messages, max_tokens=GREEDY["max_tokens"], extra_body=extra)
    return made.content[0].text


CLIENTS: dict[str, Any] = {
    "openai": (lambda url: openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0), by_openai),
    "anthropic": (lambda url: anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), by_anthropic),
}


def share_right(asked: list[Question], answers: list[str]) -> float:
    return sum(each.answer == answer for each, answer in zip(asked, answers, strict=True)) / len(asked)


def answers_of(model: LanguageModel, asked: list[Question]) -> list[str]:
    return model.chat_batch([[{"role": "user", "content": each.parts}] for each in asked], **GREEDY)


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_the_server_answers_questions_about_pictures_among_others(served, name):
    make, ask = CLIENTS[name]
    texts = facts()
    mixed = [each for number, one in enumerate(QUESTIONS) for each in (one, *texts[number : number + 1])]
    # the prefix cache would answer questions of the other client
    served.model.reset()
    with make(served.url) as api, ThreadPoolExecutor(8) as clients:
        answers = dict(zip(mixed, clients.map(lambda each: ask(api, each), mixed), strict=True))
    assert share_right(texts, [answers[each] for each in texts]) == 1
    assert share_right(QUESTIONS, [answers[each] for each in QUESTIONS]) >= RIGHT


@pytest.mark.slow
def test_ngram_speculation_gives_the_same_answers():
    plain, drafting = load(), load(speculate="ngram")
    for asked in [each for each in QUESTIONS if " and " in each.answer][:6]:
        first = {"role": "user", "content": asked.parts}
        messages: list[Any] = [first, {"role": "assistant", "content": asked.answer}, {"role": "user", "content": asked.text}]
        wanted = "".join(plain.chat(messages, **GREEDY))
        assert "".join(drafting.chat(messages, **GREEDY)) == wanted


def conversation(seed: int) -> tuple[list[dict[str, Any]], str]:
    """Return a conversation about two pictures that ends with a question, and its answer."""
    random, messages = Random(seed), list[dict[str, Any]]()
    for _ in range(2):
        shown = things(random)
        image = {"type": "image", "image": drawn(shown, random)}
        for number in range(3):
            text, answer = exchange(shown, random)
            parts = [*([image] if number == 0 else []), {"type": "text", "text": text}]
            messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return messages[:-1], answer


def answer_logits(model: LanguageModel, messages: list[dict[str, Any]], answer: str) -> Tensor:
    """Return the logits before every token of an answer, computed by decode steps: [T, V]."""
    prompt, spans = model._chat_prompt(messages)
    ids = [*prompt, *model.tokenizer.encode(f"{answer}<|im_end|>", special=False)]
    model.engine.vision = model.vision
    found = step_logits(model.engine, model.vision, ids, spans, [len(prompt) - 1, *[1] * (len(ids) - len(prompt))])
    return found[len(prompt) - 1 : -1]


def divergence(found: Tensor, wanted: Tensor) -> float:
    """Return the mean KL divergence of logits from others, in nats."""
    return float(
        torch.nn.functional.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="batchmean")
    )


@pytest.mark.slow
@pytest.mark.parametrize("window", [{}, NO_WINDOW], ids=["default window", "no window"])
def test_a_quantized_cache_gives_the_same_answers(window):
    asked = [conversation(seed) for seed in range(20)]
    exact = load(kv="none", exact=True)
    wanted = [answer_logits(exact, *each) for each in asked]
    plain = answers_of(exact, QUESTIONS)
    assert share_right(QUESTIONS, plain) >= RIGHT
    for kv in BITS:
        model = load(kv=auraflux.CacheSettings(kv, **window), exact=True)
        found = [answer_logits(model, *each) for each in asked]
        kl = divergence(torch.cat(found), torch.cat(wanted))
        same = float((torch.cat(found).argmax(-1) == torch.cat(wanted).argmax(-1)).float().mean())
        equal = sum(map(str.__eq__, answers_of(model, QUESTIONS), plain))
        print(f"{kv}: KL {kl:.6f}, top token {same:.4f}, {equal} of {len(plain)} answers equal")
        assert kl < 0.01
        assert same > 0.99
        assert equal >= RIGHT * len(plain)


@pytest.mark.parametrize("size", SIZES)
def test_training_sees_the_pixels_of_the_processor(size):
    random = Random(1)
    images = [picture(things(random), size, random)[0] for _ in range(2)]
    wanted = Qwen2VLImageProcessorPil(**PREPROCESSOR)(images, return_tensors="pt")
    found, grids = patches(images)
    assert torch.equal(grids, wanted["image_grid_thw"])
    assert (found - wanted["pixel_values"]).abs().max() < 1e-6
    assert grids[0].prod() * 64 == size[0] * size[1]
    assert not size[0] % BLOCK
