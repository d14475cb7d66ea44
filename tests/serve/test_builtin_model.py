"""Twenty questions to the built-in model in every interface: the same settings, the same answers, no nonsense."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

import auraflux
from auraflux.cli import main
from auraflux.loading.language_model import LanguageModel
from auraflux.weights.download.pull import locate
from tests.serve.answers import QUESTIONS, check_sane
from tests.serve.page.conftest import ask, browser
from tests.serve.server import TIMEOUT_S, Served, running

pytestmark = pytest.mark.slow
__all__ = ["browser"]

DEMO = "How do plants make food? Answer in two sentences."  # of `make demo`
TOKENS = 60
SHOWN = "temperature 0.2, top-p 0.9 (recommended for SmolLM2)"


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return auraflux.load(context=1024, device="cpu")


@pytest.fixture(scope="module")
def answers(model: LanguageModel) -> list[str]:
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return model.chat_batch(chats, max_tokens=TOKENS, seed=1)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(locate(), exact=False, context=1024) as server:
        yield server


def test_answers_are_sane(answers: list[str]):
    for answer in answers:
        check_sane(answer)
    right = [word for word, answer in zip(QUESTIONS.values(), answers, strict=True) if word.lower() in answer.lower()]
    assert len(right) >= 13, right


def test_generate_answers_like_the_api(answers: list[str]):
    prompts = [word for question in QUESTIONS for word in ("-p", question)]
    options = ["--context", "1024", "--device", "cpu", "--seed", "1", "-n", str(TOKENS), "--json"]
    assert json.loads(CliRunner().invoke(main, ["generate", "--chat", *prompts, *options]).stdout)["texts"] == answers


def test_chat_answers_like_the_api(answers: list[str]):
    lines = "\n/reset\n".join(QUESTIONS)
    options = ["--context", "1024", "--device", "cpu", "--seed", "1", "-n", str(TOKENS)]
    result = CliRunner().invoke(main, ["chat", *options], input=lines)
    assert SHOWN in result.stderr
    assert [line for line in result.stdout.split("\n") if line] == [
        line for answer in answers for line in answer.split("\n") if line
    ]


def test_the_server_answers_like_the_api(served: Served, answers: list[str]):
    """The chat page sends the same request, and streams the answer."""
    (about,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert about["default_sampling"] == {
        "temperature": 0.2,
        "top_p": 0.9,
        **dict.fromkeys(("top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")),
        "source": "recommended for SmolLM2",
    }
    found = []
    for question in QUESTIONS:
        body = {"messages": [{"role": "user", "content": question}], "seed": 1, "max_tokens": TOKENS}
        reply = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=120).json()
        found.append(reply["choices"][0]["message"]["content"])
    assert [each.strip() for each in found] == [each.strip() for each in answers]


def test_the_chat_page_answers_sanely(served: Served, browser):
    """The page sends no sampling settings of its own and shows those of the model."""
    page = browser.new_context().new_page()
    page.set_default_timeout(TIMEOUT_S * 1000)
    sent: list[dict] = []
    page.on("request", lambda request: sent.append(request.post_data_json) if request.url.endswith("/completions") else None)
    page.goto(served.url)
    answers = []
    for question in QUESTIONS:
        page.click("#new")
        page.click("#open-tuning")
        assert page.locator("#set-temperature").get_attribute("placeholder") == "0.2"
        page.fill("#set-seed", "1")
        page.fill("#set-max_tokens", str(TOKENS))
        page.keyboard.press("Escape")
        ask(page, question)
        answers.append(page.locator(".reply .prose").inner_text())
        check_sane(answers[-1])
    assert [each["messages"][0]["content"] for each in sent] == [*QUESTIONS]
    assert not any({"temperature", "top_p"} & each.keys() for each in sent)
    right = [word for word, answer in zip(QUESTIONS.values(), answers, strict=True) if word.lower() in answer.lower()]
    assert len(right) >= 13, right
    page.context.close()


@pytest.mark.parametrize("isa", [None, "avx2", "portable"])
def test_the_demo_is_right_on_every_instruction_set(isa: str | None):
    """Greedy, so that a user sees this text; near ties may fall otherwise elsewhere, but not to nonsense."""
    if isa == "avx2" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    environment = {**os.environ} if isa is None else {**os.environ, "AURAFLUX_ISA": isa}
    words = ["generate", "--chat", "-t", "0", "-n", "120", "-p", DEMO, "--device", "cpu"]
    done = subprocess.run(
        [sys.executable, "-m", "auraflux", *words], env=environment, capture_output=True, text=True, check=True
    )
    assert "photosynthesis" in done.stdout
    assert re.search("sunlight|light energy", done.stdout), done.stdout
