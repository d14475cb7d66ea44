"""The parts of an answer as they come: what was thought, what is said, tools that are called. APIs only spell them."""

from dataclasses import dataclass

from auraflux.run.request import Figures, Scored


@dataclass(frozen=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True)
class Content:
    """More of the answer."""

    text: str


@dataclass(frozen=True)
class CallBegin:
    """A tool is called; its arguments follow. Calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of a call's arguments: joined, they are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class Logprobs:
    """Tokens of the answer with their probabilities, where they were asked for."""

    scored: tuple[Scored, ...]


@dataclass(frozen=True)
class Finish:
    """The end of an answer.

    reason   "stop", "length", "tool_calls", "cancelled" or "error"
    stop     the stop string that ended it
    error    what went wrong, in a sentence
    """

    reason: str
    figures: Figures
    stop: str | None = None
    error: str | None = None


Said = Reasoning | Content | CallBegin | CallArguments
Delta = Said | Logprobs | Finish
