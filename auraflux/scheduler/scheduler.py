"""Continuous batching on one engine: every engine step admits sequences, computes prefill chunks and decodes one token each.

One thread at a time runs steps (`engine_lock.py`): a server has a thread for it, elsewhere each thread that waits for output
runs steps for all sequences.

A sequence needs no state but its tokens and its KV pages: all tokens but the last must be computed, and the last one is the
input of the next decode step. So a sequence that was preempted, or whose step failed, is prefilled again as far as needed.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from itertools import islice
from typing import Any

from auraflux.cache.prefix.disk import PrefixDisk
from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.engine.engine import Engine
from auraflux.engine.request import Output, Request, TokenLogprob
from auraflux.errors import AurafluxError, CacheFull
from auraflux.scheduler.admission import Admission, Counts
from auraflux.scheduler.decode import DecodeRunner
from auraflux.scheduler.engine_lock import EngineLock
from auraflux.scheduler.prefill import PrefillChunk, PrefillRunner
from auraflux.scheduler.queue import FairQueue
from auraflux.scheduler.sequence import Sequence
from auraflux.scheduler.sequence_builder import SequenceBuilder
from auraflux.speculative.speculation import Speculation
from auraflux.weights.file_watch import FileWatch

log = logging.getLogger("auraflux")

CONSIDERED = 64  # queued sequences that a step considers for admission


class Scheduler:
    """Serves requests.

    tokenizer       None for a model whose prompts and outputs are token ids
    stop_token_ids  tokens that end a generation
    max_sequences   maximum number of running sequences
    max_queue       maximum number of queued ones; None for no limit
    disk            for prefixes that memory has no room for
    speculation     for speculative decoding; None without
    target_itl_s    inter-token latency that prefill steps should keep, in seconds; None for no target
    watch           of the files that the weights are mapped from
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any | None,
        stop_token_ids: frozenset[int],
        *,
        max_sequences: int,
        max_queue: int | None = None,
        disk: PrefixDisk | None = None,
        watch: FileWatch | None = None,
        speculation: Speculation | None = None,
        target_itl_s: float | None = None,
    ):
        self.engine, self.max_sequences = engine, max_sequences
        self.builder = SequenceBuilder(engine, tokenizer, stop_token_ids)
        self._check_files = (lambda: None) if watch is None else watch.check
        self.prefix_cache = PrefixCache(engine.cache, disk)
        self._queue = FairQueue(max_queue)
        self._running: list[Sequence] = []
        self.counts = Counts()
        self._admission = Admission(engine, self.prefix_cache, self.counts, self._running, max_sequences)
        self._prefill = PrefillRunner(engine, self.prefix_cache, target_itl_s)
        self._decode = DecodeRunner(engine, self._prefill.publish)
        # whether the prefill of the next step has run already
        self._prefilled_ahead = False
        self.set_speculation(speculation)
        self._lock = EngineLock()

    @property
    def running(self) -> int:
        """Number of running sequences."""
        return len(self._running)

    @property
    def queued(self) -> int:
        """Number of queued sequences."""
        return len(self._queue)

    @property
    def idle(self) -> bool:
        return not self._running and not len(self._queue)

    @property
    def pages(self) -> tuple[int, int]:
        """Pages of running sequences, and all pages."""
        groups = self.engine.cache.page_groups
        return sum(len(self._admission.used_pages(group)) for group in groups), sum(group.pool.count for group in groups)

    def submit(self, request: Request, on_output: Callable[[Output], None] = lambda output: None) -> Sequence:
        """Queue a request. The thread that runs steps calls `on_output`, which must be quick, with each output."""
        self.check(request)
        sequence = self.builder.build(request, on_output)
        if self.speculation is not None and request.sampling.stateless and request.thinking is None:
            sequence.draft_state = self.speculation.begin()
        with self._lock.changed:
            self._queue.add(sequence)
            self._lock.changed.notify_all()
        return sequence

    def set_speculation(self, speculation: Speculation | None) -> None:
        """Use this speculation from now on; None to decode without draft tokens."""
        self.speculation = self._prefill.speculation = self._decode.speculation = speculation

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence before the next step."""
        sequence.cancelled = True

    def wait(self, until: Callable[[], bool]) -> None:
        """Run steps, or wait while another thread runs them, until a condition holds."""
        self._lock.wait(until, self.step)

    def exclusive(self) -> AbstractContextManager[None]:
        """Hold the engine lock inside the block."""
        return self._lock.held()

    def wait_for_work(self, timeout_s: float) -> None:
        """Wait until a sequence is queued or running, or until the timeout."""
        with self._lock.changed:
            self._lock.changed.wait_for(lambda: not self.idle, timeout_s)

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be served."""
        self._check_files()
        self.engine.check()
        self.builder.check(request)

    def step(self, decode: bool = True) -> bool:
        """Run one engine step: admit, prefill and, unless told otherwise, decode; return whether any sequence is running."""
        try:
            self._drop_cancelled()
            self._admit()
            if decode:
                # sampling goes first: a GPU would run it after all prefill work. An error comes up again below
                with suppress(Exception):
                    self._sample()
            # a preempted sequence must not return before the others made progress
            while not self._run_prefill(while_decoding=decode):
                pass
            while decode and not self._run_decode():
                pass
        except BaseException:
            self._rewind()
            raise
        return bool(self._running)

    def _drop_cancelled(self) -> None:
        with self._lock.changed:
            gone = [sequence for sequence in self._queue.in_order() if sequence.cancelled]
            for sequence in gone:
                self._queue.remove(sequence)
        for sequence in [*gone, *(sequence for sequence in self._running if sequence.cancelled)]:
            sequence.finish("cancelled")
            self._release(sequence)

    def _admit(self) -> None:
        """Start queued sequences while there are pages for them."""
        with self._lock.changed:
            queued = [] if self._admission.full else list(islice(self._queue.in_order(), CONSIDERED))
        for sequence in self._admission.admissible(queued):
            with self._lock.changed:
                self._queue.remove(sequence)
            self._admission.start(sequence)
            self._running.append(sequence)

    def _run_prefill(self, while_decoding: bool) -> bool:
        """Run the next prefill chunks; return False if a sequence was preempted."""
        self._decode.mixed_chunk = None
        if self._prefilled_ahead:
            # those sequences come first: while they decode, prompts would be prefilled in small chunks
            self._prefilled_ahead = False
            return True
        self._encode_images(while_decoding)
        steps = self._prefill.next(self._running, while_decoding)
        if steps and while_decoding and self._prefill.fits_mixed_batch(steps[-1], self._running):
            [self._decode.mixed_chunk] = steps.pop()
        return all(self._run_chunks(chunks, while_decoding) for chunks in steps)

    def _encode_images(self, while_decoding: bool) -> None:
        try:
            self._prefill.encode_images(self._running, while_decoding)
        except Exception as err:
            self._fail([sequence for sequence in self._running if sequence.images is not None and sequence.uncomputed > 0], err)

    def _run_chunks(self, chunks: list[PrefillChunk], with_logits: bool) -> bool:
        """Run prefill chunks in one step; return False if a sequence was preempted for them."""
        try:
            self._check_files()
            self._compute(chunks, with_logits)
        except CacheFull as err:
            self._preempt(err)
            return False
        except Exception as err:
            self._fail([sequence for sequence, _ in chunks], err)
        return True

    def _prefill_ahead(self) -> None:
        """Prefill before the last tokens of ending sequences are known; an error comes up again in the next step."""
        with suppress(Exception):
            for chunks in self._prefill.next(self._running, while_decoding=False, ahead=True):
                self._compute(chunks)
                self._prefilled_ahead = True

    def _compute(self, chunks: list[PrefillChunk], with_logits: bool = True) -> None:
        """Compute prefill chunks; with last-token logits where they end all prompts, unless `with_logits` is False."""
        if with_logits and not self._decode.ready and self._prefill.completes_prompts(chunks, self._running):
            sequences = [sequence for sequence, _ in chunks]
            self._decode.begin(sequences, self._prefill.run_to_logits(sequences))
        else:
            self._prefill.run(chunks)
            for sequence in [sequence for sequence, _ in chunks if sequence.pooling is not None and not sequence.uncomputed]:
                sequence.finish("stop")
                self._release(sequence)

    def _run_decode(self) -> bool:
        """Decode one token of every sequence whose prompt is computed; return False if a sequence was preempted first."""
        try:
            self._check_files()
            if not self._decode.ready:
                self._decode.step([sequence for sequence in self._running if sequence.uncomputed == 0])
            if not self._sample():
                return True
            sampled = self._decode.collect(self._running, self._prefill_ahead)
            self._prefill.decoded()
        except CacheFull as err:
            self._preempt(err)
            return False
        except Exception as err:
            # the prefill chunk may have caused it
            mixed = [] if self._decode.mixed_chunk is None else [self._decode.mixed_chunk[0]]
            self._fail([*(sequence for sequence in self._running if sequence.uncomputed <= 0), *mixed], err)
            return True
        for sequence, token, logprob in sampled:
            if sequence.finish_reason is None:
                self._append(sequence, token, logprob)
        left, self._decode.mixed_chunk = self._decode.mixed_chunk, None
        if left is not None and not self._prefilled_ahead:
            # no decode step ran, or the chunk did not fit
            self._run_chunks([left], with_logits=False)
        return True

    def _sample(self) -> bool:
        """Start sampling unless it has started; return False without logits, or if a grammar ended a sequence."""
        if self._decode.sampled:
            return True
        if not self._decode.ready or self._fail_grammars():
            return False
        self._decode.sample()
        return True

    def _fail_grammars(self) -> bool:
        """End the first sequence whose grammar cannot be followed further; return whether there was one."""
        for sequence in (sequence for sequence in self._decode.live if sequence.finish_reason is None):
            try:
                sequence.generated.sampler_state.allowed_tokens()
            except AurafluxError as err:
                self._fail([sequence], err)
                return True
        return False

    def _append(self, sequence: Sequence, token: int, logprob: TokenLogprob | None) -> None:
        try:
            sequence.append(token, logprob)
        except AurafluxError as err:
            self._fail([sequence], err)
            return
        if sequence.finish_reason is not None:
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Remove a sequence from the running ones and hand its pages to the prefix cache, or free them after a failure."""
        if self._decode.mixed_chunk is not None and self._decode.mixed_chunk[0] is sequence:
            self._decode.mixed_chunk = None
        if sequence.prefix_entry is not None:
            self.prefix_cache.remove(sequence.prefix_entry)
            sequence.prefix_entry = None
        if sequence in self._running:
            self._running.remove(sequence)
        if sequence.draft_state is not None and sequence.finish_reason is not None:
            sequence.draft_state.proposer.close(sequence.ids if sequence.failure is None else None)
        if sequence.kv_sequence is not None:
            kv, sequence.kv_sequence, sequence.draft_checkpoint = sequence.kv_sequence, None, None
            if kv.length > len(sequence.ids):
                # a stop string may come before accepted draft tokens
                kv.truncate(len(sequence.ids))
            kv.inputs = None
            if sequence.images is not None:
                sequence.images.release()
            # a prompt that is embedded is not continued
            if sequence.failure is None and sequence.pooling is None:
                self.prefix_cache.insert(sequence.prefix_ids[: kv.length], kv)
            else:
                kv.close()

    def _fail(self, sequences: list[Sequence], err: Exception) -> None:
        if not isinstance(err, AurafluxError):
            log.exception("a step of %d sequences failed", len(sequences))
        for sequence in sequences:
            sequence.failure = err
            sequence.finish("error")
            self._release(sequence)
        self._rewind()

    def fail_all(self, err: AurafluxError) -> None:
        """End all running and queued sequences and clear the prefix cache: ranks that held their pages are gone."""
        with self._lock.changed:
            queued = list(self._queue.in_order())
            for sequence in queued:
                self._queue.remove(sequence)
        self._fail([*self._running, *queued], err)
        self.prefix_cache.clear()

    def _preempt(self, err: CacheFull) -> None:
        """Enlarge the KV cache if experts can give up memory. Otherwise preempt the youngest sequence: release its pages and
        requeue it; a single sequence fails instead."""
        if self.engine.take_memory is not None:
            self._rewind()
            if self.engine.grow_cache():
                return
        if len(self._running) == 1:
            self._fail(list(self._running), err)
            return
        sequence = self._running[-1]
        if sequence in self._decode.live:
            self._rewind()
        self.counts.preemptions += 1
        self._release(sequence)
        with self._lock.changed:
            self._queue.requeue(sequence)

    def _rewind(self) -> None:
        """Drop steps whose tokens are not known."""
        self._decode.reset()
        for sequence in self._running:
            sequence.generated.sampler_state.reset_counts()
            if sequence.uncomputed < 0:
                sequence.kv.truncate(len(sequence.ids) - 1)
