"""Measured costs of verify steps, which decide how many draft tokens pay."""

from collections import defaultdict, deque
from statistics import median, median_low

from auraflux.speculative.draft_state import FIRST_DRAFT_TOKENS

MEASUREMENTS = 9  # whose median counts
SKIPPED_MEASUREMENTS = 1  # of a step size: the first may compile
DEFAULT_COST = 0.15  # of one more token per sequence, as a share of a decode step, while it is not measured


class StepCosts:
    """Measured times of verify steps relative to plain decode steps, by batch size and draft tokens.

    default  cost of one more token per sequence while it is not measured
    """

    def __init__(self) -> None:
        self._plain: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=MEASUREMENTS))
        self._ratios: dict[tuple[int, int], deque[float]] = defaultdict(lambda: deque(maxlen=MEASUREMENTS))
        self._seen: dict[tuple[int, int], int] = defaultdict(int)
        self.default = DEFAULT_COST

    def record(self, sequences: int, draft_tokens: int, seconds: float) -> None:
        """Record the time of a step."""
        self._seen[sequences, draft_tokens] += 1
        if self._seen[sequences, draft_tokens] <= SKIPPED_MEASUREMENTS:
            return
        if draft_tokens == 0:
            self._plain[sequences].append(seconds)
        elif self._plain[sequences]:
            self._ratios[sequences, draft_tokens].append(seconds / median(self._plain[sequences]))

    def max_draft_tokens(self, sequences: int) -> int:
        """Return how many draft tokens a step may have: few at first, then twice the largest measured number."""
        return 2 * max(self._measured(sequences)) + 1 if len(self._measured(sequences)) > 1 else FIRST_DRAFT_TOKENS

    def relative(self, sequences: int, draft_tokens: int) -> float:
        """Return the time of a verify step in decode steps, interpolated; optimistic beyond the first measurement."""
        if not self._plain[sequences]:
            return float("inf")
        known = self._measured(sequences)
        below = max(n for n in known if n <= draft_tokens)
        above = min((n for n in known if n > draft_tokens), default=None)
        if below == draft_tokens:
            return known[draft_tokens]
        if above is not None:
            slope = (known[above] - known[below]) / (above - below)
        elif below == 0:
            slope = self.default / sequences
        else:
            before = max(n for n in known if n < below)
            slope = max(0.0, (known[below] - known[before]) / (below - before)) * (0.5 if before == 0 else 1.0)
        return known[below] + slope * (draft_tokens - below)

    def _measured(self, sequences: int) -> dict[int, float]:
        # the lower median: other load on the machine only makes measurements larger
        measured = {n: median_low(taken) for (b, n), taken in self._ratios.items() if b == sequences and taken}
        return {0: 1.0, **measured}

    def reset(self) -> None:
        """Drop all measurements but those of plain steps."""
        self._ratios.clear()


def step_sizes(limit: int, costly: bool) -> list[int]:
    """Return the numbers of draft tokens that a step may have: few, so that costs are soon known and graphs are reused.

    costly  drafting takes time, so that a single draft token may be best
    """
    return [count for count in (*([1] if costly else []), FIRST_DRAFT_TOKENS, *range(7, limit + 1, 8)) if count <= limit]
