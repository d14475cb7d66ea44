"""Reading passages with a model through one kind of cache."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.cache.calibration import ModelVectors
from auraflux.eval.metrics import NONE, Differences, compare
from auraflux.eval.text import Passage
from auraflux.run.engine import Engine

PIECE = 256  # tokens whose scores are in memory together


class Reader(Protocol):
    """Something that scores tokens."""

    def scores(self, ids: Sequence[int], start: int) -> Iterator[Tensor]:
        """The scores after every token of a text from `start` on, [T, V] in pieces of `PIECE` tokens."""

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        """Log-likelihoods, in nats, of what comes after a prompt: of all of an ending's tokens but the first `shared`.

        Endings have those in common; there is at least one.
        """

    def after(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """The scores after every token of what follows a prompt: [T, V]."""


class EngineReader:
    """A model with a cache of its own."""

    def __init__(
        self,
        base: Engine,
        shapes: list[Any],
        settings: CacheSettings,
        context: int,
        exact: bool,
        graphs: bool = False,
        vectors: ModelVectors | None = None,
    ):
        self.engine = Engine(
            base.model,
            shapes,
            settings,
            context=context,
            # the prompt, what its endings have in common, and one of them
            sequences=3,
            chunk=PIECE,
            vectors=vectors,
            exact=exact,
            graphs=graphs,
            dtype=base.cache.dtype,
            device=base.device,
        )
        self._prompt: tuple[int, ...] = ()
        self._read: Any = None

    def scores(self, ids: Sequence[int], start: int) -> Iterator[Tensor]:
        self.forget()
        sequence = self.engine.cache.open()
        try:
            self._take(sequence, ids[:start])
            yield from self.engine.scores(sequence, list(ids[start:]))
        finally:
            sequence.close()

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        self._keep(tuple(prompt))
        trunk = self._read.fork()
        try:
            last = self.engine.all_scores(trunk, list(endings[0][:shared]))[-1:]
            return [self._likelihood(trunk, last, list(ending[shared:])) for ending in endings]
        finally:
            trunk.close()

    def _likelihood(self, trunk: Any, last: Tensor, ending: list[int]) -> float:
        """The likelihood of an ending after `trunk`, whose last token has the scores [1, V]."""
        scores = last
        if len(ending) > 1:
            branch = trunk.fork()
            try:
                scores = torch.cat([last, self.engine.all_scores(branch, ending[:-1])])
            finally:
                branch.close()
        targets = torch.tensor(ending, device=scores.device)
        return float(torch.log_softmax(scores.double(), -1).gather(-1, targets[:, None]).sum())

    def after(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        self._keep(tuple(prompt))
        branch = self._read.fork()
        try:
            return self.engine.all_scores(branch, list(ids))
        finally:
            branch.close()

    def _keep(self, prompt: tuple[int, ...]) -> None:
        """Have a prompt read; questions about the same one share it."""
        if self._read is not None and self._prompt == prompt:
            return
        self.forget()
        self._read, self._prompt = self.engine.cache.open(), prompt
        self._take(self._read, prompt)

    def _take(self, sequence: Any, ids: Sequence[int]) -> None:
        """Read tokens whose scores nobody wants."""
        for start in range(0, len(ids), PIECE):
            self.engine.read([sequence], [list(ids[start : start + PIECE])])

    def forget(self) -> None:
        """Close the prompt that was kept."""
        if self._read is not None:
            self._read.close()
        self._read, self._prompt = None, ()


def differences(reference: Reader, readers: dict[str, Reader], passage: Passage) -> dict[str, Differences]:
    """Read a passage with all readers side by side, and compare each with the reference, which may be among them."""
    others = [name for name, reader in readers.items() if reader is not reference]
    found = dict.fromkeys(readers, NONE)
    ids = list(passage.ids)
    # scores before the first that is measured are not made, by whole pieces, so that all are cut as without that
    start = (passage.first - 1) // PIECE * PIECE
    # the scores after the last token predict nothing that is there
    pieces = (reader.scores(ids[:-1], start) for reader in (reference, *(readers[name] for name in others)))
    for wanted, *theirs in zip(*pieces, strict=True):
        skipped = max(passage.first - 1 - start, 0)
        targets = torch.tensor(ids[start + 1 : start + 1 + len(wanted)])[skipped:]
        scores = dict(zip(others, theirs, strict=True))
        for name in readers:
            found[name] += compare(wanted[skipped:], scores.get(name, wanted)[skipped:], targets)
        start += len(wanted)
    return found
