"""Guesses of a model's own further layer (MTP), for all texts of a step together.

The layer is given what the model made of each token of a text, and the token that came next. Whoever runs the model tells of
the former as it is found; it waits until guesses are wanted, or too much of it waits. What the layer keeps of a text is in a
cache of its own, with a prefix store of its own: where the model's cache had the beginning of a text, the layer has it from
there. Where it kept too little, a text begins for the layer where the model began to compute.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache
from auraflux.cache import Sequence as Held
from auraflux.cache.prefix import PrefixStore
from auraflux.errors import AurafluxError, CacheFull
from auraflux.run.device import device_memory, sent
from auraflux.run.engine import Engine
from auraflux.run.graph import Replayer
from auraflux.run.runner import Runner
from auraflux.run.speculate import MOST, Asked, Told
from auraflux.weights.traffic import guessing

WAITING = 64  # results of a text's tokens that wait, from which on they are read


class MTPDraft:
    """What is known of one text, and what the layer has read of it.

    free   False: guesses take steps of the layer
    kind   all are alike
    heard  where in the text the results end that are known
    whole  whether the layer has been given all pairs from the beginning of the text
    last   the layer's result for the last pair it was given, [1, H]
    """

    free, kind = False, 1

    def __init__(self, drafts: "MTPDrafts"):
        self._drafts, self.heard, self.whole = drafts, 0, True
        self._sequence: Held | None = None
        # results of tokens, and where they begin in the text
        self._waiting: list[tuple[int, Tensor]] = []
        self.last: Tensor | None = None

    def found(self, tokens: list[int], held: Held) -> None:
        """Begin with what the layer kept of a text whose beginning the model's cache has.

        Where texts part, the last pair is another one: the model reads the token again that it begins with, if it can.
        """
        if self.heard == 0 and (kept := self._drafts.kept(tokens, held.length)) is not None:
            if held.reach(kept.length) == kept.length:
                held.truncate(kept.length)
            self._sequence, self.heard = kept, held.length
            self.whole = kept.length == self.heard

    def close(self, tokens: list[int] | None = None) -> None:
        """Give back what is held for the text, or keep it if all its tokens are told; the layer may begin anew with it."""
        if tokens is not None and self.whole and self._sequence is not None:
            self._drafts.keep(self, tokens)
        elif self._sequence is not None:
            self._sequence.close()
        self.heard, self.whole, self._sequence, self._waiting, self.last = 0, True, None, [], None

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Guess up to `count` tokens after these."""
        return self._drafts.propose([(self, tokens, count)])[0]

    @property
    def sequence(self) -> Held:
        """What its cache holds of the text."""
        if self._sequence is None:
            self._sequence = self._drafts.cache.open()
        return self._sequence

    def hear(self, start: int, rows: Tensor) -> None:
        """Learn the results of tokens from `start` on, [T, H]. Those known before come again where a step is repeated."""
        rows, start = rows[max(self.heard - start, 0) :], max(start, self.heard)
        if len(rows):
            self.whole = self.whole and start == self.heard
            self._waiting.append((start, rows))
            self.heard = start + len(rows)

    def ready(self, tokens: list[int]) -> int:
        """How many results wait whose next tokens are known."""
        return sum(min(len(rows), max(len(tokens) - 1 - start, 0)) for start, rows in self._waiting)

    def pairs(self, tokens: list[int], most: int) -> tuple[list[int], list[Tensor]]:
        """The first of them, with the tokens that came next."""
        ids: list[int] = []
        found: list[Tensor] = []
        for start, rows in self._waiting:
            following = tokens[start + 1 : start + 1 + min(len(rows), most - len(ids))]
            ids += following
            found.append(rows[: len(following)])
        return ids, found

    def drop(self, count: int) -> None:
        """Forget the first of the results that wait: the layer has read them."""
        while count:
            start, rows = self._waiting.pop(0)
            if len(rows) > count:
                self._waiting.insert(0, (start + count, rows[count:]))
            count -= min(count, len(rows))


class LayerRunner(Runner):
    """The layer, as a `Replayer` runs it."""

    model: Any

    def repeated(self, given: Tensor, batch: Batch) -> Tensor:
        """Run pairs whose parts lie side by side: [T, 2 H] -> [T, H]."""
        with self.contract():
            return self.model.mtp.through(given, batch, self.cache)


class MTPDrafts:
    """The layer of a model, and what it keeps of all texts.

    graphs    replay its steps
    prefixes  texts that have ended
    """

    def __init__(self, runner: LayerRunner, graphs: bool):
        self.runner, self.model, self.cache = runner, runner.model, runner.cache
        self.prefixes = PrefixStore(self.cache)
        self.replayer = Replayer(runner, graphs)

    @classmethod
    def beside(cls, engine: Engine, shape: Any) -> "MTPDrafts":
        """With a cache for as many texts as an engine has, of the same settings."""
        cache = engine.cache
        settings = replace(cache.settings, protect_first=0, protect_last=0, checkpoint_stride=None)
        # guesses may reach beyond the last token of a text
        sizes: dict[str, Any] = {"context": cache.context + MOST + 1, "sequences": cache.sequences, "tokens": cache.tokens}
        sizes |= {"page": cache.page, "chunk": engine.chunk}
        own = Cache([shape], settings, **sizes, dtype=cache.dtype, device=cache.device)
        runner = LayerRunner(engine.model, own, engine.runner.exact)
        runner.invariant = engine.runner.invariant
        return cls(runner, engine.graphs)

    def begin(self) -> MTPDraft:
        """Guess at a new text."""
        return MTPDraft(self)

    def kept(self, tokens: list[int], count: int) -> Held | None:
        """What is kept of the pairs that the first `count` tokens of a text begin; None if more than the last is missing."""
        pairs = [*_names(tokens[: count + 1]), 0]
        if self.prefixes.look(pairs)[1] < max(count - 1, 1):
            return None
        return self.prefixes.open(pairs).sequence

    def keep(self, draft: MTPDraft, tokens: list[int]) -> None:
        """Keep what the layer has read of a text that has ended, for texts that begin like it."""
        sequence = draft.sequence
        try:
            with suppress(AurafluxError):
                self._read([(draft, tokens)])
        except BaseException:
            sequence.close()
            raise
        self.prefixes.keep(_names(tokens[: sequence.length + 1]), sequence)

    def hear(self, told: list[Told[MTPDraft]]) -> None:
        """Learn what the model made of tokens: of each text its draft, its tokens, and results [T, H] from a place on."""
        for draft, _, start, rows in told:
            draft.hear(start, rows)
        if any(draft.ready(tokens) >= WAITING for draft, tokens, _, _ in told):
            self._or_begin_anew(lambda: self._read([(draft, tokens) for draft, tokens, _, _ in told]), told)

    def propose(self, asked: list[Asked[MTPDraft]]) -> list[list[int]]:
        """Guess at texts, each by its draft, its tokens and how many guesses are wanted; none where results are missing."""
        able = [each for each in asked if each[0].heard == len(each[1]) - 1 and each[2] > 0]
        found: dict[MTPDraft, list[int]] = {}
        if able:
            self._or_begin_anew(lambda: found.update(self._guess(able)), able)
        return [found.get(draft, [])[:count] for draft, _, count in asked]

    def _or_begin_anew(self, work: Callable[[], None], texts: Sequence[tuple[Any, ...]]) -> None:
        """Do something; where the layer cannot, texts begin anew with it: they themselves can go on."""
        try:
            work()
        except AurafluxError:
            for draft, *_ in texts:
                draft.close()

    def _read(self, texts: list[tuple[MTPDraft, list[int]]]) -> None:
        """Give the layer all pairs that are known of texts."""
        while some := [(draft, tokens) for draft, tokens in texts if draft.ready(tokens)]:
            most = max(1, self.cache.chunk // len(some))
            pairs = [draft.pairs(tokens, most) for draft, tokens in some]
            counts = [len(ids) for ids, _ in pairs]
            ids = sent([token for ids, _ in pairs for token in ids], self.cache.device)
            rows = torch.cat([piece for _, pieces in pairs for piece in pieces])
            batch = self.cache.batch([draft.sequence for draft, _ in some])
            for (draft, _), count, result in zip(some, counts, self._step(batch, counts, ids, rows).split(counts), strict=True):
                draft.drop(count)
                draft.last = result[-1:]

    def _guess(self, asked: list[Asked[MTPDraft]]) -> dict[MTPDraft, list[int]]:
        self._read([(draft, tokens) for draft, tokens, _ in asked])
        lasts = {draft: draft.last for draft, _, _ in asked if draft.last is not None}
        if not lasts:
            return {}
        drafts, hidden = list(lasts), torch.cat(list(lasts.values()))
        batch = self.cache.batch([draft.sequence for draft in drafts])
        before = [sequence.length for sequence in batch.sequences]
        found = [self._likeliest(hidden)]
        try:
            for _ in range(1, max(count for _, _, count in asked)):
                hidden = self._step(batch, [1] * len(drafts), found[-1], hidden)
                found.append(self._likeliest(hidden))
        except CacheFull:
            # those so far are of use
            pass
        finally:
            batch.cut_back(before)
        return dict(zip(drafts, torch.stack(found, 1).tolist(), strict=True))

    def _step(self, batch: Batch, counts: list[int], ids: Tensor, hidden: Tensor) -> Tensor:
        """Give the layer pairs of texts, ids [T] and hidden [T, H]: its results [T, H]."""
        before = [sequence.length for sequence in batch.sequences]
        try:
            # all that the layer's experts are read for
            with device_memory(), self.runner.contract(), guessing(range(len(ids))):
                batch.extend(counts)
                pairs = self.model.mtp.side_by_side(self.model.embedded(ids), hidden)
                # as many as a step has checked at most; those of a prompt are more, and other numbers every time
                recurs = len(set(counts)) == 1 and counts[0] <= MOST + 1
                return self.replayer.repeat(batch, pairs) if recurs else self.runner.repeated(pairs, batch)
        except BaseException:
            batch.cut_back(before)
            raise

    def _likeliest(self, hidden: Tensor) -> Tensor:
        with self.runner.contract():
            return self.model.logits(hidden).argmax(-1)


def _names(tokens: list[int]) -> list[int]:
    """Numbers for the pairs that tokens make with those that come next: the second's, and for the first pair both."""
    return [tokens[0] << 32 | tokens[1], *tokens[2:]] if len(tokens) > 1 else []
