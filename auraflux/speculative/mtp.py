"""Draft tokens from a model's own MTP head, for all sequences of a step together.

The head takes the model's hidden state of each token paired with the token that follows. Hidden states arrive as the model
computes them, and wait until draft tokens are requested or too many wait. The head's KV has a cache and a prefix cache of its
own: a prefix hit of the model is served there too. Where too little of it is cached, the head starts at the first token that
the model computes.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from auraflux.cache import Batch, Cache, KVSequence
from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.engine.device import device_memory, to_device
from auraflux.engine.engine import Engine
from auraflux.engine.graph_runner import GraphRunner
from auraflux.engine.model_runner import ModelRunner
from auraflux.errors import AurafluxError, CacheFull
from auraflux.speculative.draft_state import MAX_DRAFT_TOKENS, DraftRequest, HiddenStates
from auraflux.weights.experts.stats import draft_rows

MAX_PENDING = 64  # hidden states of a sequence that wait before the head computes them


class MTPProposer:
    """The MTP head's state of one sequence.

    free      False: drafting takes steps of the head
    kind      one for all drafts
    observed  length of the sequence up to which hidden states are known
    complete  whether the head has all pairs from the start of the sequence
    last      the head's output for the last pair, [1, H]
    """

    free, kind = False, 1

    def __init__(self, drafter: "MTPDrafter"):
        self._drafter, self.observed, self.complete = drafter, 0, True
        self._kv_sequence: KVSequence | None = None
        # hidden states that the head has not computed, with the position of the first
        self._pending: list[tuple[int, Tensor]] = []
        self.last: Tensor | None = None

    def on_prefix_hit(self, tokens: list[int], kv_sequence: KVSequence) -> None:
        """Start from the head's cached KV of a prefix that the model's cache has.

        The last pair of the prefix has another next token, so the model computes the last token again if it can.
        """
        if self.observed == 0 and (cached := self._drafter.open_cached(tokens, kv_sequence.length)) is not None:
            if kv_sequence.truncatable_length(cached.length) == cached.length:
                kv_sequence.truncate(cached.length)
            self._kv_sequence, self.observed = cached, kv_sequence.length
            self.complete = cached.length == self.observed

    def close(self, tokens: list[int] | None = None) -> None:
        """Release the head's state, or cache it if the tokens are given; the head can start again afterwards."""
        if tokens is not None and self.complete and self._kv_sequence is not None:
            self._drafter.cache_sequence(self, tokens)
        elif self._kv_sequence is not None:
            self._kv_sequence.close()
        self.observed, self.complete, self._kv_sequence, self._pending, self.last = 0, True, None, [], None

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """Return up to `count` draft tokens after these."""
        return self._drafter.propose([(self, tokens, count)])[0]

    @property
    def kv_sequence(self) -> KVSequence:
        """The head's KV of the sequence."""
        if self._kv_sequence is None:
            self._kv_sequence = self._drafter.cache.open()
        return self._kv_sequence

    def observe(self, start: int, hidden: Tensor) -> None:
        """Add the hidden states of tokens from `start` on, [T, H]; those of a repeated step are known already."""
        hidden, start = hidden[max(self.observed - start, 0) :], max(start, self.observed)
        if len(hidden):
            self.complete = self.complete and start == self.observed
            self._pending.append((start, hidden))
            self.observed = start + len(hidden)

    def ready(self, tokens: list[int]) -> int:
        """Return how many pending hidden states have a known next token."""
        return sum(min(len(hidden), max(len(tokens) - 1 - start, 0)) for start, hidden in self._pending)

    def pairs(self, tokens: list[int], limit: int) -> tuple[list[int], list[Tensor]]:
        """Return the next tokens and hidden states of the first ready pairs."""
        ids: list[int] = []
        found: list[Tensor] = []
        for start, hidden in self._pending:
            following = tokens[start + 1 : start + 1 + min(len(hidden), limit - len(ids))]
            ids += following
            found.append(hidden[: len(following)])
        return ids, found

    def drop(self, count: int) -> None:
        """Drop the first pending hidden states, which the head has computed."""
        while count:
            start, hidden = self._pending.pop(0)
            if len(hidden) > count:
                self._pending.insert(0, (start + count, hidden[count:]))
            count -= min(count, len(hidden))


class MTPRunner(ModelRunner):
    """The MTP head, as a `GraphRunner` runs it."""

    model: Any

    def run_captured(self, inputs: Tensor, batch: Batch) -> Tensor:
        """Run concatenated pairs of embedding and hidden state: [T, 2 H] -> [T, H]."""
        with self.numerics():
            return self.model.mtp.forward(inputs, batch, self.cache)


class MTPDrafter:
    """The MTP head of a model, with the KV cache of all its sequences.

    graphs    whether its steps are replayed
    prefixes  finished sequences
    """

    def __init__(self, runner: MTPRunner, graphs: bool):
        self.runner, self.model, self.cache = runner, runner.model, runner.cache
        self.prefixes = PrefixCache(self.cache)
        self.graphs = GraphRunner(runner, graphs)

    @classmethod
    def for_engine(cls, engine: Engine, shape: Any) -> "MTPDrafter":
        """Return the drafter of an engine's model, with a cache of the same settings for as many sequences."""
        cache = engine.cache
        settings = replace(cache.settings, skip_first_layers=0, skip_last_layers=0, checkpoint_stride=None)
        # drafts may exceed the last token of a sequence
        sizes: dict[str, Any] = {"context": cache.context + MAX_DRAFT_TOKENS + 1, "sequences": cache.sequences}
        sizes |= {"tokens": cache.tokens, "page": cache.page, "chunk": engine.chunk}
        own = Cache([shape], settings, **sizes, dtype=cache.dtype, device=cache.device)
        runner = MTPRunner(engine.model, own, engine.runner.exact)
        runner.invariant = engine.runner.invariant
        made = cls(runner, engine.graphs.enabled)
        made.graphs.after_step = engine.graphs.after_step
        return made

    def begin(self) -> MTPProposer:
        """Return the proposer of a new sequence."""
        return MTPProposer(self)

    def open_cached(self, tokens: list[int], count: int) -> KVSequence | None:
        """Return the cached pairs of the first `count` tokens; None if more than the last pair is missing."""
        pairs = [*_pair_ids(tokens[: count + 1]), 0]
        if self.prefixes.match(pairs)[1] < max(count - 1, 1):
            return None
        return self.prefixes.open(pairs).sequence

    def cache_sequence(self, proposer: MTPProposer, tokens: list[int]) -> None:
        """Move the head's KV of a finished sequence to the prefix cache."""
        sequence = proposer.kv_sequence
        try:
            with suppress(AurafluxError):
                self._prefill([(proposer, tokens)])
        except BaseException:
            sequence.close()
            raise
        self.prefixes.insert(_pair_ids(tokens[: sequence.length + 1]), sequence)

    def observe_hidden(self, states: list[HiddenStates[MTPProposer]]) -> None:
        """Add the hidden states of sequences; run the head once too many wait."""
        for proposer, _, start, hidden in states:
            proposer.observe(start, hidden)
        if any(proposer.ready(tokens) >= MAX_PENDING for proposer, tokens, _, _ in states):
            self._or_close(lambda: self._prefill([(proposer, tokens) for proposer, tokens, _, _ in states]), states)

    def propose(self, requests: list[DraftRequest[MTPProposer]]) -> list[list[int]]:
        """Return the draft tokens of each request; none where hidden states are missing."""
        able = [each for each in requests if each[0].observed == len(each[1]) - 1 and each[2] > 0]
        found: dict[MTPProposer, list[int]] = {}
        if able:
            self._or_close(lambda: found.update(self._draft(able)), able)
        return [found.get(proposer, [])[:count] for proposer, _, count in requests]

    def _or_close(self, work: Callable[[], None], entries: Sequence[tuple[Any, ...]]) -> None:
        """Run work; on an error reset the proposers, since their sequences can decode without draft tokens."""
        try:
            work()
        except AurafluxError:
            for proposer, *_ in entries:
                proposer.close()

    def _prefill(self, sequences: list[tuple[MTPProposer, list[int]]]) -> None:
        """Run the head on all ready pairs."""
        while some := [(proposer, tokens) for proposer, tokens in sequences if proposer.ready(tokens)]:
            limit = max(1, self.cache.chunk // len(some))
            pairs = [proposer.pairs(tokens, limit) for proposer, tokens in some]
            counts = [len(ids) for ids, _ in pairs]
            ids = to_device([token for ids, _ in pairs for token in ids], self.cache.device)
            hidden = torch.cat([part for _, parts in pairs for part in parts])
            batch = self.cache.batch([proposer.kv_sequence for proposer, _ in some])
            outputs = self._step(batch, counts, ids, hidden).split(counts)
            for (proposer, _), count, output in zip(some, counts, outputs, strict=True):
                proposer.drop(count)
                proposer.last = output[-1:]

    def _draft(self, requests: list[DraftRequest[MTPProposer]]) -> dict[MTPProposer, list[int]]:
        self._prefill([(proposer, tokens) for proposer, tokens, _ in requests])
        lasts = {proposer: proposer.last for proposer, _, _ in requests if proposer.last is not None}
        if not lasts:
            return {}
        proposers, hidden = list(lasts), torch.cat(list(lasts.values()))
        batch = self.cache.batch([proposer.kv_sequence for proposer in proposers])
        before = [sequence.length for sequence in batch.sequences]
        found = [self._greedy(hidden)]
        try:
            for _ in range(1, max(count for _, _, count in requests)):
                hidden = self._step(batch, [1] * len(proposers), found[-1], hidden)
                found.append(self._greedy(hidden))
        except CacheFull:
            # the draft tokens so far are valid
            pass
        finally:
            batch.roll_back(before)
        return dict(zip(proposers, torch.stack(found, 1).tolist(), strict=True))

    def _step(self, batch: Batch, counts: list[int], ids: Tensor, hidden: Tensor) -> Tensor:
        """Run the head on pairs of ids [T] and hidden states [T, H] and return its output [T, H]."""
        before = [sequence.length for sequence in batch.sequences]
        try:
            # experts of the head are loaded for draft tokens only
            with device_memory(), self.runner.numerics(), draft_rows(range(len(ids))):
                batch.extend(counts)
                pairs = self.model.mtp.join_inputs(self.model.embed_tokens(ids), hidden)
                # up to the tokens of a verify step; the sizes of prompts hardly recur
                recurs = len(set(counts)) == 1 and counts[0] <= MAX_DRAFT_TOKENS + 1
                found = self.graphs.replay(batch, pairs) if recurs else self.runner.run_captured(pairs, batch)
                self.graphs.check_step()
                return found
        except BaseException:
            batch.roll_back(before)
            raise

    def _greedy(self, hidden: Tensor) -> Tensor:
        with self.runner.numerics():
            return self.model.logits(hidden).argmax(-1)


def _pair_ids(tokens: list[int]) -> list[int]:
    """Return an id for each pair of adjacent tokens: that of the second token, and for the first pair both combined."""
    return [tokens[0] << 32 | tokens[1], *tokens[2:]] if len(tokens) > 1 else []
