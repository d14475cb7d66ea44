"""How a text is chosen: settings that a user gives. Plain data; `sampler.py` does what they say."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from auraflux.errors import InputError


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
