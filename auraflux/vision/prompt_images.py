"""`PromptImages`: the images of one prompt, as the cache's batches ask for them: RoPE positions and embeddings.

With multimodal RoPE (mRoPE) a text token has one position, and an image's tokens have the same position in time, and a row and
a column; the token after an image continues after its longer side. Each frequency rotates by one of the three.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from auraflux.vision.span import ImageSpan


@dataclass(frozen=True)
class BothWays:
    """Attention of an image's tokens to each other in both directions, for which one prefill chunk has all of them.

    most_tokens   of an image
    windows_only  in layers with a window only
    """

    most_tokens: int
    windows_only: bool = False


class PromptImages:
    """The images of a prompt of `length` tokens.

    axes       [R/2]  which position each RoPE frequency takes: 0 time, 1 row, 2 column; None where tokens have one position
    both_ways  see `BothWays`; None where the tokens of an image attend as others do
    found      the embeddings of each span, [N, H]; None until its image is encoded
    """

    def __init__(self, length: int, spans: Sequence[ImageSpan], axes: np.ndarray | None, both_ways: BothWays | None = None):
        self.length, self.spans, self.axes, self.both_ways = length, spans, axes, both_ways
        self.found: list[Tensor | None] = [None] * len(spans)
        # the tokens that attend to each other; the tokens around an image are not among them
        self._attending = [] if both_ways is None else [range(at[0], at[-1] + 1) for at in (span.embedded for span in spans)]
        self._embedded = [span.embedded for span in spans]
        self._places: np.ndarray | None = None
        self._next = length
        if axes is not None:
            self._places, self._next = _places(length, spans)

    def position(self, at: int) -> int:
        if self._places is None or at >= self.length:
            return at - self.length + self._next
        return int(self._places[at, 0])

    def positions(self, start: int, stop: int) -> np.ndarray:
        if self._places is None or start >= self.length:
            shift = self._next - self.length
            return np.arange(start + shift, stop + shift, dtype=np.int32)
        after = np.arange(self._next, self._next + max(0, stop - self.length), dtype=np.int32)
        places = np.concatenate([self._places[start:stop], np.repeat(after[:, None], 3, 1)])
        return places[:, self.axes] if self.overlaps(start, stop) else np.ascontiguousarray(places[:, 0])

    def overlaps(self, start: int, stop: int) -> bool:
        """Return whether some of these tokens are an image's."""
        return any(span.start < stop and start < span.stop for span in self.spans)

    def embeddings(self, start: int, stop: int) -> tuple[np.ndarray, Tensor] | None:
        rows, parts = [], []
        for span, embedded, found in zip(self.spans, self._embedded, self.found, strict=True):
            if span.start < stop and start < span.stop:
                first, last = np.searchsorted(embedded, [start, stop])
                assert found is not None, "the image is not encoded"
                rows.append(embedded[first:last] - start)
                parts.append(found[first:last])
        return (np.concatenate(rows), torch.cat(parts)) if rows else None

    def ends(self, span: range, windowed: bool) -> np.ndarray | None:
        both_ways, start = self.both_ways, span.start
        if both_ways is None or (both_ways.windows_only and not windowed) or not self.overlaps(start, span.stop):
            return None
        found = np.arange(start + 1, span.stop + 1, dtype=np.int32)
        for image in self._attending:
            found[max(image.start - start, 0) : max(image.stop - start, 0)] = image.stop
        return found

    def chunk(self, start: int, count: int) -> int:
        """Return how many tokens from `start` on a chunk of about `count` has, so that it cuts no image that must be whole."""
        stop = start + count
        cut = next((image for image in self._attending if image.start < stop < image.stop), None)
        if cut is None:
            return count
        return cut.start - start if cut.start > start else cut.stop - start

    def reusable(self, length: int) -> int:
        """Return how many of the first `length` tokens may come from the prefix cache: those before an image that is cut."""
        return next((image.start for image in self._attending if image.start < length < image.stop), length)

    def next_unencoded(self, start: int) -> int | None:
        """Return the number of the first span with tokens from `start` on that is not encoded; None if all are."""
        pending = (n for n, span in enumerate(self.spans) if self.found[n] is None and span.stop > start)
        return next(pending, None)

    def ready_until(self, start: int) -> int | None:
        """Return the number of the first token from `start` on that cannot be computed yet; None for no limit."""
        pending = self.next_unencoded(start)
        return None if pending is None else max(start, self.spans[pending].start)

    def release(self) -> None:
        """Forget the embeddings."""
        self.found = [None] * len(self.spans)


def _places(length: int, spans: Sequence[ImageSpan]) -> tuple[np.ndarray, int]:
    """Return the time, row and column of each token, int32 [T, 3], and the position of the token after the last."""
    places = np.empty((length, 3), np.int32)
    at = position = 0
    for span in spans:
        text = np.arange(position, position + span.start - at)
        places[at : span.start] = text[:, None]
        position += len(text)
        rows, columns = span.image.grid
        places[span.start : span.stop] = position
        places[span.embedded, 1] = position + np.arange(rows * columns) // columns
        places[span.embedded, 2] = position + np.arange(rows * columns) % columns
        at, position = span.stop, position + max(rows, columns)
    places[at:] = np.arange(position, position + length - at)[:, None]
    return places, position + length - at
