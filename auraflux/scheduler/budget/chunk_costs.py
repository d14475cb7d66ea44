"""`ChunkCosts`: measured times of mixed batches, from which the size of the next prefill chunk follows.

A chunk joins a decode step (`Engine.decode_mixed`) in one of few sizes, so that each size can be measured under load. What a
chunk costs depends on the model: a mixture's experts are all read for a small chunk too, a dense model's time grows with it.
"""

import time
from collections import deque
from collections.abc import Sequence
from statistics import median

# a larger chunk must cut the time per prompt token by so much, since it delays the tokens of all decoding sequences
WORTH = 0.15
# a chunk may make a step so many times as long as one without
STRETCH = 3.5
# of what a size that was not measured is assumed to cost beyond a smaller one, by the smaller one's time per token
HOPEFUL = 0.25
SAMPLES = 7  # kept of each size
TRUSTED = 3  # samples from which on a size counts as measured: the first may have captured a graph


class ChunkCosts:
    """Times of steps by the number of decoding sequences, padded, and of prompt tokens.

    lag  a step's tokens reach the host while the next step runs, so the time until the next tokens is that of the next step
    """

    def __init__(self, lag: bool):
        self._lag = lag
        self._samples: dict[tuple[int, int], deque[float]] = {}
        self._planned: tuple[int, int] | None = None
        self._running: tuple[int, int] | None = None
        self._last: float | None = None

    def plan(self, decoding: int, tokens: int) -> None:
        """Note how many sequences decode and how many prompt tokens join them in the step that is launched next."""
        self._planned = decoding, tokens

    def pause(self) -> None:
        """Ignore the time until the next decode step."""
        self._last = self._planned = self._running = None

    def decoded(self) -> None:
        """Record the time since the previous decode step."""
        now, last = time.perf_counter(), self._last
        step = self._running if self._lag else self._planned
        self._running, self._planned, self._last = self._planned, None, now
        if step is not None and last is not None:
            self._samples.setdefault(step, deque(maxlen=SAMPLES)).append(now - last)

    def seconds(self, decoding: int, tokens: int) -> float | None:
        """Return the time of a step; None if it was not measured often enough."""
        found = self._samples.get((decoding, tokens), ())
        return median(found) if len(found) >= TRUSTED else None

    def choose(self, decoding: int, sizes: Sequence[int], target_s: float | None) -> int | None:
        """Return the prompt tokens that join the next step; None where steps without any were not measured.

        sizes     in ascending order
        target_s  longest step; None for one in proportion to a step without prompt tokens
        """
        alone = self.seconds(decoding, 0)
        if alone is None:
            return None
        limit = STRETCH * alone if target_s is None else target_s
        chosen, each = sizes[0], self._each(decoding, sizes[0], alone)
        for size in sizes[1:]:
            if each is None:
                # measured first
                return chosen
            found = self.seconds(decoding, size)
            likely = alone + each * (chosen + HOPEFUL * (size - chosen)) if found is None else found
            if likely > limit:
                return chosen
            if found is not None and target_s is None and (found - alone) / size > (1 - WORTH) * each:
                # no better per token, though a yet larger one might be
                continue
            chosen, each = size, self._each(decoding, size, alone)
        return chosen

    def _each(self, decoding: int, size: int, alone: float) -> float | None:
        """Return the time per prompt token of a size; None if it was not measured."""
        found = self.seconds(decoding, size)
        return None if found is None else max(found - alone, 0.0) / size
