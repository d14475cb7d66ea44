"""Sampling settings of a request, and a model's defaults for them. Plain data; `sampler.py` applies them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from auraflux.errors import InputError
from auraflux.renamed import renamed_fields

MAX_TEMPERATURE = 1_000_000
MAX_PENALTY = 1_000
MAX_BIAS = 1e9
# values that turn a setting off
NEUTRAL = {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0}
DEFAULTED = ("temperature", *NEUTRAL)  # settings with a default per model


@renamed_fields({"endless": "ignore_eos"})
@dataclass(frozen=True)
class Sampling:
    """Sampling settings and stop conditions.

    temperature         0 is greedy; 1 samples from the model's distribution
    top_k               sample from this many most likely tokens; 0 for all
    top_p               sample from the most likely tokens that together have this probability; 1 for all
    min_p               sample from tokens with at least this share of the largest probability; 0 for all
    repetition_penalty  divides the logits of tokens in the prompt and the output; 1 is off
    presence_penalty    subtracted from the logits of tokens in the output; 0 is off
    frequency_penalty   subtracted once per occurrence in the output; 0 is off
    seed                the same seed gives the same tokens; None for a random one
    max_tokens          to generate; None up to the context length
    stop                strings that end the generation and are not part of its text
    ignore_eos          the model's end-of-sequence tokens do not end the generation
    logprobs            number of most likely tokens to report with each sampled token; None for no log probabilities
    logit_bias          added to the logits of tokens: {token: number}
    grammar             that the output must match, in llguidance's syntax; None for no constraint
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
    ignore_eos: bool = False
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: str | None = None

    def __post_init__(self) -> None:
        # callers may give anything
        given: Any = self.stop
        stop = (given,) if isinstance(given, str) else given or ()
        if not isinstance(stop, Sequence) or not all(isinstance(each, str) and each for each in stop):
            raise InputError(f"stop={self.stop!r:.80} must be a non-empty string or a list of them.")
        object.__setattr__(self, "stop", tuple(stop))
        self._check_number("temperature", f"from 0 to {MAX_TEMPERATURE:,}", lambda x: 0 <= x <= MAX_TEMPERATURE)
        self._check_number("top_p", "above 0 and at most 1", lambda x: 0 < x <= 1)
        self._check_number("min_p", "between 0 and 1", lambda x: 0 <= x <= 1)
        self._check_number("repetition_penalty", f"above 0 and at most {MAX_PENALTY:,}", lambda x: 0 < x <= MAX_PENALTY)
        for name in ("presence_penalty", "frequency_penalty"):
            self._check_number(name, f"from {-MAX_PENALTY:,} to {MAX_PENALTY:,}", lambda x: -MAX_PENALTY <= x <= MAX_PENALTY)
        self._check_integer("top_k", 0)
        for name, least in (("seed", 0), ("max_tokens", 1), ("logprobs", 0)):
            if getattr(self, name) is not None:
                self._check_integer(name, least)
        if not isinstance(self.logit_bias, Mapping):
            raise InputError(f"logit_bias={self.logit_bias!r:.80} must map tokens to numbers.")
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not _is_number(bias) or not (-MAX_BIAS <= bias <= MAX_BIAS or abs(bias) == math.inf):
                raise InputError(f"logit_bias={{{token!r:.80}: {bias!r:.80}}} must map a token to a number.")
        if self.grammar is not None and not isinstance(self.grammar, str):
            raise InputError(f"grammar={self.grammar!r:.80} must be a string.")

    def _check_number(self, name: str, wanted: str, fits: Callable[[float], bool]) -> None:
        value = getattr(self, name)
        # NaN fits no range
        if not _is_number(value) or not fits(value):
            raise InputError(f"{name}={value!r:.80} must be {wanted}.")

    def _check_integer(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if type(value) is not int or not least <= value < 1 << 63:
            raise InputError(f"{name}={value!r:.80} must be an integer from {least} to 2**63 - 1.")

    @property
    def greedy(self) -> bool:
        """Return whether the most likely token is taken."""
        return self.temperature == 0

    @property
    def stateless(self) -> bool:
        """Return whether a token depends on its logits alone, not on the tokens sampled before it."""
        return self.grammar is None and not self.penalized

    @property
    def penalized(self) -> bool:
        """Return whether a penalty is on."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


def _is_number(value: object) -> bool:
    return type(value) in (int, float)


@dataclass(frozen=True)
class DefaultSampling:
    """Settings of requests that leave them out; None for those of `Sampling`, which is greedy.

    source  of the settings, in a few words
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    source: str = "default"

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, without those that are None."""
        return {name: value for name, value in asdict(self).items() if name != "source" and value is not None}

    def sampling(self, **given: Any) -> Sampling:
        """Return the settings of a request; a given None leaves the setting out."""
        return Sampling(**{**self.settings, **{name: value for name, value in given.items() if value is not None}})

    def __str__(self) -> str:
        shown = [f"{name.replace('_', '-')} {value:g}" for name, value in self.settings.items() if value != NEUTRAL.get(name)]
        return f"{', '.join(shown) or 'greedy'} ({self.source})"
