"""Deltas of an answer: reasoning, content, tool calls, logprobs and the finish. Each API serializes them in its format."""

from dataclasses import dataclass

from auraflux.engine.request import RequestStats, TokenLogprob


@dataclass(frozen=True)
class Reasoning:
    """More reasoning text."""

    text: str


@dataclass(frozen=True)
class Content:
    """More answer text."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """Start of a tool call; its arguments follow. Calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of a call's arguments; joined, they are JSON."""

    index: int
    text: str


@dataclass(frozen=True)
class Logprobs:
    """Log probabilities of new tokens, where they are requested."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True)
class Finish:
    """End of an answer.

    reason       "stop", "length", "tool_calls", "cancelled" or "error"
    stop_string  that ended it
    error        message, with reason "error"
    """

    reason: str
    stats: RequestStats
    stop_string: str | None = None
    error: str | None = None


ParsedDelta = Reasoning | Content | ToolCallBegin | ToolCallArguments
Delta = ParsedDelta | Logprobs | Finish
