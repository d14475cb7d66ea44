"""One text as it is written: the tokens chosen so far, their text, and where it ends."""

from collections.abc import Sequence
from typing import Any

from auraflux.run.detokenize import Detokenizer
from auraflux.run.grammar import Matcher
from auraflux.run.sampler import Row
from auraflux.run.sampling import Sampling
from auraflux.run.stops import StopStrings


class Stream:
    """A prompt that is being continued.

    prompt     tokens before the text: they count for penalties
    limit      most tokens to write
    ends       tokens that end the text and are not part of it
    tokenizer  None where tokens are shown as numbers
    show       special tokens that appear in the text
    matcher    of the grammar the text must follow
    tokens     of the text
    finish     why it ended: "stop" at an end token or stop string, "length" at the limit; None until then
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limit: int,
        ends: frozenset[int],
        tokenizer: Any | None,
        show: frozenset[int] = frozenset(),
        matcher: Matcher | None = None,
    ):
        self.sampling, self.limit = sampling, limit
        self.ends = frozenset() if sampling.endless else ends
        self.row = Row(sampling, prompt, matcher)
        self.tokens = self.row.text
        self.finish: str | None = None
        self._text = Detokenizer(tokenizer, show=show) if tokenizer is not None else None
        self._stops = StopStrings(sampling.stop)

    @property
    def last(self) -> bool:
        """Whether the next token is sure to be the last."""
        return len(self.tokens) + 1 >= self.limit

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.stopped

    def take(self, token: int) -> str:
        """Add a token that was chosen; give the text that is sure by now."""
        if token in self.ends:
            self.finish = "stop"
            return self._rest()
        self.row.take(token)
        piece = self._stops.add(f"{token} " if self._text is None else self._text.add(token))
        if self._stops.stopped is not None:
            self.finish = "stop"
        elif self.row.complete:
            self.finish = "stop"
            piece += self._rest()
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
            piece += self._rest()
        return piece

    def _rest(self) -> str:
        tail = self._stops.add(self._text.flush()) if self._text is not None else ""
        return tail + self._stops.flush()
