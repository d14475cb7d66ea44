"""The line between the process that answers HTTP and the one that runs the model."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from auraflux.run.request import Event, Request
from auraflux.run.tokenizer import Tokenizer
from auraflux.weights.placement import Dealt


@dataclass(frozen=True)
class ModelFacts:
    """What the server says of its model.

    name        by which clients ask for it
    model_type  its family
    context     most tokens of a prompt and its answer together
    vocab       tokens that have scores
    ends        tokens that end a text
    kv          how keys and values are kept
    device      where it runs
    parallel    texts that are written at once
    """

    name: str
    model_type: str
    context: int
    vocab: int
    ends: frozenset[int]
    kv: str
    device: str
    parallel: int


@dataclass(frozen=True)
class Gauges:
    """What the scheduler is at, told with every step.

    running, waiting    requests
    pages_used, pages   of the cache; pages that only keep prefixes count as free
    prefix_queries      prompt tokens looked up in the prefix cache so far
    prefix_hits         of them found
    preemptions         so far
    expert_hits, expert_reads, expert_nbytes   of experts that are read from disk; None where all are in memory
    drafted, accepted   tokens that were guessed, and of them those that were right; None where nothing guesses
    """

    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    expert_hits: int | None = None
    expert_reads: int | None = None
    expert_nbytes: int | None = None
    drafted: int | None = None
    accepted: int | None = None


class Writing(Protocol):
    """A text that is being written for the HTTP side."""

    def __aiter__(self) -> AsyncIterator[Event]: ...

    def cancel(self) -> None:
        """Stop it between steps; an event with finish "cancelled" follows, unless it had ended."""


class Link(Protocol):
    """What the HTTP side has of the model.

    facts      None while weights are loaded, and while the model cannot answer
    why_not    what a client is told then
    tokenizer  None until then, and for a model that has none
    gauges     as of the last step
    """

    @property
    def facts(self) -> ModelFacts | None: ...
    @property
    def why_not(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def gauges(self) -> Gauges: ...

    def submit(self, request: Request) -> Writing:
        """Ask for a text. BusyError where the queue is full."""

    async def deal_experts(self) -> Dealt:
        """Have experts dealt out to ranks by use, between two steps."""
