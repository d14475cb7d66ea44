"""Incremental text, parsed from the front by generators.

A parser yields deltas, and None where it needs more text (a `Wait` yields nothing else). Parsers are written as if the complete
text were there, so their result cannot depend on how it was chunked.
"""

import re
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from auraflux.serve.chat.deltas import ParsedDelta

T = TypeVar("T")
Wait = Generator[None, None, T]
TextChunks = Generator[str | None, None, T]
Steps = Generator[ParsedDelta | None, None, T]

SPACE = re.compile(r"\s*")
WORD = re.compile(r"[^\s<>{}()\[\]\"'=,;:]*")
# longer words are not names
LONGEST_WORD = 256


class NoMatch(Exception):
    """The text does not match the syntax."""


class TextStream:
    """Buffer of received text with a read position."""

    def __init__(self, text: str = ""):
        self._text, self._at = text, 0
        self._ended = self._held = False

    def push(self, text: str) -> None:
        self._text = (self._text if self._held else self._text[self._at :]) + text
        self._at = self._at if self._held else 0

    def end(self) -> None:
        self._ended = True

    def hold(self) -> int:
        """Retain text from here on for a rewind; return the position."""
        self._held = True
        return self._at

    def release(self, back: int | None = None) -> None:
        """Stop retaining text; with `back`, the position from `hold`, rewind to it."""
        self._held = False
        self._at = self._at if back is None else back

    def take(self, count: int = 1) -> str:
        self._at += count
        return self._text[self._at - count : self._at]

    def run(self, pattern: re.Pattern[str]) -> str:
        """Consume the buffered text that matches the pattern; more of the match may arrive."""
        found = pattern.match(self._text, self._at)
        return self.take(found.end() - self._at) if found else ""

    def peek(self, count: int = 1) -> Wait[str]:
        """Return the next characters without consuming them; fewer at the end."""
        while len(self._text) - self._at < count and not self._ended:
            yield None
        return self._text[self._at : self._at + count]

    def accept(self, literal: str) -> Wait[bool]:
        """Return whether `literal` comes next, and consume it; wait for no more text than the decision needs."""
        for length in range(1, len(literal) + 1):
            if (yield from self.peek(length)) != literal[:length]:
                return False
        self.take(len(literal))
        return True

    def space(self) -> Wait[str]:
        """Consume white space."""
        taken = ""
        while (yield from self.peek()).isspace():
            taken += self.run(SPACE)
        return taken

    def word(self, pattern: re.Pattern[str] = WORD) -> Wait[str]:
        """Consume a name; raise NoMatch if there is none."""
        taken = self.run(pattern)
        while len(taken) <= LONGEST_WORD and (yield from self.peek()) and (more := self.run(pattern)):
            taken += more
        if not 0 < len(taken) <= LONGEST_WORD:
            raise NoMatch
        return taken

    def until(self, markers: Sequence[str], trim: bool = False) -> TextChunks[str]:
        """Yield the text before the first marker, consume and return the marker; return "" at the end.

        With `trim`, white space before the marker belongs to it.
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
        """Return where the first marker begins and ends; the end is 0 for a possible prefix of one."""
        found = [(at, at + len(each)) for each in markers if (at := self._text.find(each, self._at)) >= 0]
        complete = min(found, default=(len(self._text), 0))
        partial = len(self._text) if self._ended else min((self._partial(each) for each in markers), default=len(self._text))
        return complete if complete[1] and complete[0] <= partial else (min(complete[0], partial), 0)

    def _partial(self, marker: str) -> int:
        """Return where a prefix of the marker at the end of the text begins."""
        size = len(self._text)
        for length in range(min(len(marker) - 1, size - self._at), 0, -1):
            if self._text.endswith(marker[:length]):
                return size - length
        return size


def emit(chunks: TextChunks[T], make: Callable[[str], ParsedDelta]) -> Steps[T]:
    """Yield a delta for each chunk."""
    while True:
        try:
            chunk = next(chunks)
        except StopIteration as stop:
            return stop.value
        yield None if chunk is None else make(chunk)


def collect(chunks: TextChunks[Any]) -> Wait[str]:
    """Return all chunks joined."""
    parts = []
    for chunk in chunks:
        if chunk is None:
            yield None
        else:
            parts.append(chunk)
    return "".join(parts)
