"""One text as it is written: the tokens chosen so far, their text, and where it ends."""

from typing import Any

from auraflux.cache import Sequence
from auraflux.run.detokenize import Detokenizer
from auraflux.run.sampler import Row
from auraflux.run.sampling import Sampling
from auraflux.run.stops import StopStrings


class Stream:
    """A sequence that is being continued.

    prompt     tokens the cache has not seen yet
    before     tokens it has: they count for penalties
    limit      most tokens to write
    ends       tokens that end the text and are not part of it
    tokenizer  None where tokens are shown as numbers
    tokens     of the text
    chosen     all tokens: those of the text, and the end token after it
    finish     why it ended: "stop" at an end token or stop string, "length" at the limit; None until then
    """

    def __init__(
        self,
        sequence: Sequence,
        prompt: list[int],
        sampling: Sampling,
        limit: int,
        ends: frozenset[int],
        tokenizer: Any | None,
        before: list[int] | None = None,
    ):
        self.sequence, self.prompt, self.sampling, self.limit, self.ends = sequence, prompt, sampling, limit, ends
        self.row = Row(sampling, [*(before or []), *prompt])
        self.tokens: list[int] = []
        self.chosen: list[int] = []
        self.finish: str | None = None
        self._text = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stops = StopStrings(sampling.stop)

    @property
    def last(self) -> bool:
        """Whether the next token is sure to be the last."""
        return len(self.tokens) + 1 >= self.limit

    def take(self, token: int) -> str:
        """Add a token that was chosen; give the text that is sure by now."""
        self.chosen.append(token)
        if token in self.ends:
            self.finish = "stop"
            return self._rest()
        self.tokens.append(token)
        piece = self._stops.add(f"{token} " if self._text is None else self._text.add(token))
        if self._stops.stopped is not None:
            self.finish = "stop"
        elif len(self.tokens) >= self.limit:
            self.finish = "length"
            piece += self._rest()
        return piece

    def _rest(self) -> str:
        tail = self._stops.add(self._text.flush()) if self._text is not None else ""
        return tail + self._stops.flush()
