"""Warm-up after a server is ready: the parts of `Warmup` that are left run while there are no requests.

A part's prompts are requests of the scheduler like any other, so a client's request waits for one step at most: it cancels the
part, which begins again when the server is idle.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from auraflux.engine.request import Request
from auraflux.engine.sampling import Sampling
from auraflux.loading.language_model import LanguageModel
from auraflux.loading.warmup import DECODED, Warmup, WarmupBatch, prompts_of
from auraflux.scheduler.sequence import Sequence

log = logging.getLogger("auraflux")


class BackgroundWarmup:
    """Runs the rest of a warm-up, whose first parts have run.

    done  parts of the warm-up that have run
    """

    def __init__(self, warmup: Warmup, done: int):
        self._loaded: LanguageModel = warmup.loaded
        scheduler, engine = self._loaded.scheduler, self._loaded.engine
        self._scheduler, self._cache, self._counts = scheduler, scheduler.prefix_cache, scheduler.counts
        self._batches = deque(warmup.batches[done:])
        mixed = [(count, size) for count in warmup.counts for size in engine.mixed_chunk_sizes(count)]
        self._mixed = deque(mixed)
        # of the part that runs
        self._batch: WarmupBatch | None = None
        self._sequences: list[Sequence] = []
        self._finish: Callable[[], None] = lambda: None
        self._interrupted = False

    @property
    def active(self) -> bool:
        """Return whether parts are left."""
        return bool(self._batches or self._mixed or self._batch)

    def interrupt(self) -> None:
        """Cancel the part that runs, because a request has arrived; safe to call from another thread."""
        self._interrupted = True
        for sequence in list(self._sequences):
            self._scheduler.cancel(sequence)

    def advance(self, idle: bool) -> None:
        """Begin the next part if the last one has ended and no request runs; the scheduler's own steps run it.

        idle  there are no requests
        """
        if self._batch is not None:
            if any(sequence.finish_reason is None for sequence in self._sequences):
                return
            self._end()
        if not idle:
            return
        self._interrupted = False
        if self._batches:
            self._begin(self._batches.popleft())
        elif self._mixed:
            with self._scheduler.exclusive():
                self._loaded.engine.warm_up_mixed(*self._mixed.popleft())
        if not self.active:
            log.info("warmed up: all usual steps run as CUDA graphs")

    def _begin(self, batch: WarmupBatch) -> None:
        entries, counts = self._cache.entries(), replace(self._counts)

        def finish() -> None:
            with self._scheduler.exclusive():
                self._cache.keep_only(entries)
            self._counts.__dict__.update(counts.__dict__)

        self._batch, self._finish = batch, finish
        sampling = Sampling(max_tokens=DECODED, ignore_eos=True)
        self._sequences = [self._scheduler.submit(Request(tuple(prompt), sampling)) for prompt in prompts_of(batch)]

    def _end(self) -> None:
        """Leave nothing of a part behind; one that was interrupted begins again later."""
        batch, self._batch, self._sequences = self._batch, None, []
        if self._interrupted and batch is not None:
            self._batches.appendleft(batch)
        else:
            self._finish()
