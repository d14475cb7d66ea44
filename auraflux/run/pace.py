"""How many tokens of prompts are read between two steps of writing."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

PAUSE_S = 0.5  # by which others' prompts may delay a text on a CPU, as far as LEAST tokens allow
LEAST = {"cpu": 16, "cuda": 64}
MOST = {"cpu": 128, "cuda": 2048}
SPREAD = 16  # turns over which waiting prompts are spread while texts are written


def share_out(wanted: list[int], budget: int) -> list[int]:
    """Share a budget out evenly; what one does not want goes to the others."""
    shares, open_, left = [0] * len(wanted), sorted(range(len(wanted)), key=lambda i: wanted[i]), budget
    for done, i in enumerate(open_):
        shares[i] = min(wanted[i], left // (len(wanted) - done))
        left -= shares[i]
    # what did not divide
    for i in open_:
        more = min(wanted[i] - shares[i], left)
        shares[i], left = shares[i] + more, left - more
    return shares


class Pace:
    """Reads much at once while nobody writes; else a sixteenth of what waits, so that steps follow each other evenly.

    chunk  most tokens that are read at once
    """

    def __init__(self, chunk: int):
        self.chunk = chunk
        self._rate: float | None = None
        self._device = "cpu"

    def budget(self, unread: int, writing: int) -> int:
        """Tokens to read in this turn, of so many that wait, while so many texts are written."""
        if writing == 0:
            return self.chunk
        least, most = LEAST[self._device], MOST[self._device]
        if self._rate is not None:
            most = min(most, int(self._rate * PAUSE_S))
        # few sizes, so that steps recur
        share = unread // SPREAD // least * least
        return min(max(least, min(share, most)), self.chunk)

    @contextmanager
    def measured(self, tokens: int, device: torch.device) -> Iterator[None]:
        """Learn how fast tokens are read; a GPU does not say."""
        self._device = device.type
        began = time.perf_counter()
        yield
        if device.type == "cpu" and tokens >= LEAST["cpu"]:
            rate = tokens / (time.perf_counter() - began)
            self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
