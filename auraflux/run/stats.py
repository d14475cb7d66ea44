"""What a generation took."""

from collections.abc import Iterable
from dataclasses import dataclass

from auraflux.run.request import Figures
from auraflux.weights.traffic import ExpertTraffic


@dataclass
class Stats:
    """What a generation took.

    prompt_tokens   that went through the model
    reused_tokens   of the prompt that the cache still had
    tokens          chosen, over all texts
    cache_nbytes    that the texts take in the cache
    kept_nbytes     of these, positions that are kept as they are beside their codes
    plain_nbytes    that the same positions would take uncompressed, in bf16
    steps           in which the tokens were chosen, over all texts
    drafted         tokens that were guessed and checked, see `run/speculate.py`
    accepted        of them that were right
    experts         what was read of a packed model's experts; None where all are in memory
    invariant       whether results were asked for that do not depend on company (`--invariant`); a CPU gives no others
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    prefill_s: float = 0.0
    tokens: int = 0
    decode_s: float = 0.0
    cache_nbytes: int = 0
    kept_nbytes: int = 0
    plain_nbytes: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    experts: ExpertTraffic | None = None
    invariant: bool = False

    def set(self, figures: Iterable[Figures]) -> None:
        """Take over what is known of texts that were written together."""
        all_ = list(figures)
        self.reused_tokens = sum(one.cached_tokens for one in all_)
        self.prompt_tokens = sum(one.prompt_tokens for one in all_) - self.reused_tokens
        self.tokens = sum(one.tokens for one in all_)
        self.prefill_s = max(one.first_s for one in all_)
        self.decode_s = max(one.total_s for one in all_) - min(one.first_s for one in all_)
        self.cache_nbytes = sum(one.cache_nbytes for one in all_)
        self.kept_nbytes = sum(one.kept_nbytes for one in all_)
        self.plain_nbytes = sum(one.plain_nbytes for one in all_)
        self.steps = sum(one.steps for one in all_)
        self.drafted = sum(one.drafted for one in all_)
        self.accepted = sum(one.accepted for one in all_)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that a text grew by in a step; 1 without guesses."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_s if self.prefill_s else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second after the first, which is the prompt's work."""
        return max(self.tokens - 1, 0) / self.decode_s if self.decode_s else 0.0
