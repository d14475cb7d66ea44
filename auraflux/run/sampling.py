"""How a text is chosen: settings that a user gives. Plain data; `sampler.py` does what they say."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from auraflux.errors import InputError

HOTTEST = 1_000_000  # temperature
LARGEST = 1_000  # penalty
WORST = 1e9  # bias


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
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop or ()
        if not isinstance(stop, Sequence) or not all(isinstance(each, str) and each for each in stop):
            raise InputError(f"stop={self.stop!r:.80} must be a string of at least one character, or several.")
        object.__setattr__(self, "stop", tuple(stop))
        self._number("temperature", f"from 0 to {HOTTEST:,}", lambda x: 0 <= x <= HOTTEST)
        self._number("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._number("min_p", "between 0 and 1", lambda x: 0 <= x <= 1)
        self._number("repetition_penalty", f"above 0 and at most {LARGEST:,}", lambda x: 0 < x <= LARGEST)
        self._number("presence_penalty", f"from {-LARGEST:,} to {LARGEST:,}", lambda x: -LARGEST <= x <= LARGEST)
        self._number("frequency_penalty", f"from {-LARGEST:,} to {LARGEST:,}", lambda x: -LARGEST <= x <= LARGEST)
        self._whole("top_k", 0)
        for name, least in (("seed", 0), ("max_tokens", 1), ("logprobs", 0)):
            if getattr(self, name) is not None:
                self._whole(name, least)
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias={self.logit_bias!r:.80} is not numbers by token.")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not _is_number(bias) or not (-WORST <= bias <= WORST or abs(bias) == math.inf):
                raise InputError(f"logit_bias={{{token!r:.80}: {bias!r:.80}}} is not a number for a token.")
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise InputError(f"grammar={self.grammar!r:.80} is not a text.")

    def _number(self, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        # NaN is within no limits
        if not _is_number(value) or not fits(value):
            raise InputError(f"{name}={value!r:.80} must be {wanted}.")

    def _whole(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not least <= value < 1 << 63:
            raise InputError(f"{name}={value!r:.80} must be a whole number from {least} to 2**63 - 1.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def apart(self) -> bool:
        """Whether a token is chosen by its scores alone, whatever was chosen before it."""
        return self.grammar is None and not self.penalized

    @property
    def penalized(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)
