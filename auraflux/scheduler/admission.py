"""`Admission`: decides which queued sequences start, and gives them what the prefix cache has of their prompts."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from auraflux.cache.pages import LayerGroup
from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.cache.prefix.radix import common_length
from auraflux.engine.engine import Engine
from auraflux.scheduler.sequence import Sequence


@dataclass
class Counts:
    """Totals since the start.

    queried_tokens  prompt tokens looked up in the prefix cache
    hit_tokens      of them found there
    preemptions     sequences that lost their pages and were requeued
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    preemptions: int = 0

    def reset(self) -> None:
        """Start again at zero."""
        self.queried_tokens = self.hit_tokens = self.preemptions = 0


class Admission:
    """Chooses among queued sequences.

    running  the running sequences, which the scheduler changes
    """

    def __init__(self, engine: Engine, prefix_cache: PrefixCache, counts: Counts, running: list[Sequence], max_sequences: int):
        self.engine, self.prefix_cache, self.counts = engine, prefix_cache, counts
        self.running, self.max_sequences = running, max_sequences

    @property
    def full(self) -> bool:
        """True if no further sequence may run."""
        return len(self.running) >= self.max_sequences

    def admissible(self, queued: list[Sequence]) -> Iterator[Sequence]:
        """Yield the sequences that may start now, in order; each must be running before the next one is asked for."""
        for sequence in queued:
            if self.full:
                return
            entry, hit_tokens, _ = self.prefix_cache.match(sequence.reusable_ids, sequence.adapter)
            if self._is_being_prefilled(sequence, hit_tokens) or self._is_loading_prefix(sequence):
                continue
            if self.running and not self._fits(sequence, hit_tokens if entry is not None and entry.live else 0):
                return
            yield sequence

    def start(self, sequence: Sequence) -> None:
        """Branch a sequence from the prefix cache."""
        start = self.prefix_cache.open(sequence.reusable_ids, sequence.adapter)
        # it may have been preempted before its prompt was computed
        sequence.restart()
        sequence.kv_sequence = start.sequence
        start.sequence.inputs = sequence.images
        if sequence.images is not None:
            start.sequence.truncate(sequence.images.reusable(start.sequence.length))
        if sequence.draft_state is not None and start.hit_tokens:
            sequence.draft_state.proposer.on_prefix_hit(sequence.ids, start.sequence)
        if sequence.cached_tokens is None:
            sequence.cached_tokens = start.sequence.length
            self.counts.queried_tokens += len(sequence.ids) - 1
            self.counts.hit_tokens += sequence.cached_tokens
        if start.hit_tokens < start.shared_tokens < len(sequence.ids) - 1 and self.engine.cache.needs_checkpoints:
            # two prompts diverge here, so more may
            sequence.checkpoint_lengths = sorted({*sequence.checkpoint_lengths, start.shared_tokens})
        sequence.started_at = sequence.started_at or time.perf_counter()
        if sequence.uncomputed == 0:
            sequence.prefix_entry = self.prefix_cache.insert_live(sequence.prefix_ids[:-1], sequence.kv)

    def used_pages(self, group: LayerGroup) -> set[int]:
        """Return the pages of running sequences."""
        rows: list[Any] = [sequence.kv.group_states[group] for sequence in self.running]
        return {page for row in rows for page in row.pages}

    def _is_being_prefilled(self, sequence: Sequence, hit_tokens: int) -> bool:
        """Return whether a running sequence is prefilling more of this prompt than the prefix cache has."""
        page, ids = self.engine.cache.page, sequence.reusable_ids
        return any(
            other.uncomputed > 0
            and other.adapter == sequence.adapter
            and min(common_length(other.prefix_ids, ids), len(ids) - 1) >= hit_tokens + page
            for other in self.running
        )

    def _is_loading_prefix(self, sequence: Sequence) -> bool:
        """Return whether a prefix of this prompt is still being read from disk; insert it into the prefix cache once read."""
        if not sequence.disk_checked:
            sequence.disk_checked = True
            fetches = not sequence.needs_hidden
            sequence.disk_fetch = self.prefix_cache.fetch(sequence.prefix_ids, sequence.adapter) if fetches else None
        if sequence.disk_fetch is None:
            return False
        if not sequence.disk_fetch.done():
            return True
        fetched, sequence.disk_fetch = sequence.disk_fetch, None
        self.prefix_cache.insert_loaded(sequence.prefix_ids, fetched.result())
        return False

    def _fits(self, sequence: Sequence, hit_tokens: int) -> bool:
        """Return whether there are pages for the prompt, and one more page for each running sequence."""
        for group in self.engine.cache.page_groups:
            if not group.grows:
                continue
            needed = len(sequence.ids) // group.size + 1 - hit_tokens // group.size + len(self.running)
            if needed > group.pool.count - len(self.used_pages(group)):
                return False
        return True
