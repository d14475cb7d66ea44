"""What is asked of the scheduler, and what it tells of it: plain data, so that both can cross from one process to another."""

from dataclasses import dataclass, field

from auraflux.run.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """A text to be written.

    prompt    tokens it continues
    user      whose it is: users take turns in the queue
    show      special tokens that appear in the text, such as those around a tool call; others are left out
    ends      tokens that end the text and are not part of it; None for the model's own
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    user: str = ""
    show: frozenset[int] = frozenset()
    ends: frozenset[int] | None = None


@dataclass(frozen=True)
class Scored:
    """A token that was chosen, how likely it was, and the likeliest tokens in its place; logarithms of probabilities."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Figures:
    """What a text took.

    prompt_tokens   of the whole prompt
    cached_tokens   of them that the cache had, so that they were not computed
    tokens          chosen
    queue_s         from being asked for to being begun
    first_s         from being asked for to the first token
    total_s         from being asked for to the end
    cache_nbytes    that the text takes in the cache
    plain_nbytes    that it would take uncompressed, in bf16
    kept_nbytes     of cache_nbytes, positions that are kept as they are beside their codes
    steps           in which the tokens were chosen
    drafted         tokens that were guessed and checked, see `run/speculate.py`
    accepted        of them that were right
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    queue_s: float = 0.0
    first_s: float = 0.0
    total_s: float = 0.0
    cache_nbytes: int = 0
    plain_nbytes: int = 0
    kept_nbytes: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Event:
    """News of a request; those of one request joined are its text.

    text     that is sure by now
    tokens   chosen since the last event, the one that ended the text too
    scored   the same with their probabilities, where `Sampling.logprobs` asks for them
    finish   why it ended: "stop", "length", "cancelled" or "error"; None until then
    stop     the stop string that ended it
    error    what went wrong, in a sentence
    figures  with the last event
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    scored: tuple[Scored, ...] = ()
    finish: str | None = None
    stop: str | None = None
    error: str | None = None
    figures: Figures | None = None
