"""Strings that end a text. What may be the beginning of one is held back until it is known to be something else."""

from collections import deque
from collections.abc import Iterable

from auraflux.errors import InputError


class StopStrings:
    """Cuts a text that comes in pieces before the first stop string.

    First is the one that is complete first; of those complete at the same character, the longest. So the cut does not depend on
    where the pieces begin. Every character costs the same, however many and long the stop strings are (Aho-Corasick).
    """

    def __init__(self, stops: Iterable[str] = ()):
        self.stops = (stops,) if isinstance(stops, str) else tuple(stops)
        if "" in self.stops:
            raise InputError("A stop string is empty: it would end every text before it begins.")
        # states are beginnings of stop strings; 0 is the empty one
        self._steps: list[dict[str, int]] = [{}]
        self._depth = [0]
        # length of the longest stop string that ends at a state; 0 for none
        self._ends = [0]
        for stop in self.stops:
            self._insert(stop)
        self._shorter = self._link()
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
        """Give for each state the longest shorter one it ends with."""
        shorter = [0] * len(self._steps)
        waiting = deque(self._steps[0].values())
        while waiting:
            state = waiting.popleft()
            self._ends[state] = self._ends[state] or self._ends[shorter[state]]
            for letter, child in self._steps[state].items():
                back = shorter[state]
                while back and letter not in self._steps[back]:
                    back = shorter[back]
                shorter[child] = self._steps[back].get(letter, 0)
                waiting.append(child)
        return shorter

    def add(self, piece: str) -> str:
        """Take a piece of text; give what can be shown of it and of what was held back."""
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
            state = self._shorter[state]
        return self._steps[state].get(letter, 0)

    def flush(self) -> str:
        """Give what is held back: the text ends here."""
        held, self._held, self._state = self._held, "", 0
        return held
