"""Images through the server, by the clients of its APIs."""

import base64
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
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


CLIENTS: list[openai.OpenAI] = []


@pytest.fixture(autouse=True)
def closed_clients() -> Iterator[None]:
    """Close the clients of a test."""
    yield
    while CLIENTS:
        CLIENTS.pop().close()


def client(served: Served) -> openai.OpenAI:
    CLIENTS.append(openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0))
    return CLIENTS[-1]


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


def test_responses(served):
    parts = [{"type": "input_image", "image_url": DATA_URL}, {"type": "input_text", "text": QUESTION}]
    answer = client(served).responses.create(
        model=NAME, input=[{"role": "user", "content": parts}], max_output_tokens=8, temperature=0
    )
    assert answer.output_text == wanted(served)


def test_messages(served):
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(IMAGE).decode()}
    parts: Any = [{"type": "image", "source": source}, {"type": "text", "text": QUESTION}]
    with anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0) as api:
        messages: Any = [{"role": "user", "content": parts}]
        answer = api.messages.create(model=NAME, messages=messages, max_tokens=8, extra_body={"temperature": 0})
        assert answer.content[0].text == wanted(served)
        counted = api.messages.count_tokens(model=NAME, messages=messages).input_tokens
    usage = answer.usage
    assert counted == usage.input_tokens + usage.cache_read_input_tokens


def test_ollama(served):
    api = ollama.Client(served.url)
    options = {"temperature": 0, "num_predict": 8}
    answer = api.chat(NAME, [{"role": "user", "content": QUESTION, "images": [IMAGE]}], options=options)
    assert answer.message.content == wanted(served)
    assert api.generate(NAME, QUESTION, images=[IMAGE], options=options).response == wanted(served)
    assert "vision" in api.show(NAME).capabilities
    api._client.close()


def test_listings_tell_what_a_model_takes(served, text_only):
    found = [client(each).models.retrieve(NAME).model_extra["input_modalities"] for each in (served, text_only)]
    assert found == [["text", "image"], ["text"]]


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
