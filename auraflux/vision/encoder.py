"""`ImageEncoder`: runs a tower, a few layers at a time between decode steps, and keeps its output by the image's digest."""

import time
from collections import OrderedDict
from collections.abc import Iterator

import torch
from torch import Tensor

from auraflux.vision.span import PreparedImage
from auraflux.vision.towers.layers import Tower

CACHE_NBYTES = 256 << 20  # of embeddings


class ImageEncoder:
    """A tower and the embeddings of recent images, in LRU order.

    limit_nbytes  of the embeddings that are kept
    runs          images that went through the tower
    """

    def __init__(self, tower: Tower, limit_nbytes: int = CACHE_NBYTES):
        self.tower, self.limit_nbytes, self.nbytes, self.runs = tower, limit_nbytes, 0, 0
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()
        # the image that is being encoded, and its remaining layers
        self._digest = b""
        self._layers: Iterator[Tensor] = iter(())
        self._last: Tensor | None = None

    def find(self, image: PreparedImage) -> Tensor | None:
        """Return the embeddings of an image that was encoded before; None if they are not kept."""
        found = self._kept.get(image.digest)
        if found is not None:
            self._kept.move_to_end(image.digest)
        return found

    def encode(self, image: PreparedImage, pause_s: float | None = None) -> Tensor | None:
        """Encode an image and return its embeddings [N, H].

        pause_s  seconds after which to return None; the next call goes on with the next layer. None to finish
        """
        if (found := self.find(image)) is not None:
            return found
        with torch.inference_mode():
            if self._digest != image.digest:
                self._digest, self._layers, self._last = image.digest, self.tower.run(image), None
            began = time.perf_counter()
            try:
                for made in self._layers:
                    self._last = made
                    if pause_s is not None and time.perf_counter() - began > pause_s:
                        return None
            except BaseException:
                self._digest = b""
                raise
        found, self._digest, self._last = self._last, b"", None
        assert found is not None
        self.runs += 1
        self._keep(image.digest, found)
        return found

    def _keep(self, digest: bytes, made: Tensor) -> None:
        self._kept[digest] = made
        self.nbytes += made.nbytes
        while self._kept and self.nbytes > self.limit_nbytes:
            self.nbytes -= self._kept.popitem(last=False)[1].nbytes
