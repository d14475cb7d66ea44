"""`LatencyTarget`: limits the prefill of each step so that tokens of running sequences arrive in time."""

import time

# a step that was too long counts at once; the limit grows slowly, so that few steps exceed the target
GROWTH, SHRINK = 1.25, 0.5
# of the target: what is left absorbs the noise of step times
AIM = 0.9


class LatencyTarget:
    """Finds how many prompt tokens fit in a step, by feedback from the time between decode steps.

    target_s  inter-token latency that steps should keep
    unit      fewest prompt tokens of a step
    most      most prompt tokens of a step
    """

    def __init__(self, target_s: float, unit: int, most: int):
        self.target_s, self.unit, self.most = target_s, unit, most
        self._limit = float(unit)
        self._planned = 0
        self._last: float | None = None

    def tokens(self) -> int:
        """Return the most prompt tokens of the next step, a multiple of the unit."""
        return max(self.unit, int(self._limit) // self.unit * self.unit)

    def plan(self, tokens: int) -> None:
        """Note prompt tokens that are computed before the next decode step ends."""
        self._planned += tokens

    def pause(self) -> None:
        """Ignore the time until the next decode step: no sequence waits for it."""
        self._last = None

    def decoded(self) -> None:
        """Adapt to the time since the previous decode step."""
        now = time.perf_counter()
        last, planned = self._last, self._planned
        self._last, self._planned = now, 0
        # a step with little prefill does not tell how long a full one takes
        if last is None or 2 * planned < self.tokens():
            return
        factor = AIM * self.target_s / max(now - last, 1e-6)
        self._limit = min(max(self._limit * min(max(factor, SHRINK), GROWTH), self.unit), self.most)
