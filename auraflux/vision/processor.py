"""`ImageProcessor`: how a family resizes images and which tokens stand for them. It needs no torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from auraflux.errors import InputError
from auraflux.vision.span import ImageSpan, PreparedImage

MAX_IMAGES = 64  # of a prompt
MOST_UNEVEN = 200  # times that a side of an image may be longer than the other


class ImageProcessor(Protocol):
    """Resizing of a family's images, and the tokens that stand for them.

    placeholder  token that chat templates write for an image
    """

    @property
    def placeholder(self) -> int: ...

    def prepare(self, image: Any) -> PreparedImage:
        """Resize a PIL image in RGB."""

    def tokens(self, image: PreparedImage) -> tuple[list[int], int, int, int]:
        """Return the tokens that replace the placeholder, the first of the span among them, its length and its pitch."""

    def spaced(self, prompt: str) -> str:
        """Return a rendered prompt with the text that the model expects around images."""

    def limited(self, pixels: int) -> "ImageProcessor":
        """Return the same with a lower limit on pixels."""


def encode_prompt(
    prompt: str, images: Sequence[PreparedImage], processor: ImageProcessor, encode: Callable[[str], list[int]]
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Return the tokens of a rendered prompt, and its images among them."""
    return place_images(encode(processor.spaced(prompt)), images, processor)


def place_images(
    prompt: Sequence[int], images: Sequence[PreparedImage], processor: ImageProcessor
) -> tuple[list[int], tuple[ImageSpan, ...]]:
    """Replace the placeholders of a rendered prompt by the tokens of its images; return the prompt and the spans."""
    if len(images) > MAX_IMAGES:
        raise InputError(f"the prompt has {len(images)} images; {MAX_IMAGES} are allowed.")
    places = sum(token == processor.placeholder for token in prompt)
    if places != len(images):
        raise InputError(
            f"the prompt has {len(images)} images and {places} places for them: the chat template ignores images, or a text "
            f"contains the token that stands for one."
        )
    ids: list[int] = []
    spans: list[ImageSpan] = []
    following = iter(images)
    for token in prompt:
        if token != processor.placeholder:
            ids.append(token)
            continue
        image = next(following)
        made, first, count, pitch = processor.tokens(image)
        spans.append(ImageSpan(image, len(ids) + first, count, pitch))
        ids += made
    if spans and spans[-1].stop == len(ids):
        raise InputError("the prompt ends with an image; a text must follow it.")
    return ids, tuple(spans)


def check_shape(width: int, height: int) -> None:
    """Refuse an image that is so narrow that no patches fit."""
    if max(width, height) > MOST_UNEVEN * min(width, height):
        raise InputError(f"the image has {width} x {height} pixels; no side may be more than {MOST_UNEVEN} times the other.")


@dataclass(frozen=True)
class GridProcessor:
    """Images of any shape, resized to whole blocks of patches within limits, as Qwen's towers take them.

    patch       pixels of a patch's side
    merge       patches of a block's side; a block becomes one embedding
    min_pixels  and max_pixels of a resized image
    """

    placeholder: int
    patch: int
    merge: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def prepare(self, image: Any) -> PreparedImage:
        check_shape(*image.size)
        height, width = self.size(image.height, image.width)
        unit = self.patch * self.merge
        # 3: bicubic
        pixels = np.asarray(image.resize((width, height), resample=3))
        return PreparedImage(pixels, (height // unit, width // unit))

    def size(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that an image is resized to."""
        unit = self.patch * self.merge
        rows, columns = round(height / unit), round(width / unit)
        if rows * columns * unit * unit > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(side / shrink / unit)) for side in (height, width))
        elif rows * columns * unit * unit < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(side * grow / unit) for side in (height, width))
        return rows * unit, columns * unit

    def tokens(self, image: PreparedImage) -> tuple[list[int], int, int, int]:
        count = image.grid[0] * image.grid[1]
        return [self.placeholder] * count, 0, count, image.grid[1]

    def spaced(self, prompt: str) -> str:
        return prompt

    def limited(self, pixels: int) -> "GridProcessor":
        most = max(min(self.max_pixels, pixels), (self.patch * self.merge) ** 2)
        return replace(self, min_pixels=min(self.min_pixels, most), max_pixels=most)
