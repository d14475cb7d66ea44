"""Sampling of the next token of each sequence in a batch.

The token of a sequence depends on its own logits, settings and random numbers, never on the rest of the batch: a `SamplerState`
belongs to one sequence and follows it from batch to batch, a `Sampler` belongs to the current batch.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from auraflux.engine.device import to_device
from auraflux.engine.request import TokenLogprob
from auraflux.engine.sampling import Sampling
from auraflux.engine.thinking import TokenMatcher
from auraflux.errors import InputError
from auraflux.ops import penalize, sample

MASK_THREADS = ThreadPoolExecutor(2, "auraflux-masks")  # compute grammar masks


class SamplerState:
    """The sampling state of one sequence: settings, random numbers and, with penalties, token counts.

    tokens    sampled so far
    complete  the grammar allows no further token
    matcher   of a grammar that restricts the next token; None without
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = (), matcher: TokenMatcher | None = None):
        self.sampling, self.matcher = sampling, matcher
        self.tokens: list[int] = []
        self.complete = False
        self._mask: Future[Tensor] | None = None
        self._random = random.Random(sampling.seed)
        self._drawn: list[float] = []
        self._prompt = list(prompt) if sampling.penalized else []
        # [V] bool and int32, views into the current sampler's tensors
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def uniform(self, offset: int = 0) -> float:
        """Return the random number of the token `offset` positions after the next; 0 for a greedy sequence."""
        if self.sampling.greedy:
            return 0.0
        while len(self._drawn) <= len(self.tokens) + offset:
            self._drawn.append(self._random.random())
        return self._drawn[len(self.tokens) + offset]

    def append(self, token: int) -> None:
        """Append a sampled token."""
        self.tokens.append(token)
        if self.matcher is not None:
            self.matcher.take(token)
            self.complete = self.matcher.done
            # computed while the model computes the next logits
            self._mask = MASK_THREADS.submit(self.matcher.mask)

    def allowed_tokens(self) -> Tensor | None:
        """Return the bit mask of the tokens that the grammar allows next, None for any; raise its error if it has failed."""
        if self.matcher is None:
            return None
        if self._mask is None:
            self._mask = MASK_THREADS.submit(self.matcher.mask)
        return self._mask.result()

    def reset_counts(self) -> None:
        """Drop the penalty counts, which include sampled tokens that were discarded; the next sampler rebuilds them."""
        self._seen = self._counts = None

    def penalty_counts(self, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return which tokens the prompt has, and how often each was generated: [V] bool and [V] int32."""
        if self._seen is None or self._counts is None:
            wrong = [token for token in self._prompt if not 0 <= token < vocabulary]
            if wrong:
                raise InputError(f"The prompt has token {wrong[0]}, but the model has logits for {vocabulary} tokens.")
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[to_device(self._prompt, device, torch.int64)] = True
            tokens = torch.tensor(self.tokens, dtype=torch.int64)
            self._counts = torch.bincount(tokens, minlength=vocabulary).to(device, torch.int32)
        return self._seen, self._counts

    def set_penalty_counts(self, seen: Tensor, counts: Tensor) -> None:
        """Replace the counts by views into a sampler's tensors, which it updates."""
        self._seen, self._counts = seen, counts


class Sampler:
    """Samples for the sequences of one batch; make another one when the batch changes.

    offsets           distance of each sampled token from its sequence's next position; 0 by default. With draft tokens a
                      sequence has a row per position, which requires `Sampling.stateless`
    sampled_logprobs  of the last tokens, if a sequence requests them
    """

    sampled_logprobs: "SampledLogprobs | None" = None

    def __init__(self, states: Sequence[SamplerState], offsets: Sequence[int] | None = None):
        self.states = list(states)
        self._offsets = [0] * len(self.states) if offsets is None else list(offsets)
        self._greedy = all(state.sampling.greedy for state in self.states)
        self._penalized = [row for row, state in enumerate(self.states) if state.sampling.penalized]
        self._biased = [row for row, state in enumerate(self.states) if state.sampling.logit_bias]
        self._constrained = [row for row, state in enumerate(self.states) if state.matcher is not None]
        self._top_logprobs = {row: top for row, state in enumerate(self.states) if (top := state.sampling.logprobs) is not None}
        self._settings: _Settings | None = None
        self._penalties: _Penalties | None = None
        self._biases: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Sample a token for each row.

        logits  [B, V]
        returns [B]     int64
        """
        if logits.dim() != 2 or logits.shape[0] != len(self.states):
            raise InputError(f"Logits of shape {list(logits.shape)} do not fit {len(self.states)} sequences; expected [B, V].")
        raw = logits
        if self._penalized:
            if self._penalties is None:
                self._penalties = _Penalties(self.states, self._penalized, logits)
            logits = self._penalties.apply(logits)
        if self._biased:
            logits = self._add_biases(logits)
        if self._constrained:
            logits = self._apply_grammars(logits)
        # torch's argmax wakes torch's CPU threads, which then compete with the kernels' threads
        if self._greedy and not logits.is_cpu:
            tokens = logits.argmax(-1)
        else:
            if self._settings is None:
                self._settings = _Settings(self.states, logits.device)
            uniform = [state.uniform(offset) for state, offset in zip(self.states, self._offsets, strict=True)]
            tokens = self._settings.sample(uniform, logits)
        if self._penalties is not None:
            self._penalties.count(tokens)
        self.sampled_logprobs = SampledLogprobs(raw, tokens, self._top_logprobs) if self._top_logprobs else None
        return tokens

    def _add_biases(self, logits: Tensor) -> Tensor:
        if self._biases is None:
            biases = torch.zeros(len(self._biased), logits.shape[1])
            for line, row in zip(biases, self._biased, strict=True):
                for token, bias in self.states[row].sampling.logit_bias.items():
                    line[token] = bias
            self._biases = biases.to(logits.device)
        return logits.index_add(0, to_device(self._biased, logits.device), self._biases)

    def _apply_grammars(self, logits: Tensor) -> Tensor:
        masks = [mask for row in self._constrained if (mask := self.states[row].allowed_tokens()) is not None]
        return apply_token_masks(logits, self._constrained, torch.stack(masks))


def apply_token_masks(logits: Tensor, rows: Sequence[int], masks: Tensor) -> Tensor:
    """Set the logits of tokens that a mask excludes to -inf.

    logits  [B, V]
    masks   [len(rows), ceil(V / 32)]  int32: bit t % 32 of word t // 32 is set where token t is allowed
    """
    lines = to_device(rows, logits.device)
    words = masks.to(logits.device, non_blocking=True)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.index_copy(0, lines, logits[lines].masked_fill(~allowed, -torch.inf))


class SampledLogprobs:
    """Log probabilities of sampled tokens under the raw logits, before penalties, biases and temperature.

    top  number of most likely tokens to report, by row; other rows report nothing
    """

    def __init__(self, logits: Tensor, tokens: Tensor, top: dict[int, int]):
        self._top = top
        rows = to_device(list(top), logits.device)
        logprobs = logits[rows].float().log_softmax(-1)
        self._sampled = logprobs.gather(1, tokens[rows].unsqueeze(1)).squeeze(1)
        self._likeliest = logprobs.topk(min(max(top.values()), logits.shape[1]), -1)

    def read(self, tokens: list[int]) -> dict[int, TokenLogprob]:
        """Return the log probabilities by row, given the sampled tokens of all rows."""
        sampled, values, ids = self._sampled.tolist(), self._likeliest.values.tolist(), self._likeliest.indices.tolist()
        return {
            row: TokenLogprob(tokens[row], sampled[line], tuple(zip(ids[line][:top], values[line][:top], strict=True)))
            for line, (row, top) in enumerate(self._top.items())
        }


class _Settings:
    """The settings of a batch as tensors."""

    def __init__(self, states: list[SamplerState], device: torch.device):
        each = [state.sampling for state in states]
        self.temperature = to_device([one.temperature for one in each], device, torch.float32)
        # a larger top_k than the vocabulary disables it; the clamp fits it into int32
        self.top_k = to_device([min(one.top_k, 1 << 30) for one in each], device, torch.int32)
        self.top_p = to_device([one.top_p for one in each], device, torch.float32)
        self.min_p = to_device([one.min_p for one in each], device, torch.float32)

    def sample(self, numbers: list[float], logits: Tensor) -> Tensor:
        uniform = to_device(numbers, logits.device, torch.float32)
        return sample(logits.contiguous(), uniform, self.temperature, self.top_k, self.top_p, self.min_p)


class _Penalties:
    """Token counts of the penalized rows of a batch, and their penalties."""

    def __init__(self, states: list[SamplerState], rows: list[int], logits: Tensor):
        device = logits.device
        penalized = [states[row] for row in rows]
        memories = [state.penalty_counts(logits.shape[1], device) for state in penalized]
        self.seen = torch.stack([seen for seen, _ in memories])
        self.counts = torch.stack([counts for _, counts in memories])
        for state, seen, counts in zip(penalized, self.seen, self.counts, strict=True):
            state.set_penalty_counts(seen, counts)
        each = [state.sampling for state in penalized]
        self.repetition = to_device([one.repetition_penalty for one in each], device, torch.float32)
        self.presence = to_device([one.presence_penalty for one in each], device, torch.float32)
        self.frequency = to_device([one.frequency_penalty for one in each], device, torch.float32)
        # None: all rows, which saves the gather
        self.rows = to_device(rows, device) if len(rows) < len(states) else None
        self.lines = torch.arange(len(rows), device=device)

    def apply(self, logits: Tensor) -> Tensor:
        selected = logits if self.rows is None else logits[self.rows]
        lowered = penalize(selected.contiguous(), self.seen, self.counts, self.repetition, self.presence, self.frequency)
        return lowered if self.rows is None else logits.index_copy(0, self.rows, lowered)

    def count(self, tokens: Tensor) -> None:
        selected = tokens if self.rows is None else tokens[self.rows]
        self.counts[self.lines, selected] += 1
