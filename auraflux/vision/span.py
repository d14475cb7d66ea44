"""`ImageSpan`: the tokens of a prompt that stand for an image, and the image as its tower takes it. Plain data."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

WORDS = 4  # of 32 bits in a digest


@dataclass(frozen=True)
class PreparedImage:
    """An image resized for a tower.

    pixels  uint8 [H, W, 3]
    grid    rows and columns of embeddings that the tower makes of it
    digest  of the pixels
    """

    pixels: np.ndarray = field(repr=False)
    grid: tuple[int, int]
    digest: bytes = b""

    def __post_init__(self) -> None:
        width = self.pixels.shape[1].to_bytes(8, "big")
        made = blake2b(self.pixels.tobytes(), digest_size=4 * WORDS, salt=width)
        object.__setattr__(self, "digest", made.digest())


@dataclass(frozen=True)
class ImageSpan:
    """An image in a prompt.

    start   number of its first token
    tokens  number of its tokens, row ends included
    pitch   tokens from one row of the grid to the next
    """

    image: PreparedImage
    start: int
    tokens: int
    pitch: int

    @property
    def stop(self) -> int:
        """Number of the first token after it."""
        return self.start + self.tokens

    @property
    def embedded(self) -> np.ndarray:
        """Numbers of its tokens that embeddings stand for, in the order of the embeddings."""
        rows, columns = self.image.grid
        return (self.start + np.arange(rows)[:, None] * self.pitch + np.arange(columns)).reshape(-1)

    def prefix_ids(self) -> list[int]:
        """Return what its tokens are to the prefix cache: negative numbers from the digest, so that equal images match."""
        words = np.frombuffer(self.image.digest, "<u4").astype(np.int64) % ((1 << 31) - 1)
        return (-2 - np.resize(words, self.tokens)).tolist()


def prefix_ids(prompt: Sequence[int], spans: Iterable[ImageSpan]) -> list[int]:
    """Return a prompt's tokens as the prefix cache knows them."""
    ids = list(prompt)
    for span in spans:
        ids[span.start : span.stop] = span.prefix_ids()
    return ids
