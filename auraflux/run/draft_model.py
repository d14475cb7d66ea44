"""Guesses of a second, smaller model that has the same tokens."""

from itertools import takewhile

import torch
from torch import Tensor

from auraflux.cache import Batch, Sequence
from auraflux.cache.radix import common_length
from auraflux.errors import AurafluxError, SettingsError
from auraflux.run.engine import Engine
from auraflux.run.tokenizer import Tokenizer


class ModelDraft:
    """What a small model would go on with, the likeliest token each time.

    free   False: guesses take steps of the model
    kind   all are alike
    """

    free, kind = False, 1

    def __init__(self, engine: Engine, vocab: int):
        self.engine, self._vocab = engine, vocab
        self._read: list[int] = []
        self._sequence: Sequence | None = None

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Guess up to `count` tokens after these; none where the small model cannot go on."""
        room = self.engine.cache.context - len(tokens) + 1
        try:
            return self._write(tokens, min(count, room))
        except AurafluxError:
            # the text itself can go on
            self.close()
            return []

    def _write(self, tokens: list[int], count: int) -> list[int]:
        if count < 1:
            return []
        batch = self._read_up_to(tokens)
        found: list[Tensor] = []
        last: list[int] | Tensor = tokens[-1:]
        # a GPU goes from guess to guess without telling them
        for place in range(len(tokens), len(tokens) + count):
            last = self._say(self.engine.decode(batch, last).argmax(-1), place)
            found.append(last)
        guess = list(takewhile(lambda token: token < self._vocab, torch.cat(found).tolist()))
        self._read = [*tokens, *guess][: batch.sequences[0].length]
        return guess

    def _say(self, likeliest: Tensor, place: int) -> Tensor:
        """The guess at a place in the text, [1]."""
        return likeliest

    def _read_up_to(self, tokens: list[int]) -> Batch:
        """Bring the small model to before the last token of a text."""
        if self._sequence is None:
            self._sequence = self.engine.cache.open()
        sequence, chunk = self._sequence, self.engine.chunk
        sequence.truncate(min(common_length(self._read, tokens), len(tokens) - 1))
        while (start := sequence.length) < len(tokens) - 1:
            self.engine.read([sequence], [tokens[start : min(start + chunk, len(tokens) - 1)]])
        # states of other texts may have been moved since
        return self.engine.writing([sequence])

    def found(self, tokens: list[int], held: Sequence) -> None:
        """The small model reads a text when guesses are wanted."""

    def close(self, tokens: list[int] | None = None) -> None:
        """Give back what is held for the text."""
        if self._sequence is not None:
            self._sequence.close()
        self._sequence, self._read = None, []


def check_tokens(large: Tokenizer | None, small: Tokenizer | None, vocabs: tuple[int, int], name: str) -> None:
    """Refuse a small model that means other tokens by the same numbers."""
    same = vocabs[0] == vocabs[1] if large is None or small is None else large.vocabulary == small.vocabulary
    if not same:
        raise SettingsError(
            f"{name} cannot guess for this model: it has other tokens. Give a smaller model of the same family, or 'ngram'."
        )
