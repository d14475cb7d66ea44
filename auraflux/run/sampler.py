"""Choosing the next token of each sequence of a batch.

What is chosen for a sequence depends on its own scores, settings and random numbers alone, never on its neighbours: a `Row` is
what one sequence takes with it from batch to batch, a `Sampler` the batch of the moment.
"""

import random
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops import penalize, sample
from auraflux.run.device import sent
from auraflux.run.grammar import Matcher
from auraflux.run.request import Scored
from auraflux.run.sampling import Sampling

MASKS = ThreadPoolExecutor(2, "auraflux-masks")  # that work out which tokens grammars allow


class Row:
    """One sequence's part of sampling: its settings, its random numbers and, with penalties, which tokens it has seen.

    text      tokens chosen so far
    complete  the grammar allows nothing to follow
    matcher   of a grammar that says which tokens may come next; None where all may
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = (), matcher: Matcher | None = None):
        self.sampling, self.matcher = sampling, matcher
        self.text: list[int] = []
        self.complete = False
        self._mask: Future[Tensor] | None = None
        self._random = random.Random(sampling.seed)
        self._drawn: list[float] = []
        self._prompt = list(prompt) if sampling.penalized else []
        # [V] bool and int32, views of what the sampler of the moment holds
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def uniform(self, ahead: int = 0) -> float:
        """The random number of the next token, or of one further on; a greedy row uses none."""
        if self.sampling.greedy:
            return 0.0
        while len(self._drawn) <= len(self.text) + ahead:
            self._drawn.append(self._random.random())
        return self._drawn[len(self.text) + ahead]

    def take(self, token: int) -> None:
        """Add a token to the text."""
        self.text.append(token)
        if self.matcher is not None:
            self.matcher.take(token)
            self.complete = self.matcher.done
            # made while the next scores are
            self._mask = MASKS.submit(self.matcher.mask)

    def allowed(self) -> Tensor | None:
        """The tokens that may come next, as bits; None for any. The grammar's error where it cannot be followed."""
        if self.matcher is None:
            return None
        if self._mask is None:
            self._mask = MASKS.submit(self.matcher.mask)
        return self._mask.result()

    def renew(self) -> None:
        """Forget tokens that were chosen but are not in the text."""
        self._seen = self._counts = None

    def _memory(self, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._seen is None or self._counts is None:
            wrong = [token for token in self._prompt if not 0 <= token < vocabulary]
            if wrong:
                raise InputError(f"The prompt has token {wrong[0]}, but there are scores for {vocabulary} tokens.")
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[sent(self._prompt, device, torch.int64)] = True
            text = torch.tensor(self.text, dtype=torch.int64)
            self._counts = torch.bincount(text, minlength=vocabulary).to(device, torch.int32)
        return self._seen, self._counts


class Sampler:
    """Chooses for the rows of one batch; make another when rows come or go, they keep what they know.

    ahead        tokens that come before the one chosen, besides the text; by default none. A row with some may be there several
                 times, if neither penalties nor a grammar make its tokens depend on each other
    likelihoods  of the tokens chosen last, where some row wants to know
    """

    likelihoods: "Likelihoods | None" = None

    def __init__(self, rows: Sequence[Row], ahead: Sequence[int] | None = None):
        self.rows = list(rows)
        self._ahead = [0] * len(self.rows) if ahead is None else list(ahead)
        self._greedy = all(row.sampling.greedy for row in self.rows)
        self._penalized = [number for number, row in enumerate(self.rows) if row.sampling.penalized]
        self._biased = [number for number, row in enumerate(self.rows) if row.sampling.logit_bias]
        self._ruled = [number for number, row in enumerate(self.rows) if row.matcher is not None]
        self._told = {number: wanted for number, row in enumerate(self.rows) if (wanted := row.sampling.logprobs) is not None}
        self._settings: _Settings | None = None
        self._penalties: _Penalties | None = None
        self._biases: Tensor | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose a token for each row.

        logits  [B, V]
        returns [B]     int64
        """
        if logits.dim() != 2 or logits.shape[0] != len(self.rows):
            raise InputError(f"Scores of shape {list(logits.shape)} do not fit {len(self.rows)} sequences; [B, V] is needed.")
        raw = logits
        if self._penalized:
            if self._penalties is None:
                self._penalties = _Penalties(self.rows, self._penalized, logits)
            logits = self._penalties.lower(logits)
        if self._biased:
            logits = self._with_biases(logits)
        if self._ruled:
            logits = self._allowed(logits)
        # torch's argmax wakes threads of its own on a CPU, which then keep the kernels' from running
        if self._greedy and not logits.is_cpu:
            tokens = logits.argmax(-1)
        else:
            if self._settings is None:
                self._settings = _Settings(self.rows, logits.device)
            tokens = self._settings.draw([row.uniform(n) for row, n in zip(self.rows, self._ahead, strict=True)], logits)
        if self._penalties is not None:
            self._penalties.count(tokens)
        self.likelihoods = Likelihoods(raw, tokens, self._told) if self._told else None
        return tokens

    def _with_biases(self, logits: Tensor) -> Tensor:
        if self._biases is None:
            biases = torch.zeros(len(self._biased), logits.shape[1])
            for line, number in zip(biases, self._biased, strict=True):
                for token, bias in self.rows[number].sampling.logit_bias.items():
                    line[token] = bias
            self._biases = biases.to(logits.device)
        return logits.index_add(0, sent(self._biased, logits.device), self._biases)

    def _allowed(self, logits: Tensor) -> Tensor:
        masks = [mask for number in self._ruled if (mask := self.rows[number].allowed()) is not None]
        return forbid(logits, self._ruled, torch.stack(masks))


def forbid(logits: Tensor, numbers: Sequence[int], masks: Tensor) -> Tensor:
    """Take away the tokens that masks of some rows leave out.

    logits  [B, V]
    masks   [len(numbers), ceil(V / 32)]  int32: bit t % 32 of word t // 32 is set where token t may come
    """
    lines = sent(numbers, logits.device)
    words = masks.to(logits.device, non_blocking=True)
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    may = (words.unsqueeze(-1) >> bits & 1).flatten(1)[:, : logits.shape[1]].bool()
    return logits.index_copy(0, lines, logits[lines].masked_fill(~may, -torch.inf))


class Likelihoods:
    """How likely the tokens of some rows were to the model, before any setting touched its scores.

    told  how many of the likeliest tokens each of the rows wants to know
    """

    def __init__(self, logits: Tensor, tokens: Tensor, told: dict[int, int]):
        self._told = told
        lines = sent(list(told), logits.device)
        logprobs = logits[lines].float().log_softmax(-1)
        self._chosen = logprobs.gather(1, tokens[lines].unsqueeze(1)).squeeze(1)
        self._top = logprobs.topk(min(max(told.values()), logits.shape[1]), -1)

    def read(self, tokens: list[int]) -> dict[int, Scored]:
        """Give what each row is told of the token chosen for it."""
        chosen, values, ids = self._chosen.tolist(), self._top.values.tolist(), self._top.indices.tolist()
        return {
            number: Scored(tokens[number], chosen[line], tuple(zip(ids[line][:wanted], values[line][:wanted], strict=True)))
            for line, (number, wanted) in enumerate(self._told.items())
        }


class _Settings:
    """The settings of a batch as tensors."""

    def __init__(self, rows: list[Row], device: torch.device):
        each = [row.sampling for row in rows]
        self.temperature = sent([one.temperature for one in each], device, torch.float32)
        # more than there are tokens is the same as all of them
        self.top_k = sent([min(one.top_k, 1 << 30) for one in each], device, torch.int32)
        self.top_p = sent([one.top_p for one in each], device, torch.float32)
        self.min_p = sent([one.min_p for one in each], device, torch.float32)

    def draw(self, numbers: list[float], logits: Tensor) -> Tensor:
        uniform = sent(numbers, logits.device, torch.float32)
        return sample(logits.contiguous(), uniform, self.temperature, self.top_k, self.top_p, self.min_p)


class _Penalties:
    """What the penalized rows of a batch have seen, and by how much that counts."""

    def __init__(self, rows: list[Row], numbers: list[int], logits: Tensor):
        device = logits.device
        chosen = [rows[number] for number in numbers]
        memories = [row._memory(logits.shape[1], device) for row in chosen]
        self.seen = torch.stack([seen for seen, _ in memories])
        self.counts = torch.stack([counts for _, counts in memories])
        for row, seen, counts in zip(chosen, self.seen, self.counts, strict=True):
            row._seen, row._counts = seen, counts
        each = [row.sampling for row in chosen]
        self.repetition = sent([one.repetition_penalty for one in each], device, torch.float32)
        self.presence = sent([one.presence_penalty for one in each], device, torch.float32)
        self.frequency = sent([one.frequency_penalty for one in each], device, torch.float32)
        # None: all rows, so that nothing need be picked out
        self.numbers = sent(numbers, device) if len(numbers) < len(rows) else None
        self.lines = torch.arange(len(numbers), device=device)

    def lower(self, logits: Tensor) -> Tensor:
        those = logits if self.numbers is None else logits[self.numbers]
        lowered = penalize(those.contiguous(), self.seen, self.counts, self.repetition, self.presence, self.frequency)
        return lowered if self.numbers is None else logits.index_copy(0, self.numbers, lowered)

    def count(self, tokens: Tensor) -> None:
        those = tokens if self.numbers is None else tokens[self.numbers]
        self.counts[self.lines, those] += 1
