"""Draft tokens of one sequence: the `Proposer` they come from, and the acceptance rates that its drafts have.

Drafts that cost nothing are also compared with the output while they are not verified (shadow drafts), so that those of a
sequence that does not repeat itself are never tried.
"""

from itertools import accumulate
from operator import mul
from typing import Protocol, TypeVar

from torch import Tensor

from auraflux.cache import KVSequence
from auraflux.cache.prefix.radix import common_length

MAX_DRAFT_TOKENS = 15  # per sequence and step: sliding windows can roll back twice as many
FIRST_DRAFT_TOKENS = 3  # draft tokens of a step of unmeasured cost
MAX_RATE = 0.98
# acceptance rates by kind of draft before anything is measured, and the weight of this prior in tokens
PRIORS, PRIOR_WEIGHT = (0.3, 0.6, 0.85, 0.8), 4.0
DECAY = 0.9  # of earlier observations with each draft


class Proposer(Protocol):
    """A source of draft tokens for one sequence.

    free  drafting costs no time worth counting
    kind  of the last draft: drafts of a kind have similar acceptance rates
    """

    free: bool
    kind: int

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return up to `count` draft tokens after these."""

    def on_prefix_hit(self, tokens: list[int], kv_sequence: KVSequence) -> None:
        """Note the cached prefix of a sequence before its prefill; the prefix may be cut, to compute more of it again."""

    def close(self, tokens: list[int] | None = None) -> None:
        """Release the state of the sequence; given its tokens, the state may be cached for sequences with the same prefix."""


ProposerT = TypeVar("ProposerT")
DraftRequest = tuple[ProposerT, list[int], int]  # a proposer, the tokens of its sequence, how many draft tokens
HiddenStates = tuple[ProposerT, list[int], int, Tensor]  # a proposer, the tokens, a position, hidden states from there on


def propose_each(requests: list[DraftRequest[Proposer]]) -> list[list[int]]:
    """Return the draft tokens of each sequence, drafted one by one."""
    return [proposer.propose(tokens, count) for proposer, tokens, count in requests]


class AcceptanceRate:
    """Share of accepted draft tokens, from exponentially decaying counts."""

    def __init__(self, rate: float, weight: float = PRIOR_WEIGHT):
        self._accepted, self._rejected = rate * weight, (1 - rate) * weight

    @property
    def rate(self) -> float:
        """Estimated acceptance rate."""
        return min(self._accepted / (self._accepted + self._rejected), MAX_RATE)

    def record(self, accepted: int, rejected: int) -> None:
        """Add the outcome of a draft."""
        self._accepted, self._rejected = DECAY * self._accepted + accepted, DECAY * self._rejected + rejected


class DraftState:
    """The proposer of one sequence and its acceptance rates.

    drafted   draft tokens verified
    accepted  of them
    """

    def __init__(self, proposer: Proposer, pooled: "PooledRates"):
        self.proposer, self.drafted, self.accepted = proposer, 0, 0
        self._pooled = pooled
        self._rates: dict[tuple[int, int], AcceptanceRate] = {}
        # an unverified draft that is compared with the output: its position, tokens and kind
        self._shadow: tuple[int, list[int], int] | None = None

    def acceptance_probabilities(self, ids: list[int], room: int) -> list[float]:
        """Return the probability that each of the next draft tokens is accepted, which requires all before it."""
        count = min(room, MAX_DRAFT_TOKENS)
        if self.proposer.free and count > 0:
            count = len(self._draft_shadow(ids, count))
        return list(accumulate((self._rate(self.proposer.kind, depth).rate for depth in range(count)), mul))

    def request(self, ids: list[int], count: int) -> DraftRequest[Proposer]:
        """Return the request for this many draft tokens, to be verified."""
        self._shadow = None
        return self.proposer, ids, count

    def record(self, drafted: int, accepted: int) -> None:
        """Record the outcome of the last verified draft."""
        self.drafted += drafted
        self.accepted += accepted
        self._learn(self.proposer.kind, accepted, accepted < drafted)
        # a longer draft might have been accepted too
        self._pooled.missed += accepted // 2 if accepted == drafted else 0

    def reset(self) -> None:
        """Return to the pooled acceptance rates."""
        self._rates.clear()

    def _draft_shadow(self, ids: list[int], count: int) -> list[int]:
        """Return a free draft, and compare an earlier one with the output since."""
        if self._shadow is not None:
            start, draft, kind = self._shadow
            known = ids[start : start + len(draft)]
            correct = common_length(draft, known)
            if correct < len(known) or len(known) == len(draft):
                self._learn(kind, correct, correct < len(draft))
                self._pooled.missed += correct if correct >= FIRST_DRAFT_TOKENS else 0
                self._shadow = None
        found = self.proposer.propose(ids, count)
        if found and self._shadow is None:
            self._shadow = len(ids), found, self.proposer.kind
        return found

    def _rate(self, kind: int, depth: int) -> AcceptanceRate:
        # a copied passage goes on after many tokens as likely as after one; a model's drafts get worse with depth
        key = kind, 0 if self.proposer.free else depth
        if key not in self._rates:
            self._rates[key] = AcceptanceRate(self._pooled[key].rate)
        return self._rates[key]

    def _learn(self, kind: int, accepted: int, rejected: bool) -> None:
        if self.proposer.free:
            self._record(kind, 0, accepted, int(rejected))
            return
        for depth in range(accepted):
            self._record(kind, depth, 1, 0)
        if rejected:
            self._record(kind, accepted, 0, 1)

    def _record(self, kind: int, depth: int, accepted: int, rejected: int) -> None:
        own = self._rate(kind, depth)
        for rate in (own, self._pooled[kind, 0 if self.proposer.free else depth]):
            rate.record(accepted, rejected)


class PooledRates(dict[tuple[int, int], AcceptanceRate]):
    """Acceptance rates over all sequences, by kind and depth of the draft token.

    missed  correct draft tokens that were not verified
    """

    missed = 0

    def __missing__(self, key: tuple[int, int]) -> AcceptanceRate:
        return self.setdefault(key, AcceptanceRate(PRIORS[key[0]]))
