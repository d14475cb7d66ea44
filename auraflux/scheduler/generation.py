"""The generated part of a sequence: sampled tokens, the text they decode to, and where it ends."""

from collections.abc import Sequence
from typing import Any

from auraflux.engine.sampler import SamplerState
from auraflux.engine.sampling import Sampling
from auraflux.engine.thinking import TokenMatcher
from auraflux.tokenizer.detokenizer import Detokenizer
from auraflux.tokenizer.stop_strings import StopStrings


class Generation:
    """Sampled tokens and their text.

    prompt                  tokens before them, which penalties count
    limit                   maximum number of tokens
    stop_token_ids          tokens that end it and are not part of it
    tokenizer               None to show tokens as numbers
    visible_special_tokens  special tokens that stay in the text
    matcher                 of the grammar that the text must follow, or of a thinking budget
    tokens                  sampled so far
    finish_reason           "stop" at a stop token or stop string, "length" at the limit; None until then
    """

    def __init__(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        limit: int,
        stop_token_ids: frozenset[int],
        tokenizer: Any | None,
        visible_special_tokens: frozenset[int] = frozenset(),
        matcher: TokenMatcher | None = None,
    ):
        self.sampling, self.limit = sampling, limit
        self.stop_token_ids = frozenset() if sampling.ignore_eos else stop_token_ids
        self.sampler_state = SamplerState(sampling, prompt, matcher)
        self.tokens = self.sampler_state.tokens
        self.finish_reason: str | None = None
        self._detokenizer = Detokenizer(tokenizer, show=visible_special_tokens) if tokenizer is not None else None
        self._stops = StopStrings(sampling.stop)

    @property
    def next_is_last(self) -> bool:
        """Return whether the next token reaches the limit."""
        return len(self.tokens) + 1 >= self.limit

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.stopped

    def append(self, token: int) -> str:
        """Append a sampled token; return the text that no later token can change."""
        if token in self.stop_token_ids:
            self.finish_reason = "stop"
            return self._flush()
        self.sampler_state.append(token)
        text = self._stops.add(f"{token} " if self._detokenizer is None else self._detokenizer.add(token))
        if self._stops.stopped is not None:
            self.finish_reason = "stop"
        elif self.sampler_state.complete:
            self.finish_reason = "stop"
            text += self._flush()
        elif len(self.tokens) >= self.limit:
            self.finish_reason = "length"
            text += self._flush()
        return text

    def _flush(self) -> str:
        tail = self._stops.add(self._detokenizer.flush()) if self._detokenizer is not None else ""
        return tail + self._stops.flush()
