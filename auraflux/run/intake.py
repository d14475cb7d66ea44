"""A request becomes a job, unless it cannot be carried out."""

from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any

from auraflux.errors import ContextError, InputError
from auraflux.run.engine import Engine
from auraflux.run.grammar import Grammars, Matcher
from auraflux.run.job import Job
from auraflux.run.request import Event, Request
from auraflux.run.stream import Stream

LONG_TURNS = 2  # at the beginning of a prompt, whose ends are kept for others


class Intake:
    """Makes jobs of requests.

    tokenizer  None for a model that reads and writes tokens as numbers
    ends       tokens that end a text, unless a request names others
    """

    def __init__(self, engine: Engine, tokenizer: Any | None, ends: frozenset[int]):
        self.engine, self.tokenizer, self.ends = engine, tokenizer, ends
        self._grammars: Grammars | None = None

    def check(self, request: Request) -> None:
        """Refuse what cannot be carried out."""
        context, sampling = self.engine.cache.context, request.sampling
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
        if sampling.grammar is not None and self.tokenizer is None:
            raise InputError("a model without a tokenizer cannot follow a grammar.")

    def job(self, request: Request, tell: Callable[[Event], None]) -> Job:
        """Make a job of a request that was checked."""
        sampling, prompt = request.sampling, list(request.prompt)
        ends = self.ends if request.ends is None else request.ends
        matcher = None if sampling.grammar is None else self._matcher(sampling.grammar, ends)
        room = self.engine.cache.context - len(prompt) + 1
        limit = room if sampling.max_tokens is None else min(sampling.max_tokens, room)
        stream = Stream(prompt, sampling, limit, ends, self.tokenizer, request.show, matcher)
        return Job(request, stream, tell, self._marks(prompt))

    def _matcher(self, grammar: str, ends: frozenset[int]) -> Matcher:
        if self._grammars is None:
            assert self.tokenizer is not None
            self._grammars = Grammars(self.tokenizer, self.engine.model.config.vocab, self.ends or ends)
        return self._grammars.matcher(grammar, ends)

    def _marks(self, prompt: list[int]) -> list[int]:
        """Where a conversation is likely to be gone on with, or another to part from it.

        That is before its last token, where its last turn begins, and where the first long turns end: instructions that others
        have, too.
        """
        ends = {len(prompt) - 1}
        if self.tokenizer is not None and self.engine.cache.forgets:
            special = self.tokenizer.special_ids
            turns = [at for at, token in enumerate(prompt) if at and token in special]
            long = (at for before, at in pairwise([0, *turns]) if at - before >= self.engine.cache.page)
            ends |= {*turns[-1:], *islice(long, LONG_TURNS)}
        return sorted(ends - {0})
