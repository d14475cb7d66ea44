"""What every API asks: a conversation goes in, answers come out."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from auraflux.errors import ContextError, InputError, RankError, TemplateError
from auraflux.run.request import Request
from auraflux.run.sampling import Sampling
from auraflux.run.tokenizer import Tokenizer
from auraflux.serve.answer import Answer, Plain, Reader
from auraflux.serve.ask import Ask, Format
from auraflux.serve.conversation import foldings
from auraflux.serve.failures import Failure, not_ready
from auraflux.serve.grammar import grammar_for, grammar_of
from auraflux.serve.limits import Limits
from auraflux.serve.link import Link, ModelFacts
from auraflux.serve.metrics import Metrics, Tally
from auraflux.serve.parse import Syntax, find_syntax
from auraflux.weights.placement import Dealt

# characters of the prompt's end that tell how the answer begins
TAIL = 200
# in which the model must end the texts it was told to stop
STOP_S = 2.0
# what a template is given by the server alone
RESERVED = ("self", "messages", "tools", "add_generation_prompt", "template")


class Service:
    """Answers through a link to the model, within limits.

    draining  whether the server is stopping: what was begun is finished, nothing new is taken
    created   when it began, in seconds since 1970
    """

    def __init__(self, link: Link, limits: Limits | None = None):
        self.link, self.limits = link, limits or Limits()
        self.tally = Tally()
        self.metrics = Metrics(self.tally, lambda: link.facts.name if link.facts else "", lambda: link.gauges)
        self.draining, self.created = False, int(time.time())
        self._answers: set[Answer] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._syntax: Syntax | None = None

    @property
    def facts(self) -> ModelFacts:
        """What is known of the model; Failure 503 while there is none."""
        if self.link.facts is None:
            raise not_ready(self.link.why_not)
        return self.link.facts

    @property
    def tokenizer(self) -> Tokenizer:
        facts = self.facts
        if self.link.tokenizer is None:
            raise InputError(f"The model {facts.name} has no tokenizer; ask /v1/completions with tokens instead of text.")
        return self.link.tokenizer

    @property
    def syntax(self) -> Syntax:
        if self._syntax is None:
            templates = self.tokenizer.templates
            self._syntax = find_syntax(self.facts.model_type, templates.get("tool_use") or templates.get("default"))
        return self._syntax

    @property
    def active(self) -> int:
        """How many answers are being made."""
        return len(self._answers)

    def check_ready(self) -> None:
        """Raise a Failure 503 while nothing can be asked."""
        if self.draining:
            raise not_ready("The server is stopping.")
        _ = self.facts

    def check_model(self, name: str | None) -> None:
        """Raise a Failure 404 for the name of another model; no name is that of the one there is."""
        served = self.facts.name
        if name and name != served:
            message = f"The model {name!r} is not served here. The one that is: {served}."
            raise Failure(404, message, code="model_not_found", param="model")

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, wait for what was begun, and stop what is not finished by then."""
        self.draining = True
        if not await self._idle_within(grace_s):
            for answer in list(self._answers):
                answer.stop()
            await self._idle_within(STOP_S)

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def answer(self, ask: Ask) -> list[Answer]:
        """Begin `ask.count` answers to a conversation."""
        self.check_ready()
        self.limits.check(ask)
        tokens, tail, grammar = await asyncio.to_thread(self._prepare, ask)
        syntax = self.syntax
        request = Request(
            tokens,
            replace(ask.sampling, grammar=grammar or ask.sampling.grammar),
            user=ask.user,
            show=frozenset(self._ids(syntax.shows)),
            ends=(self.facts.ends | self.tokenizer.turn_ends) - frozenset(self._ids(syntax.goes_on)),
        )
        tools = _offered(ask)
        return self._submit([request], ask.count, lambda: syntax.parser(tail, tools), ask.parallel)

    async def complete(
        self, prompts: Sequence[str | Sequence[int]], sampling: Sampling, *, format: Format | None, count: int, user: str
    ) -> list[Answer]:
        """Begin `count` continuations of each prompt, those of one prompt beside each other."""
        self.check_ready()
        self.limits.check_sampling(sampling, format, count)

        def prepare() -> list[Request]:
            grammar = grammar_of(format) if format is not None else None
            settings = replace(sampling, grammar=grammar)
            return [Request(self._tokens(prompt), settings, user=user) for prompt in prompts]

        return self._submit(await asyncio.to_thread(prepare), count, Plain)

    async def deal_experts(self) -> Dealt:
        """Have experts dealt out to ranks by use; what is being answered goes on."""
        self.check_ready()
        try:
            return await self.link.deal_experts()
        except RankError as err:
            raise not_ready(str(err)) from err

    async def count_tokens(self, ask: Ask) -> int:
        """Count the tokens of a conversation's prompt."""
        return len(await self.tokenize(ask))

    async def tokenize(self, ask: Ask, add_generation_prompt: bool = True) -> list[int]:
        """Give the tokens of a conversation's prompt."""
        self.limits.check(ask)
        return await asyncio.to_thread(lambda: self.tokenizer.encode(self._render(ask, add_generation_prompt), special=False))

    def _prepare(self, ask: Ask) -> tuple[tuple[int, ...], str, str | None]:
        """Give the prompt's tokens, its last characters and the grammar of the answer: work for a thread of its own."""
        text = self._render(ask)
        # found by rendering once, which is no work for the event loop
        _ = self.tokenizer.turn_ends
        tail = text[-TAIL:]
        grammar = grammar_for(ask, self.syntax, tail, self.tokenizer)
        return tuple(self.tokenizer.encode(text, special=False)), tail, grammar

    def _render(self, ask: Ask, add_generation_prompt: bool = True) -> str:
        for name in RESERVED:
            if name in ask.values:
                raise InputError(f"chat_template_kwargs may not hold {name!r}: the server itself gives it to the template.")
        tools = _offered(ask)
        first: TemplateError | None = None
        for messages in foldings(ask.messages):
            try:
                return self.tokenizer.apply_template(messages, add_generation_prompt, **ask.values, tools=tools)
            except TemplateError as err:
                first = first or err
        raise first or TemplateError("There are no messages.")

    def _tokens(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(self.tokenizer.encode(prompt))
        return tuple(prompt)

    def _ids(self, names: Sequence[str]) -> list[int]:
        found = (self.tokenizer.token_id(name) for name in names)
        return [number for number in found if number is not None]

    def _submit(self, requests: list[Request], count: int, reader: Callable[[], Reader], parallel: bool = True) -> list[Answer]:
        fitted = [self._fitted(request) for request in requests]
        answers: list[Answer] = []
        try:
            for request in fitted:
                for number in range(count):
                    answers.append(self._begin(_reseeded(request, number), reader(), parallel))
        except BaseException:
            for answer in answers:
                answer.cancel()
            raise
        return answers

    def _begin(self, request: Request, reader: Reader, parallel: bool) -> Answer:
        writing = self.link.submit(request)
        answer = Answer(
            writing,
            reader,
            prompt_tokens=len(request.prompt),
            tally=self.tally,
            ends=self.facts.ends if request.ends is None else request.ends,
            parallel=parallel,
            over=self._over,
        )
        self.tally.prompt_tokens += len(request.prompt)
        self._answers.add(answer)
        self._idle.clear()
        if self.limits.deadline_s is not None:
            answer.expire_in(self.limits.deadline_s)
        return answer

    def _over(self, answer: Answer) -> None:
        self._answers.discard(answer)
        if not self._answers:
            self._idle.set()

    def _fitted(self, request: Request) -> Request:
        """Check what only the model can tell, and let an answer be as long as there is room."""
        facts, length = self.facts, len(request.prompt)
        if not length:
            raise InputError("The prompt is empty; give it at least one token.")
        if length >= facts.context:
            raise ContextError(f"The prompt has {length} tokens; with its answer it must fit into {facts.context}.")
        for what, tokens in (("the prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
            wrong = next((token for token in tokens if not 0 <= token < facts.vocab), None)
            if wrong is not None:
                raise InputError(f"{wrong} in {what} is none of the model's {facts.vocab} tokens.")
        asked, room = request.sampling.max_tokens, facts.context - length
        return (
            request if asked is None or asked <= room else replace(request, sampling=replace(request.sampling, max_tokens=room))
        )


def _offered(ask: Ask) -> list[dict[str, Any]] | None:
    """The tools that the model is told of; templates ask whether there are any."""
    return ask.tools if ask.tools and ask.tool_choice != "none" else None


def _reseeded(request: Request, number: int) -> Request:
    """Let answers to one prompt differ although they share a seed."""
    seed = request.sampling.seed
    if seed is None or number == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) % (1 << 63)))
