"""How many tokens of prompts are read between two steps of writing, and of which prompts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

# by which others' prompts may delay a text on a CPU, as far as LEAST tokens allow, and what is read at a time in any case:
# every step of reading costs its Python, 18 ms for 30 layers
PAUSE_S, WORTH_S = 0.5, 0.1
# tokens read at a time while texts are written; up to 256 a GPU's weights take longer than tokens
LEAST = {"cpu": 16, "cuda": 256}
MOST = {"cpu": 128, "cuda": 2048}
SPREAD = {"cpu": 16, "cuda": 8}  # turns over which waiting prompts are spread then
CROWD = 16  # texts that are written on a GPU: for every so many of them LEAST tokens, while fewer prompts wait
TOGETHER = 8  # prompts whose pieces go through the model as one


class Pace:
    """Reads much at once while nobody writes; else a part of what waits, so that steps follow each other evenly.

    chunk   most tokens that are read at once
    device  "cpu" or "cuda"
    """

    def __init__(self, chunk: int, device: str = "cpu"):
        self.chunk, self.device = chunk, device
        self._rate: float | None = None
        self._turns = 0

    def budget(self, unread: int, waiting: int, writing: int) -> int:
        """Tokens to read in this turn, of so many that so many prompts lack, while so many texts are written."""
        if writing == 0:
            return self.chunk
        unit, most = LEAST[self.device], MOST[self.device]
        least = unit
        if self.device == "cuda" and waiting < writing:
            # few wait: their first tokens come soon anyway, and all others would be late
            most = min(most, unit * max(1, writing // CROWD))
        if self._rate is not None:
            least = min(max(unit, int(self._rate * WORTH_S)), most)
            most = max(least, min(most, int(self._rate * PAUSE_S)))
        # few sizes, so that steps recur
        share = unread // SPREAD[self.device] // unit * unit
        return min(max(least, min(share, most)), self.chunk)

    def shares(self, wanted: list[int], budget: int, one: bool = False) -> list[int]:
        """Share a budget out among prompts that want so many tokens, the one that waited longest first.

        That one gets half, and the shortest get the rest, so that neither short ones wait for a long one nor a long one for
        ever. What is too little to be halved goes to one and the other by turns.

        one  give one prompt something, to be read with what is written: each other would read all weights again
        """
        self._turns += 1
        small = one or budget < 2 * LEAST[self.device]
        others = sorted(range(1, len(wanted)), key=lambda i: wanted[i])
        order = [*others, 0] if small and self._turns % 2 else [0, *others]
        shares, left = [0] * len(wanted), budget
        for i in order[: 1 if one else TOGETHER]:
            most = left if small or i or not others else max(budget // 2, budget - sum(wanted[j] for j in others))
            shares[i] = min(wanted[i], most, left)
            left -= shares[i]
        # what the shortest left over
        if left and shares[0]:
            shares[0] += min(wanted[0] - shares[0], left)
        return shares

    @contextmanager
    def measured(self, tokens: int) -> Iterator[None]:
        """Learn how fast tokens are read; a GPU does not say."""
        began = time.perf_counter()
        yield
        if self.device == "cpu" and tokens >= LEAST["cpu"]:
            rate = tokens / (time.perf_counter() - began)
            self._rate = rate if self._rate is None else 0.7 * self._rate + 0.3 * rate
