"""Choosing the next token of each sequence of a batch.

What is chosen for a sequence depends on its own scores, settings and random numbers alone, never on its neighbours: a `Row` is
what one sequence takes with it from batch to batch, a `Sampler` the batch of the moment.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from auraflux.errors import InputError
from auraflux.ops import penalize, sample


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen, and where a text ends.

    temperature         0 takes the likeliest token; 1 draws as the model was trained
    top_k               of how many likeliest tokens to draw; 0 for all
    top_p               of the likeliest tokens that together have this probability; 1 for all
    min_p               of tokens with at least this share of the likeliest one's probability; 0 for all
    repetition_penalty  by which the scores of tokens in prompt and text are divided; 1 is off
    presence_penalty    taken from the scores of tokens in the text; 0 is off
    frequency_penalty   taken from them as often as they are there; 0 is off
    seed                the same seed gives the same text; None for another each time
    max_tokens          to generate; None for as many as the context has room for
    stop                strings that end the text; they are not part of it
    endless             the model's own end does not end the text
    logprobs            how many of the likeliest tokens to tell with each that is chosen; None tells no probabilities
    logit_bias          added to the scores of tokens: {token: number}
    grammar             what the text must be, as llguidance writes it; None for anything
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    endless: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        object.__setattr__(self, "stop", stop)
        self._number("temperature", "0 or more", lambda x: x >= 0)
        self._number("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._number("min_p", "between 0 and 1", lambda x: 0 <= x <= 1)
        self._number("repetition_penalty", "above 0", lambda x: x > 0)
        self._number("presence_penalty", "a finite number", lambda x: True)
        self._number("frequency_penalty", "a finite number", lambda x: True)
        self._whole("top_k", "0 or more", self.top_k, 0)
        if self.seed is not None:
            self._whole("seed", "0 or more, or None", self.seed, 0)
        if self.max_tokens is not None:
            self._whole("max_tokens", "1 or more, or None", self.max_tokens, 1)
        if self.logprobs is not None:
            self._whole("logprobs", "0 or more, or None", self.logprobs, 0)
        for token, bias in self.logit_bias.items():
            if not isinstance(token, int) or isinstance(bias, bool) or not isinstance(bias, int | float) or math.isnan(bias):
                raise InputError(f"logit_bias={{{token!r}: {bias!r}}} is not a number for a token.")
        for each in stop:
            if not isinstance(each, str) or not each:
                raise InputError(f"stop={each!r} is not a string of at least one character.")

    def _number(self, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not fits(value):
            raise InputError(f"{name}={value!r} must be {wanted}.")

    @staticmethod
    def _whole(name: str, wanted: str, value: int, least: int) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(f"{name}={value!r} must be a whole number, {wanted}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class Row:
    """One sequence's part of sampling: its settings, its random numbers and, with penalties, which tokens it has seen."""

    def __init__(self, sampling: Sampling, prompt: Sequence[int] = ()):
        self.sampling = sampling
        self._random = random.Random(sampling.seed)
        self._prompt = list(prompt) if sampling.penalized else []
        # [V] bool and int32, views of what the sampler of the moment holds
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None

    def uniform(self) -> float:
        """The next random number; a greedy row uses none."""
        return 0.0 if self.sampling.greedy else self._random.random()

    def _memory(self, vocabulary: int, device: torch.device) -> tuple[Tensor, Tensor]:
        if self._seen is None or self._counts is None:
            wrong = [token for token in self._prompt if not 0 <= token < vocabulary]
            if wrong:
                raise InputError(f"The prompt has token {wrong[0]}, but there are scores for {vocabulary} tokens.")
            self._seen = torch.zeros(vocabulary, dtype=torch.bool, device=device)
            self._seen[torch.tensor(self._prompt, dtype=torch.int64, device=device)] = True
            self._counts = torch.zeros(vocabulary, dtype=torch.int32, device=device)
        return self._seen, self._counts


class Sampler:
    """Chooses for the rows of one batch; make another when rows come or go, they keep what they know."""

    def __init__(self, rows: Sequence[Row]):
        self.rows = list(rows)
        self._greedy = all(row.sampling.greedy for row in self.rows)
        self._penalized = [number for number, row in enumerate(self.rows) if row.sampling.penalized]
        self._settings: _Settings | None = None
        self._penalties: _Penalties | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Choose a token for each row.

        logits  [B, V]
        returns [B]     int64
        """
        if logits.dim() != 2 or logits.shape[0] != len(self.rows):
            raise InputError(f"Scores of shape {list(logits.shape)} do not fit {len(self.rows)} sequences; [B, V] is needed.")
        if self._penalized:
            if self._penalties is None:
                self._penalties = _Penalties(self.rows, self._penalized, logits)
            logits = self._penalties.lower(logits)
        if self._greedy:
            tokens = logits.argmax(-1)
        else:
            if self._settings is None:
                self._settings = _Settings(self.rows, logits.device)
            tokens = self._settings.draw(self.rows, logits)
        if self._penalties is not None:
            self._penalties.count(tokens)
        return tokens


class _Settings:
    """The settings of a batch as tensors."""

    def __init__(self, rows: list[Row], device: torch.device):
        each = [row.sampling for row in rows]
        self.temperature = torch.tensor([one.temperature for one in each], dtype=torch.float32, device=device)
        # more than there are tokens is the same as all of them
        self.top_k = torch.tensor([min(one.top_k, 1 << 30) for one in each], dtype=torch.int32, device=device)
        self.top_p = torch.tensor([one.top_p for one in each], dtype=torch.float32, device=device)
        self.min_p = torch.tensor([one.min_p for one in each], dtype=torch.float32, device=device)

    def draw(self, rows: list[Row], logits: Tensor) -> Tensor:
        uniform = torch.tensor([row.uniform() for row in rows], dtype=torch.float32)
        # not waited for: the device may still be at work on the scores
        uniform = uniform.to(logits.device, non_blocking=True)
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
        self.repetition = torch.tensor([one.repetition_penalty for one in each], dtype=torch.float32, device=device)
        self.presence = torch.tensor([one.presence_penalty for one in each], dtype=torch.float32, device=device)
        self.frequency = torch.tensor([one.frequency_penalty for one in each], dtype=torch.float32, device=device)
        # None: all rows, so that nothing need be picked out
        self.numbers = torch.tensor(numbers, device=device) if len(numbers) < len(rows) else None
        self.lines = torch.arange(len(numbers), device=device)

    def lower(self, logits: Tensor) -> Tensor:
        those = logits if self.numbers is None else logits[self.numbers]
        lowered = penalize(those.contiguous(), self.seen, self.counts, self.repetition, self.presence, self.frequency)
        return lowered if self.numbers is None else logits.index_copy(0, self.numbers, lowered)

    def count(self, tokens: Tensor) -> None:
        those = tokens if self.numbers is None else tokens[self.numbers]
        self.counts[self.lines, those] += 1
