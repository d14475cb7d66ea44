"""Pictures of coloured shapes, and conversations about them, for the toy model that train.py trains."""

from dataclasses import dataclass
from math import cos, pi, sin
from random import Random

from PIL import Image, ImageDraw

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 50, 180),
    "orange": (245, 140, 30),
}
SHAPES = ("circle", "square", "triangle")
NUMBERS = ("zero", "one", "two", "three", "four", "five")
BACKGROUNDS = ((255, 255, 255), (240, 240, 240))
# questions that need no picture
FACTS = {
    "What is the opposite of left?": "right",
    "What is the opposite of big?": "small",
    "How many sides does a triangle have?": "three",
    "How many sides does a square have?": "four",
    "What comes after one?": "two",
    "What comes after three?": "four",
    "What comes before three?": "two",
    "Which colour is the sky?": "blue",
    "Which colour is grass?": "green",
    "Which colour is a lemon?": "yellow",
    "Which colour is blood?": "red",
    "Which shape is a wheel?": "a circle",
}
Exchange = tuple[str, str]  # a question and its answer
Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True)
class Thing:
    """A shape of a picture."""

    colour: str
    shape: str

    @property
    def number(self) -> int:
        """Number among all things, from 1 on."""
        return 1 + [*COLOURS].index(self.colour) * len(SHAPES) + SHAPES.index(self.shape)

    def __str__(self) -> str:
        return f"a{'n' if self.colour == 'orange' else ''} {self.colour} {self.shape}"


def things(random: Random) -> list[Thing]:
    """Return one or two things, from left to right."""
    return [Thing(random.choice([*COLOURS]), random.choice(SHAPES)) for _ in range(random.randint(1, 2))]


def picture(shown: list[Thing], size: tuple[int, int], random: Random, scale: int = 1) -> tuple[Image.Image, list[Box]]:
    """Draw things side by side on an image of `scale` times a size in pixels; return it and where they are at scale 1."""
    width, height = size[0] * scale, size[1] * scale
    image = Image.new("RGB", (width, height), random.choice(BACKGROUNDS))
    column, boxes = width / len(shown), []
    for number, thing in enumerate(shown):
        side = random.uniform(0.6, 0.92) * min(column, height)
        left = column * number + random.uniform(0, column - side)
        top = random.uniform(0, height - side)
        colour = tuple(min(255, max(0, value + random.randint(-12, 12))) for value in COLOURS[thing.colour])
        _draw(ImageDraw.Draw(image), thing.shape, left, top, side, colour)
        boxes.append((left / scale, top / scale, (left + side) / scale, (top + side) / scale))
    return image, boxes


def _draw(draw: ImageDraw.ImageDraw, shape: str, left: float, top: float, side: float, colour: tuple[int, ...]) -> None:
    box = left, top, left + side, top + side
    if shape == "circle":
        draw.ellipse(box, colour)
    elif shape == "square":
        draw.rectangle((left + side * 0.07, top + side * 0.07, left + side * 0.93, top + side * 0.93), colour)
    else:
        middle, radius = left + side / 2, side / 2
        corners = [(middle + radius * sin(turn), top + radius * (1 - cos(turn))) for turn in (0, 2 * pi / 3, 4 * pi / 3)]
        draw.polygon(corners, colour)


def description(shown: list[Thing]) -> str:
    """Return the things of a picture in words."""
    *first, last = map(str, shown)
    return f"{', '.join(first)} and {last}" if first else last


def exchange(shown: list[Thing], random: Random) -> Exchange:
    """Return a question about a picture and its answer."""
    kind = random.choice(["all", "colour", "colour", "shape", "count", "is there"])
    thing = random.choice(shown)
    if kind == "colour" and [each.shape for each in shown].count(thing.shape) == 1:
        return f"Which colour is the {thing.shape}?", thing.colour
    if kind == "shape" and [each.colour for each in shown].count(thing.colour) == 1:
        return f"Which shape is {thing.colour}?", f"a {thing.shape}"
    if kind == "count":
        return "How many shapes are there?", NUMBERS[len(shown)]
    if kind == "is there":
        asked = thing if random.random() < 0.5 else Thing(random.choice([*COLOURS]), random.choice(SHAPES))
        return f"Is there {asked}?", "yes" if asked in shown else "no"
    return "What is in the picture?", description(shown)


def fact(random: Random) -> Exchange:
    """Return a question that needs no picture, and its answer."""
    return random.choice([*FACTS.items()])
