"""Decode steps: their batch and logits, the verification of draft tokens, and the step that a GPU starts ahead.

A GPU runs one step ahead of Python: sampled tokens stay on the device and feed the next step, while Python receives them.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from auraflux.cache import Batch
from auraflux.cache.prefix.radix import common_length
from auraflux.engine.device import HostCopy, to_device
from auraflux.engine.engine import Engine
from auraflux.engine.request import TokenLogprob
from auraflux.engine.sampler import SampledLogprobs, Sampler
from auraflux.errors import CacheFull
from auraflux.scheduler.prefill import PrefillChunk
from auraflux.scheduler.sequence import Sequence
from auraflux.speculative.speculation import Speculation
from auraflux.weights.experts.stats import draft_rows

Sampled = list[tuple[Sequence, int, TokenLogprob | None]]


class InFlight(NamedTuple):
    """Sampled tokens on their way from the device, with their log probabilities if requested."""

    tokens: Tensor
    arriving: HostCopy
    sampled_logprobs: SampledLogprobs | None


@dataclass
class DecodeBatch:
    """Sequences that decode together.

    batch         for steps of one token per sequence
    verify_batch  for steps with draft tokens; None until there is one
    """

    sequences: list[Sequence]
    batch: Batch
    sampler: Sampler
    verify_batch: Batch | None = None


class DecodeRunner:
    """Runs decode steps.

    speculation  of speculative decoding; None without
    live         sequences whose next logits are known or in flight, in the order of the batch; some may have finished since
    ready        whether there are logits, or `sampled` tokens in flight
    mixed_chunk  a prefill chunk that joins the next step in a mixed batch if it fits; `publish` is then called for it
    """

    def __init__(self, engine: Engine, publish: Callable[[Sequence], None]):
        self.engine, self._publish = engine, publish
        self.speculation: Speculation | None = None
        self.mixed_chunk: PrefillChunk | None = None
        self.live: list[Sequence] = []
        # draft tokens that the step verifies, for each live sequence
        self._drafts: list[list[int]] = []
        self._logits: Tensor | None = None
        self._in_flight: InFlight | None = None
        # hidden states behind the logits; None where nothing needs them
        self._hidden: Tensor | None = None
        self._decode_batch: DecodeBatch | None = None
        self._began = self._ended = 0.0

    @property
    def ready(self) -> bool:
        return self._logits is not None or self.sampled

    @property
    def sampled(self) -> bool:
        return self._in_flight is not None

    def reset(self) -> None:
        """Drop the batch and a step whose tokens are not known yet."""
        self.live, self._decode_batch, self.mixed_chunk = [], None, None
        self._logits, self._in_flight, self._hidden = None, None, None

    def step(self, sequences: list[Sequence]) -> None:
        """Compute the logits after each sequence's last token, with draft tokens where they are worth verifying."""
        if not sequences:
            return
        self._began = time.perf_counter()
        self.live = self._in_last_order(sequences)
        batch = self._batch_of(self.live)
        if self.speculation is not None and any(drafts := self._with_checkpoints(self._plan(self.speculation, batch))):
            try:
                self._set_logits(self._verify(batch, drafts), drafts)
            except CacheFull:
                # the cache may have room without the draft tokens
                pass
            else:
                return
        self._set_logits(self._decode(batch.batch, [sequence.ids[-1] for sequence in self.live]), [[] for _ in self.live])

    def _decode(self, batch: Batch, ids: list[int] | Tensor) -> Tensor:
        """Return the logits after one token of each sequence; a prefill chunk joins them if one is due."""
        if self.mixed_chunk is not None:
            sequence, count = self.mixed_chunk
            count = self.engine.fit_mixed_chunk(len(batch.sequences), count, count < sequence.next_chunk)
            chunk = sequence.ids[sequence.kv.length : sequence.kv.length + count]
            if chunk and (found := self.engine.decode_mixed(batch, ids, sequence.kv, chunk)) is not None:
                self.mixed_chunk = None
                self._publish(sequence)
                return found
        return self.engine.decode(batch, ids)

    def begin(self, sequences: list[Sequence], logits: Tensor) -> None:
        """Continue from the last-token logits of a prefill step."""
        self._began = time.perf_counter()
        self.live = sequences
        self._batch_of(sequences)
        self._set_logits(logits, [[] for _ in sequences])

    def _set_logits(self, logits: Tensor, drafts: list[list[int]]) -> None:
        self._logits, self._drafts, self._hidden = logits, drafts, self.engine.hidden

    def _plan(self, speculation: Speculation, batch: DecodeBatch) -> list[list[int]]:
        """Return the draft tokens of each sequence."""
        if batch.verify_batch is None:
            batch.verify_batch = self.engine.cache.batch([sequence.kv for sequence in batch.sequences])
        verify = batch.verify_batch
        return speculation.plan_drafts(batch.sequences, lambda more: self.engine.graphs.has_graph(verify, 1 + more))

    def _verify(self, batch: DecodeBatch, drafts: list[list[int]]) -> Tensor:
        """Return the logits after each sequence's last token and each of its draft tokens, [T, V]."""
        assert batch.verify_batch is not None
        ids = [[sequence.ids[-1], *draft] for sequence, draft in zip(batch.sequences, drafts, strict=True)]
        firsts = {0, *accumulate(map(len, ids))}
        with draft_rows(row for row in range(max(firsts)) if row not in firsts):
            return self.engine.verify(batch.verify_batch, ids)

    def _with_checkpoints(self, drafts: list[list[int]]) -> list[list[int]]:
        """Checkpoint recurrent states before draft tokens; drop the draft of a sequence that cannot be checkpointed."""
        if not self.engine.cache.has_states:
            return drafts
        return [draft if draft and _checkpoint(sequence) else [] for sequence, draft in zip(self.live, drafts, strict=True)]

    def sample(self) -> None:
        """Start sampling from the logits, before a GPU gets other work that would delay the tokens."""
        assert self._logits is not None
        sampler = self._sampler(self._drafts)
        tokens = sampler(self._logits)
        self._in_flight, self._logits = InFlight(tokens, HostCopy(tokens), sampler.sampled_logprobs), None

    def collect(self, running: Iterable[Sequence], meanwhile: Callable[[], None]) -> Sampled:
        """Return the sampled token of every live sequence, and its accepted draft tokens. A GPU starts the next step first.

        meanwhile  gives the GPU other work where all sequences end with this token
        """
        assert self._in_flight is not None
        live, drafts, hidden, began = self.live, self._drafts, self._hidden, max(self._began, self._ended)
        (sampled, arriving, sampled_logprobs), self._in_flight = self._in_flight, None
        if self.engine.graphs.runs_ahead and not any(drafts) and not self._will_draft(live):
            joining = [sequence for sequence in running if sequence.uncomputed == 0 and sequence not in live]
            self._step_ahead(sampled, joining)
            if not self.ready:
                meanwhile()
        tokens = arriving.wait()
        logprobs = {} if sampled_logprobs is None else sampled_logprobs.read(tokens)
        found: Sampled = []
        accepted: list[int] = []
        firsts: list[int] = []
        rows = iter(range(len(tokens)))
        for sequence, draft in zip(live, drafts, strict=True):
            mine = [next(rows), *islice(rows, len(draft))]
            accepted.append(common_length(draft, [tokens[row] for row in mine[:-1]]))
            firsts.append(mine[0])
            found += [(sequence, tokens[row], logprobs.get(row)) for row in mine[: accepted[-1] + 1]]
            sequence.steps += 1
            if draft:
                self._reject(sequence, draft[: accepted[-1]])
        if self.speculation is not None and hidden is not None:
            counts = zip(live, firsts, accepted, strict=True)
            self.speculation.observe_hidden(
                [
                    (sequence, len(sequence.ids) - 1, hidden[at : at + count + 1])
                    for sequence, at, count in counts
                    if sequence.finish_reason is None
                ]
            )
        self._ended = time.perf_counter()
        if self.speculation is not None:
            took_s = None if self.engine.graphs.warming_up else self._ended - began
            self.speculation.record(live, drafts, accepted, took_s)
        return found

    def _will_draft(self, sequences: list[Sequence]) -> bool:
        return self.speculation is not None and self.speculation.worthwhile(sequences)

    def _sampler(self, drafts: list[list[int]]) -> Sampler:
        """Return a sampler for every token of the step."""
        assert self._decode_batch is not None
        if not any(drafts):
            return self._decode_batch.sampler
        rows = [
            (sequence.generated.sampler_state, at)
            for sequence, draft in zip(self.live, drafts, strict=True)
            for at in range(len(draft) + 1)
        ]
        return Sampler([state for state, _ in rows], [at for _, at in rows])

    def _reject(self, sequence: Sequence, accepted: list[int]) -> None:
        """Cut rejected draft tokens off; a state that falls back to its checkpoint computes the accepted ones again."""
        length = len(sequence.ids) + len(accepted)
        if sequence.kv.truncate(length):
            self.engine.prefill([sequence.kv], [[*sequence.ids, *accepted][sequence.kv.length : length]])

    def _step_ahead(self, sampled: Tensor, joining: list[Sequence]) -> None:
        """Start the next step with tokens that only the device knows, for sequences that go on.

        A sequence that ends with such a token has computed one token too many: the one it ended with.
        """
        live = self.live
        going_on = (s for s in live if s.finish_reason is None and not s.generated.next_is_last)
        sequences = self._in_last_order([*going_on, *joining])
        if not sequences:
            return
        tokens = sampled
        if joining:
            tokens = torch.cat([sampled, to_device([sequence.ids[-1] for sequence in joining], sampled.device)])
        numbers = {sequence: number for number, sequence in enumerate([*live, *joining])}
        if (rows := [numbers[sequence] for sequence in sequences]) != list(range(len(tokens))):
            tokens = tokens[to_device(rows, sampled.device)]
        try:
            logits = self._decode(self._batch_of(sequences).batch, tokens)
        except CacheFull:
            # the tokens are emitted first; the error comes up again unless a finished sequence frees pages
            return
        self.live = sequences
        self._set_logits(logits, [[] for _ in sequences])

    def _in_last_order(self, sequences: list[Sequence]) -> list[Sequence]:
        """Order sequences as in the last batch where possible, so that recurrent states are not moved."""
        if self._decode_batch is None or not self.engine.cache.has_states:
            return sequences
        wanted, places = set(sequences), self._decode_batch.sequences
        staying = [sequence if sequence in wanted else None for sequence in places[: len(sequences)]]
        others = iter([sequence for sequence in sequences if sequence not in staying])
        return [sequence if sequence is not None else next(others) for sequence in staying] + list(others)

    def _batch_of(self, sequences: list[Sequence]) -> DecodeBatch:
        if self._decode_batch is None or self._decode_batch.sequences != sequences:
            batch = self.engine.decode_batch([sequence.kv for sequence in sequences])
            sampler = Sampler([sequence.generated.sampler_state for sequence in sequences])
            self._decode_batch = DecodeBatch(list(sequences), batch, sampler)
        return self._decode_batch


def _checkpoint(sequence: Sequence) -> bool:
    """Checkpoint a sequence before a verify step, in place of the last such checkpoint; return whether there is one."""
    kv = sequence.kv
    if sequence.draft_checkpoint is not None:
        kv.drop_checkpoint(sequence.draft_checkpoint)
        sequence.draft_checkpoint = None
    kv.checkpoint_at_stride()
    if kv.length not in kv.checkpoints:
        kv.checkpoint()
        sequence.draft_checkpoint = kv.length
    return kv.length in kv.checkpoints
