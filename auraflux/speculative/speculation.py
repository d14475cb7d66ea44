"""Speculative decoding: sequences get draft tokens, which one verify step of the model checks together.

The token that the model samples at each position decides, with the random number of that position: draft tokens that agree are
accepted, the first that does not is replaced, and those after it are rejected. The output is exactly that of decoding without
draft tokens, with random sampling too; only the speed changes.

Draft tokens join a step in order of their probability of acceptance, as long as they raise the expected tokens per second. Step
times are measured.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor

from auraflux.speculative.draft_state import DraftRequest, DraftState, HiddenStates, PooledRates, Proposer, propose_each
from auraflux.speculative.step_costs import DEFAULT_COST, StepCosts, step_sizes

MARGIN = 1.05  # expected speedup from which a verify step is run
# cost of one more token of free drafts while it is not measured; they are judged without being verified. As measured on two
# Neoverse-N1 cores
DEFAULT_FREE_COST = 0.4
MAX_VERIFY_STEPS = 32  # in a row; then a plain decode step updates its measurement
# correct draft tokens missed before a step of a new size is captured, which takes as long as a dozen decode steps
CAPTURE_AFTER, CAPTURE_MARGIN = 16, 1.1  # and the advantage that it needs over a captured one
RETRY_AFTER = 64  # plain steps before drafts that did not pay are tried again; doubled each time


class SpeculativeSequence(Protocol):
    """A sequence that may get draft tokens; `room` is how many tokens may follow the next."""

    ids: list[int]
    draft_state: "DraftState | None"

    @property
    def room(self) -> int: ...


class Speculation:
    """Plans the draft tokens of all sequences of a scheduler.

    begin           makes a proposer for a sequence
    limit           maximum tokens of a step
    propose         drafts for several sequences
    observe_hidden  receives the hidden states of tokens; None if no proposer needs them
    drafted         draft tokens verified
    accepted        of them
    """

    def __init__(
        self,
        begin: Callable[[], Proposer],
        limit: int,
        propose: Callable[[list[DraftRequest[Any]]], list[list[int]]] = propose_each,
        observe_hidden: Callable[[list[HiddenStates[Any]]], None] | None = None,
    ):
        self._begin, self._limit, self.costs = begin, limit, StepCosts()
        self._propose, self._observe_hidden = propose, observe_hidden
        self.drafted = self.accepted = 0
        self._pooled = PooledRates()
        self._plain_steps = self._verify_steps = 0
        self._retry_after = RETRY_AFTER

    def begin(self) -> DraftState:
        """Return the draft state of a new sequence."""
        proposer = self._begin()
        self.costs.default = DEFAULT_FREE_COST if proposer.free else DEFAULT_COST
        return DraftState(proposer, self._pooled)

    def reset_counts(self) -> None:
        """Restart the counts of draft tokens."""
        self.drafted = self.accepted = 0

    def worthwhile(self, sequences: Sequence[SpeculativeSequence]) -> bool:
        """Return whether draft tokens would pay, given the tokens known so far."""
        return any(self._counts(sequences))

    def plan_drafts(
        self, sequences: Sequence[SpeculativeSequence], is_captured: Callable[[int], bool] = lambda draft_tokens: True
    ) -> list[list[int]]:
        """Return the draft tokens that the next step verifies, for each sequence; none where they would not pay.

        is_captured  whether a step with this many draft tokens need not be captured first
        """
        counts = self._counts(sequences, is_captured) if self._verify_steps < MAX_VERIFY_STEPS else [0] * len(sequences)
        if not any(counts):
            self._count_plain_step(sequences)
            return [[] for _ in sequences]
        self._verify_steps, self._plain_steps = self._verify_steps + 1, 0
        requests = {
            number: sequence.draft_state.request(sequence.ids, count)
            for number, (sequence, count) in enumerate(zip(sequences, counts, strict=True))
            if sequence.draft_state is not None and count
        }
        found = dict(zip(requests, self._propose(list(requests.values())), strict=True))
        return [found.get(number, []) for number in range(len(sequences))]

    def observe_hidden(self, hidden: Sequence[tuple[SpeculativeSequence, int, Tensor]]) -> None:
        """Pass hidden states [T, H] of tokens, from a position of each sequence on, to its proposer."""
        states = [
            (sequence.draft_state.proposer, sequence.ids, start, rows)
            for sequence, start, rows in hidden
            if sequence.draft_state is not None
        ]
        if self._observe_hidden is not None and states:
            self._observe_hidden(states)

    def record(
        self, sequences: Sequence[SpeculativeSequence], drafts: list[list[int]], accepted: list[int], seconds: float | None
    ) -> None:
        """Record the accepted draft tokens of each sequence and the time of the step, None if it is not representative."""
        for sequence, draft, count in zip(sequences, drafts, accepted, strict=True):
            if sequence.draft_state is not None and draft:
                sequence.draft_state.record(len(draft), count)
        draft_tokens = sum(map(len, drafts))
        self.drafted += draft_tokens
        self.accepted += sum(accepted)
        if seconds is not None:
            self.costs.record(len(sequences), draft_tokens, seconds)
        batch = len(sequences)
        if draft_tokens and (batch + sum(accepted)) / batch > MARGIN * self.costs.relative(batch, draft_tokens):
            self._retry_after = RETRY_AFTER

    def _count_plain_step(self, sequences: Sequence[SpeculativeSequence]) -> None:
        """Count a step without drafts; after many, drop the measurements so that drafts are tried again."""
        self._verify_steps = 0
        self._plain_steps += 1
        if self._plain_steps >= self._retry_after:
            self._plain_steps, self._retry_after = 0, 2 * self._retry_after
            self.costs.reset()
            for sequence in sequences:
                if sequence.draft_state is not None and not sequence.draft_state.proposer.free:
                    sequence.draft_state.reset()

    def _counts(
        self, sequences: Sequence[SpeculativeSequence], is_captured: Callable[[int], bool] = lambda draft_tokens: True
    ) -> list[int]:
        """Return the number of draft tokens of each sequence: the most likely of all, as many as maximize throughput."""
        candidates = [
            (probability, number)
            for number, sequence in enumerate(sequences)
            if sequence.draft_state is not None
            for probability in sequence.draft_state.acceptance_probabilities(sequence.ids, sequence.room)
        ]
        candidates.sort(key=lambda candidate: -candidate[0])
        costly = any(sequence.draft_state is not None and not sequence.draft_state.proposer.free for sequence in sequences)
        best = self._best([probability for probability, _ in candidates], len(sequences), costly, is_captured)
        counts = [0] * len(sequences)
        for _, number in candidates[:best]:
            counts[number] += 1
        return counts

    def _best(self, probabilities: list[float], sequences: int, costly: bool, is_captured: Callable[[int], bool]) -> int:
        """Return the number of draft tokens with the largest expected speedup; 0 if none pays."""
        best, best_speedup = 0, MARGIN
        limit = min(len(probabilities), self._limit - sequences, self.costs.max_draft_tokens(sequences))
        for count in step_sizes(limit, costly):
            speedup = (sequences + sum(probabilities[:count])) / sequences / self.costs.relative(sequences, count)
            # costly drafts have no shadow drafts to judge them by, so they must be tried
            ready = costly or is_captured(count)
            if speedup > (best_speedup if ready else best_speedup * CAPTURE_MARGIN) and (
                ready or self._pooled.missed >= CAPTURE_AFTER
            ):
                best, best_speedup = count, speedup
        if best and not costly and not is_captured(best):
            self._pooled.missed = 0
        return best
