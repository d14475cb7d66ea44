"""A sequence that is kept between calls, so that what a new prompt has in common with the last is not computed again."""

from itertools import takewhile

from auraflux.run.engine import Engine
from auraflux.run.stream import Stream


class Session:
    """The tokens a sequence holds, and the sequence.

    writer  whose text it is at the moment; whoever comes later takes it over
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.sequence = engine.cache.open()
        self.ids: list[int] = []
        self.writer: Stream | None = None

    def align(self, prompt: list[int]) -> int:
        """Cut the sequence back to what the prompt begins with; give how many of the prompt's tokens it then holds.

        The last token of the prompt is never among them: its scores are wanted.
        """
        held = self.ids[: self.sequence.length]
        common = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, prompt[:-1], strict=False)))
        self.sequence.truncate(common)
        self.ids = prompt[: self.sequence.length]
        return self.sequence.length

    def extend(self, ids: list[int]) -> None:
        """Note tokens that were given to the sequence, or are about to be."""
        self.ids = [*self.ids, *ids]

    def reset(self) -> None:
        """Forget everything."""
        self.sequence.close()
        self.sequence, self.ids, self.writer = self.engine.cache.open(), [], None
