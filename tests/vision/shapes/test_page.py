"""The chat page answers a question about a picture that is dropped on it; AURAFLUX_SCREENSHOT names a file for a screenshot."""

import os
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.serve.page.conftest import ask, browser
from tests.serve.server import TIMEOUT_S, Served, running
from tests.vision.qwen_models import file_of
from tests.vision.shapes.asked import MODEL, Question
from tests.vision.shapes.data import Thing, description, picture

pytestmark = pytest.mark.slow
__all__ = ["browser"]

SHOWN = [Thing("red", "circle"), Thing("blue", "square")]
ASKED = {
    "What is in the picture?": description(SHOWN),
    "How many shapes are there?": "two",
    "Is there a blue square?": "yes",
}
DROP = """([name, encoded]) => {
  const data = new DataTransfer();
  const bytes = Uint8Array.from(atob(encoded), (letter) => letter.charCodeAt(0));
  data.items.add(new File([bytes], name, { type: "image/png" }));
  for (const type of ["dragover", "drop"]) dispatchEvent(new DragEvent(type, { dataTransfer: data, cancelable: true }));
}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with running(MODEL, exact=False, context=1024) as server:
        yield server


def test_a_dropped_picture_is_described(served: Served, browser):
    page = browser.new_context(viewport={"width": 900, "height": 640}).new_page()
    page.set_default_timeout(TIMEOUT_S * 1000)
    page.goto(served.url)
    page.wait_for_selector("#send")
    dropped = Question("", "", file_of(picture(SHOWN, (280, 140), Random(3))[0]))
    page.evaluate(DROP, ["shapes.png", dropped.base64])
    page.wait_for_selector("#attachments img")
    for question, answer in ASKED.items():
        ask(page, question)
        assert page.locator(".reply .prose").last.inner_text() == answer
        if answer == description(SHOWN) and "AURAFLUX_SCREENSHOT" in os.environ:
            page.screenshot(path=Path(os.environ["AURAFLUX_SCREENSHOT"]))
    assert page.locator(".question img.picture").count() == 1
    page.context.close()
