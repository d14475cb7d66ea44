"""The interface between the HTTP process and the model process."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from auraflux.engine.request import Output, Request
from auraflux.engine.sampling import DefaultSampling
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.vision.processor import ImageProcessor
from auraflux.weights.formats.embedding import Embedding
from auraflux.weights.formats.headers import Headers
from auraflux.weights.parallel.expert_placement import PlacementResult


@dataclass(frozen=True)
class ModelFacts:
    """Facts about the served model.

    name           served model name
    model_type     model family
    context        most tokens of prompt and answer together
    vocab          vocabulary size
    eos_token_ids  tokens that end a generation
    kv             KV cache format
    device         device it runs on
    max_sequences  batch size: sequences that decode at once
    default_sampling  settings of requests that leave them out
    headers        facts of its files; None for a model without any
    path           of its files; clients never see it
    generates      whether it generates text; a model with bidirectional attention only embeds inputs
    embedding      how it embeds inputs; None for a model whose files do not say
    images         how it takes images; None for a model that takes text only
    no_images      why it takes no images
    adapters       names of its adapters
    """

    name: str
    model_type: str
    context: int
    vocab: int
    eos_token_ids: frozenset[int]
    kv: str
    device: str
    max_sequences: int
    default_sampling: DefaultSampling = field(default_factory=DefaultSampling)
    headers: Headers | None = None
    path: Path | None = None
    generates: bool = True
    embedding: Embedding | None = None
    images: ImageProcessor | None = None
    no_images: str = ""
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelPlan:
    """Memory that a model will take beside others.

    device  whose memory it is
    nbytes  of it
    limit   that all models may take of this device; None for main memory, which the server divides
    """

    device: str
    nbytes: int
    limit: int | None = None


@dataclass(frozen=True)
class Gauges:
    """State of the scheduler, sent after engine steps.

    running, waiting    requests
    pages_used, pages   of the KV cache; evictable prefix pages count as free
    prefix_queries      prompt tokens looked up in the prefix cache
    prefix_hits         prompt tokens found in it
    preemptions         preempted sequences
    expert_hits, expert_reads, expert_nbytes   of offloaded experts; None if all are in memory
    drafted, accepted   draft tokens verified and accepted; None without speculative decoding
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


class OutputStream(Protocol):
    """Outputs of one request, as they arrive in the HTTP process."""

    def __aiter__(self) -> AsyncIterator[Output]: ...

    def cancel(self) -> None:
        """Cancel the request; an output with finish_reason "cancelled" follows, unless it had ended."""


class Link(Protocol):
    """The HTTP process's connection to the model.

    facts               None while the model loads or is unavailable
    unavailable_reason  error message for clients meanwhile
    tokenizer           None until the model is loaded, and for a model without one
    gauges              as of the last step
    """

    @property
    def facts(self) -> ModelFacts | None: ...
    @property
    def unavailable_reason(self) -> str: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    @property
    def gauges(self) -> Gauges: ...

    def submit(self, request: Request) -> OutputStream:
        """Submit a request; raise BusyError if the queue is full."""

    async def place_experts(self) -> PlacementResult:
        """Redistribute experts over ranks by use, between two engine steps."""
