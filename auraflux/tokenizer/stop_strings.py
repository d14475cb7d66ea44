"""Stop strings. Text that may be the beginning of one is held back until it is known not to be."""

from collections import deque
from collections.abc import Iterable

from auraflux.errors import InputError


class StopStrings:
    """Matcher that cuts streamed text before the first stop string.

    The first is the one that is complete first; of those complete at the same character, the longest. So the result does not
    depend on how the text is divided. The cost per character is constant, for any number of stop strings (Aho-Corasick).
    """

    def __init__(self, stops: Iterable[str] = ()):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if "" in self.stops:
            raise InputError("A stop string is empty: every output would be empty.")
        # states are prefixes of stop strings; 0 is the empty one
        self._steps: list[dict[str, int]] = [{}]
        self._depth = [0]
        # length of the longest stop string that ends at a state; 0 for none
        self._ends = [0]
        for stop in self.stops:
            self._insert(stop)
        self._failure = self._link()
        self._state = 0
        self._held = ""
        self.stopped: str | None = None

    def _insert(self, stop: str) -> None:
        state = 0
        for letter in stop:
            if letter not in self._steps[state]:
                self._steps[state][letter] = len(self._steps)
                self._steps.append({})
                self._depth.append(self._depth[state] + 1)
                self._ends.append(0)
            state = self._steps[state][letter]
        self._ends[state] = len(stop)

    def _link(self) -> list[int]:
        """Return the failure link of each state: the longest proper suffix that is a state."""
        failure = [0] * len(self._steps)
        waiting = deque(self._steps[0].values())
        while waiting:
            state = waiting.popleft()
            self._ends[state] = self._ends[state] or self._ends[failure[state]]
            for letter, child in self._steps[state].items():
                back = failure[state]
                while back and letter not in self._steps[back]:
                    back = failure[back]
                failure[child] = self._steps[back].get(letter, 0)
                waiting.append(child)
        return failure

    def add(self, piece: str) -> str:
        """Add text and return the part that is safe to output, held-back text included."""
        if self.stopped is not None:
            return ""
        if not self.stops:
            return piece
        text = self._held + piece
        for end, letter in enumerate(piece, len(self._held) + 1):
            self._state = self._next(letter)
            if length := self._ends[self._state]:
                self.stopped, self._held = text[end - length : end], ""
                return text[: end - length]
        sure = len(text) - self._depth[self._state]
        self._held = text[sure:]
        return text[:sure]

    def _next(self, letter: str) -> int:
        state = self._state
        while state and letter not in self._steps[state]:
            state = self._failure[state]
        return self._steps[state].get(letter, 0)

    def flush(self) -> str:
        """Return the held-back text at the end of the sequence."""
        held, self._held, self._state = self._held, "", 0
        return held
