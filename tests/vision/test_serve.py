"""Images through the server, by the clients of its APIs."""

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serve.server import NAME, Served, running
from tests.vision.qwen_models import chat_folder, file_of, picture


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(chat_folder()) as made:
        yield made


@pytest.fixture(scope="module")
def text_only() -> Iterator[Served]:
    with running() as made:
        yield made


IMAGE = file_of(picture(60, 45))
DATA_URL = "data:image/png;base64," + base64.b64encode(IMAGE).decode()
QUESTION = "What is this?"


def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def asked(parts: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": parts}], "max_tokens": 8, "temperature": 0}


def wanted(served: Served) -> str:
    """Return the answer of the model in this process."""
    parts = [{"type": "image", "image": IMAGE}, {"type": "text", "text": QUESTION}]
    return "".join(served.model.chat([{"role": "user", "content": parts}], max_tokens=8, temperature=0))


def test_chat_completions(served):
    parts = [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": QUESTION}]
    answer = client(served).chat.completions.create(**asked(parts))
    assert answer.choices[0].message.content == wanted(served)
    other = DATA_URL.replace(base64.b64encode(IMAGE).decode(), base64.b64encode(file_of(picture(60, 45, 5))).decode())
    parts[0] = {"type": "image_url", "image_url": {"url": other}}
    assert client(served).chat.completions.create(**asked(parts)).choices[0].message.content != wanted(served)


BAD = {
    "a wrong type": ({"url": "data:text/html;base64,PGI+"}, "must begin with data:image/"),
    "no base64": ({"url": "data:image/png;base64,%%%"}, "not valid base64"),
    "no image": ({"url": "data:image/png;base64,AAAA"}, "unknown format or damaged"),
    "a URL": ({"url": "http://127.0.0.1/cat.png"}, "fetches no images"),
    "a file": ({"url": "file:///etc/passwd"}, "data:, http: and https: URLs"),
    "nothing": ({"url": ""}, "has no image"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_images_are_refused_with_a_sentence(served, name):
    source, message = BAD[name]
    with pytest.raises(openai.BadRequestError, match=message) as raised:
        client(served).chat.completions.create(**asked([{"type": "image_url", "image_url": source}]))
    assert "messages.0.content.0" in raised.value.message


def test_a_model_for_text_refuses_images(text_only):
    parts = [{"type": "image_url", "image_url": {"url": DATA_URL}}]
    with pytest.raises(openai.BadRequestError, match="the model tiny takes text only: it has no vision tower"):
        client(text_only).chat.completions.create(**asked(parts))


def test_the_placeholder_in_a_text_is_no_image(served):
    parts = [{"type": "image_url", "image_url": {"url": DATA_URL}}, {"type": "text", "text": "<|image_pad|>"}]
    with pytest.raises(openai.BadRequestError, match="1 images and 2 places"):
        client(served).chat.completions.create(**asked(parts))
