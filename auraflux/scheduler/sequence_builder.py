"""`SequenceBuilder`: checks a request and makes its sequence."""

from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

from auraflux.adapters.loaded import adapter_number
from auraflux.engine.engine import Engine
from auraflux.engine.request import Output, Request, ThinkingBudget, check_generates
from auraflux.engine.thinking import ThinkingMatcher, TokenMatcher
from auraflux.errors import ContextError, InputError
from auraflux.scheduler.generation import Generation
from auraflux.scheduler.sequence import Sequence
from auraflux.tokenizer.grammar import GrammarCompiler, Matcher

IMAGES = 4  # at the start of a prompt, after each of which a checkpoint is made
LONG_MESSAGES = 2  # at the start of a prompt, after each of which a checkpoint is made for other prompts


class SequenceBuilder:
    """Turns requests into sequences.

    tokenizer       None for a model whose prompts and outputs are token ids
    stop_token_ids  tokens that end a generation, unless a request names others
    """

    def __init__(self, engine: Engine, tokenizer: Any | None, stop_token_ids: frozenset[int]):
        self.engine, self.tokenizer, self.stop_token_ids = engine, tokenizer, stop_token_ids
        self._grammars: GrammarCompiler | None = None

    def check(self, request: Request) -> None:
        """Refuse a request that cannot be served."""
        context, sampling = self.engine.cache.context, request.sampling
        adapter_number(self.engine.adapters, request.adapter)
        if request.pooling is None:
            check_generates(not self.engine.cache.bidirectional)
        if not request.prompt:
            raise InputError("the prompt is empty: there is nothing to continue.")
        vocab, tokens = self.engine.model.config.vocab, (*request.prompt, *sampling.logit_bias)
        wrong = next((token for token in (min(tokens), max(tokens)) if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InputError(f"token {wrong} is not in the model's vocabulary of {vocab}.")
        if len(request.prompt) > context:
            raise ContextError(
                f"the prompt has {len(request.prompt)} tokens, and the context is limited to {context}. "
                f"Load the model with context={len(request.prompt) + 1} or more (--context), or shorten the prompt."
            )
        self._check_images(request)
        if (sampling.grammar, request.thinking) != (None, None) and self.tokenizer is None:
            raise InputError("a model without a tokenizer cannot follow a grammar or a thinking budget.")

    def _check_images(self, request: Request) -> None:
        if request.images and self.engine.vision is None:
            raise InputError("the model takes no images.")
        if request.images and request.pooling is not None:
            raise InputError("a prompt with images cannot be embedded.")
        ends = [(span.start, span.stop) for span in request.images]
        inside = [(0, 0), *ends, (len(request.prompt) - 1, 0)]
        if any(stop > start for (_, stop), (start, _) in pairwise(inside)):
            raise InputError("the images of a prompt must be in order, and a token must follow the last one.")

    def build(self, request: Request, on_output: Callable[[Output], None]) -> Sequence:
        """Make the sequence of a checked request."""
        sampling, prompt = request.sampling, list(request.prompt)
        stops = self.stop_token_ids if request.stop_token_ids is None else request.stop_token_ids
        matcher: TokenMatcher | None = None if sampling.grammar is None else self._matcher(sampling.grammar, stops)
        if request.thinking is not None:
            matcher = self._thinking_matcher(request.thinking, matcher)
        room = self.engine.cache.context - len(prompt) + 1
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        generated = Generation(prompt, sampling, limit, stops, self.tokenizer, request.visible_special_tokens, matcher)
        images = None
        if request.images and self.engine.vision is not None:
            images = self.engine.vision.prompt_images(len(prompt), request.images)
        adapter = adapter_number(self.engine.adapters, request.adapter)
        return Sequence(request, generated, on_output, self._checkpoint_lengths(request), images, adapter)

    def _matcher(self, grammar: str, stops: frozenset[int]) -> Matcher:
        if self._grammars is None:
            assert self.tokenizer is not None
            self._grammars = GrammarCompiler(self.tokenizer, self.engine.model.config.vocab, self.stop_token_ids or stops)
        return self._grammars.matcher(grammar, stops)

    def _thinking_matcher(self, budget: ThinkingBudget, inner: TokenMatcher | None) -> ThinkingMatcher:
        assert self.tokenizer is not None
        return ThinkingMatcher(budget, self.tokenizer.piece, self.engine.model.config.vocab, inner)

    def _checkpoint_lengths(self, request: Request) -> list[int]:
        """Return the lengths at which other prompts are likely to branch off.

        They are the position before the last token, the start of the last message, the ends of the first long messages, which
        are instructions that other prompts share, and the ends of the first images, after which questions differ.
        """
        if request.pooling is not None:
            # nothing branches off a prompt that is embedded
            return []
        prompt = request.prompt
        lengths = {len(prompt) - 1}
        if self.engine.cache.needs_checkpoints:
            lengths |= {span.stop for span in request.images[:IMAGES]}
        if self.tokenizer is not None and self.engine.cache.needs_checkpoints:
            special, pictured = (
                self.tokenizer.special_ids,
                {at for span in request.images for at in range(span.start, span.stop)},
            )
            messages = [at for at, token in enumerate(prompt) if at and token in special and at not in pictured]
            long = (at for before, at in pairwise([0, *messages]) if at - before >= self.engine.cache.page)
            lengths |= {*messages[-1:], *islice(long, LONG_MESSAGES)}
        return sorted(lengths - {0})
