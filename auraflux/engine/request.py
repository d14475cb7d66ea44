"""Requests to the scheduler and the outputs it returns: plain data that crosses process boundaries."""

from dataclasses import dataclass, field

from auraflux.engine.sampling import Sampling
from auraflux.errors import InputError
from auraflux.vision.span import ImageSpan


@dataclass(frozen=True)
class ThinkTags:
    """Text around reasoning.

    closing    that the model writes after it
    close_ids  tokens that close it at the budget
    again_ids  tokens that close it if it is opened once more
    """

    opening: str
    closing: str
    close_ids: tuple[int, ...]
    again_ids: tuple[int, ...]


@dataclass(frozen=True)
class ThinkingBudget:
    """The most tokens of reasoning in an answer.

    tokens  between the tags
    opened  tags that the prompt's end has opened; None for none
    reopens whether reasoning may follow other text, not only begin the answer
    """

    tokens: int
    tags: tuple[ThinkTags, ...]
    opened: ThinkTags | None = None
    reopens: bool = False


@dataclass(frozen=True)
class Request:
    """A generation request.

    prompt                  prompt tokens
    user                    owner of the request; the queue is fair between users
    visible_special_tokens  special tokens that stay in the decoded text, such as those around a tool call
    stop_token_ids          tokens that end the generation and are not part of its text; None for the model's own
    prompt_logprobs         number of most likely tokens to report with each prompt token; None for no log probabilities
    thinking                the most tokens of reasoning; None for no limit
    pooling                 "last", "mean" or "cls" to embed the prompt instead of continuing it
    adapter                 name of an adapter of the model; None for the model alone
    labels                  tokens whose logits after the prompt are its embedding, for a request with `pooling`
    images                  the prompt's images in order, see `vision/processor.py`
    """

    prompt: tuple[int, ...]
    sampling: Sampling = field(default_factory=Sampling)
    user: str = ""
    visible_special_tokens: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] | None = None
    prompt_logprobs: int | None = None
    thinking: ThinkingBudget | None = None
    pooling: str | None = None
    labels: tuple[int, ...] = ()
    images: tuple[ImageSpan, ...] = ()
    adapter: str | None = None


def check_generates(generates: bool) -> None:
    """Refuse to continue a prompt with a model that does not generate."""
    if not generates:
        raise InputError("the model embeds inputs and generates no text: its attention is bidirectional.")


@dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a token, and of the most likely tokens at its position.

    rank  of a prompt token: 1 for the most likely
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int | None = None


@dataclass(frozen=True)
class RequestStats:
    """Statistics of one request.

    prompt_tokens          in the prompt
    cached_tokens          of them served by the prefix cache
    tokens                 generated
    queue_s                from arrival to admission
    ttft_s                 from arrival to the first token
    total_s                from arrival to the last token
    cache_nbytes           of the sequence in the KV cache: its tokens and states
    full_precision_nbytes  of these, sink and recent tokens in full precision
    allocated_nbytes       of the pages and states that hold them
    uncompressed_nbytes    that the same tokens would take with kv="none", in the same dtype
    steps                  decode steps
    drafted                draft tokens verified, see `speculative/speculation.py`
    accepted               draft tokens accepted
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    tokens: int = 0
    queue_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    cache_nbytes: int = 0
    uncompressed_nbytes: int = 0
    full_precision_nbytes: int = 0
    allocated_nbytes: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Output:
    """New output of a request; the concatenated `text` of all its outputs is the generated text.

    text           that no later token can change
    tokens         sampled since the last output, including the stop token
    logprobs       of these tokens, where `Sampling.logprobs` requests them
    finish_reason  "stop", "length", "cancelled" or "error"; None while it runs
    stop_string    that ended the generation
    error          message, with finish_reason "error"
    stats          with the last output
    prompt_logprobs  of the prompt's tokens from the second on, with the first output
    embedding      the prompt's pooled hidden states in float32, with the last output, for a request with `pooling`
    """

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    stop_string: str | None = None
    error: str | None = None
    stats: RequestStats | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    embedding: bytes = b""
