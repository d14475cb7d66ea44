"""Statistics of a generation, over all its sequences."""

from collections.abc import Iterable
from dataclasses import dataclass

from auraflux.engine.request import RequestStats
from auraflux.weights.experts.stats import ExpertCacheStatsByLayer


@dataclass
class Stats:
    """Statistics of a generation.

    prompt_tokens          computed by the model
    reused_tokens          of the prompt served by the prefix cache
    tokens                 generated, over all sequences
    cache_nbytes           of the sequences in the KV cache: their tokens and states
    full_precision_nbytes  of these, sink and recent tokens in full precision
    allocated_nbytes       of the pages and states that hold them
    uncompressed_nbytes    that the same tokens would take with kv="none", in the same dtype
    steps                  decode steps, over all sequences
    drafted                draft tokens verified, see `speculative/speculation.py`
    accepted               draft tokens accepted
    experts                expert cache statistics of a packed model; None where all experts are resident
    finish_reasons         "stop", "stop_string", "length" or "cancelled", of each sequence
    invariant              whether batch-invariant results were requested (`--invariant`); a CPU always gives them
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    cache_nbytes: int = 0
    full_precision_nbytes: int = 0
    allocated_nbytes: int = 0
    uncompressed_nbytes: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    experts: ExpertCacheStatsByLayer | None = None
    finish_reasons: tuple[str, ...] = ()
    invariant: bool = False

    def set(self, requests: Iterable[RequestStats]) -> None:
        """Sum the statistics of requests that ran together."""
        all_ = list(requests)
        self.reused_tokens = sum(one.cached_tokens for one in all_)
        self.prompt_tokens = sum(one.prompt_tokens for one in all_) - self.reused_tokens
        self.tokens = sum(one.tokens for one in all_)
        self.prefill_s = max(one.ttft_s for one in all_)
        self.decode_s = max(one.total_s for one in all_) - min(one.ttft_s for one in all_)
        self.cache_nbytes = sum(one.cache_nbytes for one in all_)
        self.full_precision_nbytes = sum(one.full_precision_nbytes for one in all_)
        self.allocated_nbytes = sum(one.allocated_nbytes for one in all_)
        self.uncompressed_nbytes = sum(one.uncompressed_nbytes for one in all_)
        self.steps = sum(one.steps for one in all_)
        self.drafted = sum(one.drafted for one in all_)
        self.accepted = sum(one.accepted for one in all_)

    @property
    def tokens_per_step(self) -> float:
        """Tokens per decode step and sequence; 1 without speculative decoding."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, which counts as prefill."""
        return max(self.tokens - 1, 0) / self.decode_s if self.decode_s else 0.0
