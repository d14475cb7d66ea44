"""Decoding as a replay: the step of a batch is recorded once and then repeated without its Python."""

import logging
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from auraflux.cache import Batch

if TYPE_CHECKING:
    from auraflux.ops._record import Recording
    from auraflux.run.engine import Engine

log = logging.getLogger("auraflux")


class DecodeGraph:
    """The steps of a batch whose sequences each get one token.

    Kernels choose by length how to share their work, so a step is recorded anew whenever the longest sequence has doubled.
    """

    def __init__(self, engine: "Engine", batch: Batch):
        self.engine, self.batch = engine, batch
        self.ids = torch.zeros(len(batch.sequences), dtype=torch.int64, device=engine.device)
        # why steps are not replayed; None if they are
        self.refused: str | None = None if engine.graphs and engine.device.type == "cpu" else "it is switched off"
        self._recording: Recording | None = None
        self._scores: Tensor | None = None
        self._fits_until = 0
        self._ran = False

    def __call__(self, ids: list[int]) -> Tensor:
        """Scores of the next token, [B, V]."""
        longest = 1 + max(sequence.length for sequence in self.batch.sequences)
        # the first step compiles what is not compiled yet; none of that belongs in a recording
        if self.refused is not None or not self._ran:
            self._ran = True
            return self.engine.score(self.engine.step(self.batch, [[token] for token in ids]))
        self.ids.copy_(torch.tensor(ids))
        before = [sequence.length for sequence in self.batch.sequences]
        try:
            self.batch.extend([1] * len(ids))
            if longest > self._fits_until:
                return self._record(longest)
            assert self._recording is not None
            assert self._scores is not None
            self._recording.replay()
            return self._scores.clone()
        except BaseException:
            self.engine.undo(self.batch, before)
            raise

    def _record(self, longest: int) -> Tensor:
        from auraflux.ops._record import record

        with record() as recording:
            scores = self.engine.score(self.engine.forward(self.ids, self.batch))
        if recording.spoiled is not None:
            self.refused = recording.spoiled
            log.info("steps are not replayed: %s", self.refused)
            return scores
        self._recording, self._scores = recording, scores
        self._fits_until = 1 << longest.bit_length()
        return scores.clone()
