"""Scorers: models with one kind of KV cache that compute logits and likelihoods of tokens."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache import CacheSettings
from auraflux.cache.key_calibration import ModelCalibration
from auraflux.engine.engine import Engine
from auraflux.eval.metrics import NONE, Differences, compare
from auraflux.eval.text import Passage

CHUNK = 256  # tokens per prefill step, whose logits are in memory together


class Scorer(Protocol):
    """Computes logits and likelihoods of tokens."""

    def logits(self, ids: Sequence[int], start: int) -> Iterator[Tensor]:
        """Yield the logits after every token from `start` on, [T, V] in chunks of `CHUNK` tokens."""

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        """Return the log-likelihood of each ending after a prompt, in nats, without its first `shared` tokens.

        Endings have those tokens in common; there is at least one.
        """

    def after(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        """Return the logits after every token of a continuation of a prompt: [T, V]."""


class EngineScorer:
    """A model with a separate KV cache."""

    def __init__(
        self,
        base: Engine,
        shapes: list[Any],
        settings: CacheSettings,
        context: int,
        exact: bool,
        graphs: bool = False,
        key_calibration: ModelCalibration | None = None,
    ):
        self.engine = Engine(
            base.model,
            shapes,
            settings,
            context=context,
            # the prompt, the shared beginning of its endings, and one ending
            sequences=3,
            chunk=CHUNK,
            key_calibration=key_calibration,
            exact=exact,
            graphs=graphs,
            dtype=base.cache.dtype,
            device=base.device,
        )
        self._prompt: tuple[int, ...] = ()
        self._cached: Any = None

    def logits(self, ids: Sequence[int], start: int) -> Iterator[Tensor]:
        self.clear()
        sequence = self.engine.cache.open()
        try:
            self._prefill(sequence, ids[:start])
            yield from self.engine.logits(sequence, list(ids[start:]))
        finally:
            sequence.close()

    def likelihoods(self, prompt: Sequence[int], endings: Sequence[Sequence[int]], shared: int) -> list[float]:
        self._prefill_prompt(tuple(prompt))
        trunk = self._cached.fork()
        try:
            last = self.engine.all_logits(trunk, list(endings[0][:shared]))[-1:]
            return [self._likelihood(trunk, last, list(ending[shared:])) for ending in endings]
        finally:
            trunk.close()

    def _likelihood(self, trunk: Any, last: Tensor, ending: list[int]) -> float:
        """Return the log-likelihood of an ending after `trunk`, whose last token has the logits [1, V]."""
        logits = last
        if len(ending) > 1:
            branch = trunk.fork()
            try:
                logits = torch.cat([last, self.engine.all_logits(branch, ending[:-1])])
            finally:
                branch.close()
        targets = torch.tensor(ending, device=logits.device)
        return float(torch.log_softmax(logits.double(), -1).gather(-1, targets[:, None]).sum())

    def after(self, prompt: Sequence[int], ids: Sequence[int]) -> Tensor:
        self._prefill_prompt(tuple(prompt))
        branch = self._cached.fork()
        try:
            return self.engine.all_logits(branch, list(ids))
        finally:
            branch.close()

    def _prefill_prompt(self, prompt: tuple[int, ...]) -> None:
        """Prefill a prompt unless it is cached; continuations of the same prompt share it."""
        if self._cached is not None and self._prompt == prompt:
            return
        self.clear()
        self._cached, self._prompt = self.engine.cache.open(), prompt
        self._prefill(self._cached, prompt)

    def _prefill(self, sequence: Any, ids: Sequence[int]) -> None:
        """Prefill tokens whose logits are not needed."""
        for start in range(0, len(ids), CHUNK):
            self.engine.prefill([sequence], [list(ids[start : start + CHUNK])])

    def clear(self) -> None:
        """Release the cached prompt."""
        if self._cached is not None:
            self._cached.close()
        self._cached, self._prompt = None, ()


def differences(reference: Scorer, scorers: dict[str, Scorer], passage: Passage) -> dict[str, Differences]:
    """Score a passage with all scorers and compare each with the reference, which may be among them."""
    others = [name for name, scorer in scorers.items() if scorer is not reference]
    found = dict.fromkeys(scorers, NONE)
    ids = list(passage.ids)
    # skip the chunks before the first measured token; whole chunks, so that the chunk boundaries stay the same
    start = (passage.first - 1) // CHUNK * CHUNK
    # the logits after the last token have no target
    chunks = (scorer.logits(ids[:-1], start) for scorer in (reference, *(scorers[name] for name in others)))
    for wanted, *theirs in zip(*chunks, strict=True):
        skipped = max(passage.first - 1 - start, 0)
        targets = torch.tensor(ids[start + 1 : start + 1 + len(wanted)])[skipped:]
        logits = dict(zip(others, theirs, strict=True))
        for name in scorers:
            found[name] += compare(wanted[skipped:], logits.get(name, wanted)[skipped:], targets)
        start += len(wanted)
    return found
