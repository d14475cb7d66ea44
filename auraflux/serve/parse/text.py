"""Text that comes in pieces, read from the front by generators.

A reader yields what it read, and None where it needs more text to go on (a `Wait` yields nothing else). So a syntax is
written as if the whole text were there, and what is read cannot depend on how the text was cut.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from auraflux.serve.deltas import Said

T = TypeVar("T")
Wait = Generator[None, None, T]
Pieces = Generator[str | None, None, T]
Steps = Generator[Said | None, None, T]

SPACE = re.compile(r"\s*")
WORD = re.compile(r"[^\s<>{}()\[\]\"'=,;:]*")
# a longer name is none
LONGEST_WORD = 256


class Broken(Exception):
    """What was read is not what the syntax says."""


class Text:
    """What has come and is not yet read."""

    def __init__(self, text: str = ""):
        self._text, self._at = text, 0
        self._ended = self._held = False

    def push(self, text: str) -> None:
        self._text = (self._text if self._held else self._text[self._at :]) + text
        self._at = self._at if self._held else 0

    def end(self) -> None:
        self._ended = True

    def hold(self) -> int:
        """Keep what is read from here on, so that it can be read again."""
        self._held = True
        return self._at

    def release(self, back: int | None = None) -> None:
        """Keep it no more; with `back`, what `hold` gave, read it again."""
        self._held = False
        self._at = self._at if back is None else back

    def take(self, count: int = 1) -> str:
        self._at += count
        return self._text[self._at - count : self._at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Take what is here and fits the pattern; more of it may come."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def peek(self, count: int = 1) -> Wait[str]:
        """Look at the next characters; fewer at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield None
        return self._text[self._at : self._at + count]

    def takes(self, literal: str) -> Wait[bool]:
        """Take this if it comes next; wait for no more than it needs to tell."""
        for length in range(1, len(literal) + 1):
            if (yield from self.peek(length)) != literal[:length]:
                return False
        self.take(len(literal))
        return True

    def space(self) -> Wait[str]:
        """Take all white space."""
        taken = ""
        while (yield from self.peek()).isspace():
            taken += self.run(SPACE)
        return taken

    def word(self, pattern: re.Pattern[str] = WORD) -> Wait[str]:
        """Take a name. Broken where none stands."""
        taken = self.run(pattern)
        while len(taken) <= LONGEST_WORD and (yield from self.peek()) and (more := self.run(pattern)):
            taken += more
        if not 0 < len(taken) <= LONGEST_WORD:
            raise Broken
        return taken

    def until(self, markers: Sequence[str], trim: bool = False) -> Pieces[str]:
        """Give the text up to the first of the markers, take and return that; an empty string at the end.

        With `trim` the white space before it belongs to the marker.
        """
        while True:
            begin, end = self._find(markers)
            if trim and markers:
                begin = len(self._text[self._at : begin].rstrip()) + self._at
            if self._ended and not end:
                begin = len(self._text)
            if begin > self._at:
                yield self.take(begin - self._at)
            if end:
                return self.take(end - begin)
            if self._ended:
                return ""
            yield None

    def _find(self, markers: Sequence[str]) -> tuple[int, int]:
        """Where the first marker begins and ends; the end is 0 where it may only be beginning."""
        found = [(at, at + len(each)) for each in markers if (at := self._text.find(each, self._at)) >= 0]
        whole = min(found, default=(len(self._text), 0))
        begun = len(self._text) if self._ended else min((self._begun(each) for each in markers), default=len(self._text))
        return whole if whole[1] and whole[0] <= begun else (min(whole[0], begun), 0)

    def _begun(self, marker: str) -> int:
        size = len(self._text)
        for length in range(min(len(marker) - 1, size - self._at), 0, -1):
            if self._text.endswith(marker[:length]):
                return size - length
        return size


def told(pieces: Pieces[T], say: Callable[[str], Said]) -> Steps[T]:
    """Tell what is read as it comes."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as stop:
            return stop.value
        yield None if piece is None else say(piece)


def gathered(pieces: Pieces[Any]) -> Wait[str]:
    """Read something whole."""
    parts = []
    for piece in pieces:
        if piece is None:
            yield None
        else:
            parts.append(piece)
    return "".join(parts)
