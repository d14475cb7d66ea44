"""Questions that training has not seen, and the toy model's folder."""

import base64
import io
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.vision.shapes.data import FACTS, Thing, exchange, picture, things

MODEL = Path(__file__).parent / "model"
HELD_OUT = 1 << 20  # seed of the first question; training has seeds of its own, far below
RIGHT = 0.95


@dataclass(frozen=True)
class Question:
    """A question with its answer.

    image  a PNG; None for a question about no picture
    """

    text: str
    answer: str
    image: bytes | None = None

    @property
    def base64(self) -> str:
        return base64.b64encode(self.image or b"").decode()

    @property
    def url(self) -> str:
        return f"data:image/png;base64,{self.base64}"

    @property
    def parts(self) -> list[dict[str, object]]:
        """Content of a message of `LanguageModel.chat`."""
        image: list[dict[str, object]] = [{"type": "image", "image": self.image}] if self.image else []
        return [*image, {"type": "text", "text": self.text}]


def drawn(shown: list[Thing], random: Random) -> bytes:
    """Draw things on an image of an odd size, as a PNG file."""
    width, height = random.randint(90, 400), random.randint(80, 300)
    # of training's pictures, none is wider than twice its height
    width = max(height * 3 // 4, min(width, height * 2))
    image, _ = picture(shown, (width, height), random)
    made = io.BytesIO()
    image.save(made, "PNG")
    return made.getvalue()


def question(seed: int) -> Question:
    """Return a question about a picture."""
    random = Random(HELD_OUT + seed)
    shown = things(random)
    text, answer = exchange(shown, random)
    return Question(text, answer, drawn(shown, random))


def facts() -> list[Question]:
    """Return the questions about no picture."""
    return [Question(text, answer) for text, answer in FACTS.items()]
