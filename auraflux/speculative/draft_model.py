"""Draft tokens from a second, smaller model with the same vocabulary."""

from itertools import takewhile

import torch
from torch import Tensor

from auraflux.cache import Batch, KVSequence
from auraflux.cache.prefix.radix import common_length
from auraflux.engine.engine import Engine
from auraflux.errors import AurafluxError, SettingsError
from auraflux.tokenizer.tokenizer import Tokenizer


class DraftModelProposer:
    """The greedy continuation of a draft model.

    free   False: drafting takes steps of the draft model
    kind   one for all drafts
    """

    free, kind = False, 1

    def __init__(self, engine: Engine, vocab: int):
        self.engine, self._vocab = engine, vocab
        # tokens whose KV the draft model has computed
        self._computed: list[int] = []
        self._kv_sequence: KVSequence | None = None

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return up to `count` draft tokens after these; none if the draft model fails."""
        room = self.engine.cache.context - len(tokens) + 1
        try:
            return self._generate(tokens, min(count, room))
        except AurafluxError:
            # the sequence can decode without draft tokens
            self.close()
            return []

    def _generate(self, tokens: list[int], count: int) -> list[int]:
        if count < 1:
            return []
        batch = self._prefill(tokens)
        found: list[Tensor] = []
        last: list[int] | Tensor = tokens[-1:]
        # tokens stay on the device, so that a GPU runs from step to step
        for position in range(len(tokens), len(tokens) + count):
            last = self._draft_token(self.engine.decode(batch, last).argmax(-1), position)
            found.append(last)
        draft = list(takewhile(lambda token: token < self._vocab, torch.cat(found).tolist()))
        self._computed = [*tokens, *draft][: batch.sequences[0].length]
        return draft

    def _draft_token(self, likeliest: Tensor, position: int) -> Tensor:
        """Return the draft token at a position of the sequence, [1]."""
        return likeliest

    def _prefill(self, tokens: list[int]) -> Batch:
        """Compute all tokens but the last, and return the batch of the next decode step."""
        if self._kv_sequence is None:
            self._kv_sequence = self.engine.cache.open()
        sequence, chunk = self._kv_sequence, self.engine.chunk
        sequence.truncate(min(common_length(self._computed, tokens), len(tokens) - 1))
        while (start := sequence.length) < len(tokens) - 1:
            self.engine.prefill([sequence], [tokens[start : min(start + chunk, len(tokens) - 1)]])
        # a new batch: other sequences may have moved the recurrent states since
        return self.engine.decode_batch([sequence])

    def on_prefix_hit(self, tokens: list[int], kv_sequence: KVSequence) -> None:
        """Do nothing: the draft model computes a sequence when draft tokens are requested."""

    def close(self, tokens: list[int] | None = None) -> None:
        """Release the draft model's KV of the sequence."""
        if self._kv_sequence is not None:
            self._kv_sequence.close()
        self._kv_sequence, self._computed = None, []


def check_vocabulary(large: Tokenizer | None, small: Tokenizer | None, vocabs: tuple[int, int], name: str) -> None:
    """Raise if a draft model has another vocabulary."""
    same = vocabs[0] == vocabs[1] if large is None or small is None else large.vocabulary == small.vocabulary
    if not same:
        raise SettingsError(
            f"{name} cannot draft for this model: its vocabulary differs. Use a smaller model of the same family, or 'ngram'."
        )
