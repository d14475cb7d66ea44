"""The service behind every API: conversations and prompts in, streams of deltas out."""

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest

from auraflux.engine.request import Request, ThinkingBudget, check_generates
from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import ContextError, InputError, RankError, TemplateError
from auraflux.serve.chat.conversation import Conversation, Format, partial_reply, system_message_variants
from auraflux.serve.chat.deltas import Finish
from auraflux.serve.chat.images import prepare_images
from auraflux.serve.chat.output import ChatOutput, OutputParser, PlainTextParser
from auraflux.serve.chat.structured_output import grammar_for, grammar_of
from auraflux.serve.failures import Failure, check_finish, not_ready
from auraflux.serve.fill_in_middle import find_fill_tokens
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.serve.limits import Limits, at_most
from auraflux.serve.listing import KeepAlive, Listing
from auraflux.serve.metrics import Metrics, ModelMetrics, Tally
from auraflux.serve.parse import Syntax, find_syntax
from auraflux.serve.transport.link import Link, ModelFacts
from auraflux.serve.transport.model_names import adapter_of, is_model
from auraflux.tokenizer.tokenizer import Tokenizer
from auraflux.vision.messages import take_images
from auraflux.vision.processor import encode_prompt
from auraflux.vision.span import ImageSpan, PreparedImage
from auraflux.weights.formats.embedding import Embedding, usable_embedding
from auraflux.weights.parallel.expert_placement import PlacementResult

# characters at the prompt's end that determine how the answer begins
TAIL = 200
# for cancelled sequences to end
STOP_S = 2.0
# tokens of reasoning by effort, for models whose template has no efforts; "high" has no limit
EFFORT_BUDGETS = {"minimal": 256, "low": 1024, "medium": 4096}
# template arguments that only the server sets
RESERVED = ("self", "messages", "tools", "add_generation_prompt", "template")


class Service:
    """Access to the model over a link, within limits.

    aliases   other names of the model
    adapter   of its requests; None for the model alone
    draining  whether the server is stopping: running requests finish, new ones are refused
    created   start time, in seconds since 1970
    """

    def __init__(self, link: Link, limits: Limits | None = None, *, aliases: tuple[str, ...] = (), tally: Tally | None = None):
        self.link, self.limits, self.aliases = link, limits or Limits(), aliases
        self.adapter: str | None = None
        self.tally = tally or Tally()
        self.metrics = Metrics(lambda: [ModelMetrics(link.facts.name if link.facts else "", self.tally, link.gauges)])
        self.draining, self.created = False, int(time.time())
        self._outputs: set[ChatOutput] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._syntax: Syntax | None = None

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model; Failure 503 while it is unavailable."""
        if self.link.facts is None:
            raise not_ready(self.link.unavailable_reason)
        return self.link.facts

    @property
    def default_sampling(self) -> DefaultSampling:
        """Sampling settings of requests that leave them out."""
        return self.facts.default_sampling

    @property
    def tokenizer(self) -> Tokenizer:
        facts = self.facts
        if self.link.tokenizer is None:
            raise InputError(f"The model {facts.name} has no tokenizer; use /v1/completions with token ids instead of text.")
        return self.link.tokenizer

    @property
    def syntax(self) -> Syntax:
        if self._syntax is None:
            templates = self.tokenizer.templates
            self._syntax = find_syntax(self.facts.model_type, templates.get("tool_use") or templates.get("default"))
        return self._syntax

    @property
    def active(self) -> int:
        """Number of running answers."""
        return len(self._outputs)

    def check_ready(self) -> None:
        """Raise Failure 503 while requests cannot be served."""
        if self.draining:
            raise not_ready("The server is stopping.")
        _ = self.facts

    def check_model(self, name: str | None) -> None:
        """Raise Failure 404 if `name` is another model; None stands for the served one."""
        served = self.facts.name
        if name and not self.serves(name):
            adapters = f", with the adapters {', '.join(self.facts.adapters)}" if self.facts.adapters else ""
            message = f"The model {name!r} is not served here. The served model: {served}{adapters}."
            raise Failure(404, message, code="model_not_found", param="model")

    def serves(self, name: str) -> bool:
        """Return whether `name` is the served model's or one of its adapters'."""
        return is_model(self.facts, self.aliases, name) or adapter_of(self.facts, self.aliases, name) is not None

    def for_model(self, name: str | None) -> "Service":
        """Return the service whose requests use the adapter that a name of a model gives."""
        if (adapter := adapter_of(self.facts, self.aliases, name)) is None:
            return self
        found = copy(self)
        found.adapter = adapter
        return found

    def knows(self, name: str) -> bool:
        return self.serves(name)

    async def select(self, request: HttpRequest, name: str | None, keep_alive: KeepAlive = None) -> "Service":
        """Return this service if a request names its model, which always stays loaded."""
        parse_keep_alive(keep_alive)
        self.check_ready()
        self.check_model(name)
        return self.for_model(name)

    async def unload(self, name: str) -> bool:
        self.check_model(name)
        return False

    async def listings(self) -> list[Listing]:
        return [self.describe()]

    async def listing(self, name: str) -> Listing:
        self.check_model(name)
        return self.describe()

    def describe(self) -> Listing:
        """Return the facts about the model that clients see."""
        return Listing.of(self.facts, self.link.tokenizer, self.aliases)

    async def drain(self, grace_s: float) -> None:
        """Refuse new requests, wait for the running ones, and stop those that exceed the grace period."""
        self.draining = True
        if not await self._idle_within(grace_s):
            for output in list(self._outputs):
                output.stop()
            await self._idle_within(STOP_S)

    async def _idle_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def chat(self, conversation: Conversation) -> list[ChatOutput]:
        """Start `conversation.count` answers to a conversation."""
        self.check_ready()
        check_generates(self.facts.generates)
        self.limits.check(conversation)
        tokens, images, tail, grammar, thinking = await asyncio.to_thread(self._prepare, conversation)
        syntax = self.syntax
        stop_token_ids = self.facts.eos_token_ids | self.tokenizer.end_of_turn_ids
        request = Request(
            tokens,
            replace(conversation.sampling, grammar=grammar or conversation.sampling.grammar),
            user=conversation.user,
            visible_special_tokens=frozenset(self._ids(syntax.visible_tokens)),
            stop_token_ids=stop_token_ids - frozenset(self._ids(syntax.non_stop_tokens)),
            thinking=thinking,
            images=images,
        )
        tools, resumed = _offered(conversation), conversation.continue_final_message
        parallel = conversation.parallel_tool_calls
        return self._submit([request], conversation.count, lambda: syntax.parser(tail, tools, resumed=resumed), parallel)

    async def complete(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: Sampling,
        *,
        format: Format | None,
        count: int,
        user: str,
        prompt_logprobs: int | None = None,
        suffix: str = "",
    ) -> list[ChatOutput]:
        """Start `count` completions of each prompt; those of one prompt are adjacent.

        suffix           text after the completion, which then fills in the middle
        prompt_logprobs  number of most likely tokens to report with each prompt token; None for no log probabilities
        """
        self.check_ready()
        check_generates(self.facts.generates)
        self.limits.check_sampling(sampling, format, count)

        def prepare() -> list[Request]:
            grammar = grammar_of(format) if format is not None else None
            settings = replace(sampling, grammar=grammar)
            if suffix:
                return [self._filling(prompt, suffix, settings, user) for prompt in prompts]
            tokens = [self._tokens(prompt) for prompt in prompts]
            return [Request(each, settings, user=user, prompt_logprobs=prompt_logprobs) for each in tokens]

        return self._submit(await asyncio.to_thread(prepare), count, PlainTextParser)

    def _filling(self, prompt: str | Sequence[int], suffix: str, sampling: Sampling, user: str) -> Request:
        """Return the request to fill in between a prompt and a suffix."""
        fill = find_fill_tokens(self.tokenizer)
        if fill is None:
            raise InputError(f"The model {self.facts.name} cannot fill in the middle: its vocabulary has no tokens for that.")
        if not isinstance(prompt, str):
            raise InputError("suffix needs a prompt of text, not of tokens.")
        tokens = tuple(fill.prompt(self.tokenizer, prompt, suffix))
        return Request(tokens, sampling, user=user, stop_token_ids=self.facts.eos_token_ids | fill.stop_ids)

    @property
    def embedding(self) -> Embedding:
        """Settings of the model's embeddings; refuse a model that has none."""
        return usable_embedding(self.facts.embedding, self.facts.name)

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, user: str, prompt_name: str | None = None, truncate: bool = False
    ) -> list[ChatOutput]:
        """Return the finished outputs of inputs, with their embeddings before normalization.

        prompt_name  of the model's prompts, which precedes each text; None for the default one
        truncate     whether inputs that exceed the context are cut
        """
        self.check_ready()
        prompt, pooling = self.embedding.prompt(prompt_name), self.embedding.pooling
        at_most("input", len(inputs), self.limits.embeddings)

        def prepare() -> list[Request]:
            found = [self._tokens(prompt + text if isinstance(text, str) else text) for text in inputs]
            if truncate:
                found = [self._cut(tokens) for tokens in found]
            return [Request(tokens, user=user, pooling=pooling) for tokens in found]

        return await self.pool(await asyncio.to_thread(prepare))

    def _cut(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Return tokens cut to the context; a special token at their end, which pooling may read, stays."""
        most = self.facts.context
        if len(tokens) <= most:
            return tokens
        special = self.link.tokenizer is not None and tokens[-1] in self.link.tokenizer.special_ids
        return (*tokens[: most - 1], tokens[-1]) if special else tokens[:most]

    async def pool(self, requests: Sequence[Request]) -> list[ChatOutput]:
        """Return the finished outputs of requests with `pooling`."""
        requests = [self._fitted(request) for request in requests]
        outputs: list[ChatOutput] = []
        # more would fill the queue
        free = asyncio.Semaphore(self.facts.max_sequences)

        async def run(request: Request) -> ChatOutput:
            async with free:
                output = self._start(request, PlainTextParser(), parallel=True)
                outputs.append(output)
                async for delta in output:
                    if type(delta) is Finish:
                        check_finish(delta)
                return output

        tasks = [asyncio.ensure_future(run(request)) for request in requests]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            for output in outputs:
                output.cancel()

    async def place_experts(self) -> PlacementResult:
        """Redistribute experts over ranks by use; running requests continue."""
        self.check_ready()
        try:
            return await self.link.place_experts()
        except RankError as err:
            raise not_ready(str(err)) from err

    async def count_tokens(self, conversation: Conversation) -> int:
        """Return the number of tokens in a conversation's prompt."""
        return len(await self.tokenize(conversation))

    async def tokenize(self, conversation: Conversation, add_generation_prompt: bool = True) -> list[int]:
        """Return the tokens of a conversation's prompt."""
        self.limits.check(conversation)

        def encode() -> list[int]:
            images = self._images(conversation)
            return self._encode(self._render(conversation, add_generation_prompt), images)[0]

        return await asyncio.to_thread(encode)

    def _images(self, conversation: Conversation) -> list[PreparedImage]:
        """Decode the images of a conversation; refuse them if the model takes none."""
        return prepare_images(take_images(conversation.messages)[1], self.facts, self.limits.image_urls)

    def _encode(self, text: str, images: list[PreparedImage]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        """Return the tokens of a rendered conversation, and its images among them."""
        encode, processor = partial(self.tokenizer.encode, special=False), self.facts.images
        return encode_prompt(text, images, processor, encode) if images and processor is not None else (encode(text), ())

    def _prepare(
        self, conversation: Conversation
    ) -> tuple[tuple[int, ...], tuple[ImageSpan, ...], str, str | None, ThinkingBudget | None]:
        """Return the prompt's tokens and images, its end before the answer, the answer's grammar and thinking budget.

        Runs in a worker thread.
        """
        begun, pictures = "", self._images(conversation)
        if conversation.continue_final_message:
            reasoning, content = partial_reply(conversation)
            begun = content or reasoning
            text = self._render(replace(conversation, messages=conversation.messages[:-1]))
            text += self.syntax.reply_opening(text[-TAIL:], reasoning, content)
        else:
            text = self._render(conversation)
        # its first use renders a template, which would block the event loop
        _ = self.tokenizer.end_of_turn_ids
        tail = text[-TAIL:]
        grammar = grammar_for(conversation, self.syntax, tail, self.tokenizer)
        thinking = self._thinking_budget(conversation, tail)
        ids, images = self._encode(text + begun, pictures)
        return tuple(ids), images, tail, grammar, thinking

    def _thinking_budget(self, conversation: Conversation, tail: str) -> ThinkingBudget | None:
        """Return the limit of reasoning that a request sets, by tokens or, for a template without efforts, by its effort."""
        most, effort = conversation.thinking_budget, conversation.template_kwargs.get("reasoning_effort")
        if most is None and not any("reasoning_effort" in source for source in self.tokenizer.templates.values()):
            most = EFFORT_BUDGETS.get(effort) if isinstance(effort, str) else None
        if most is None:
            return None
        return self.syntax.thinking_budget(most, tail, partial(self.tokenizer.encode, special=False))

    def _render(self, conversation: Conversation, add_generation_prompt: bool = True) -> str:
        for name in RESERVED:
            if name in conversation.template_kwargs:
                raise InputError(f"chat_template_kwargs must not contain {name!r}: the server sets it.")
        tools, kwargs = _offered(conversation), conversation.template_kwargs
        first: TemplateError | None = None
        for messages in system_message_variants(take_images(conversation.messages)[0]):
            try:
                return self.tokenizer.apply_template(messages, add_generation_prompt, **kwargs, tools=tools)
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

    def _submit(
        self, requests: list[Request], count: int, make_parser: Callable[[], OutputParser], parallel: bool = True
    ) -> list[ChatOutput]:
        fitted = [self._fitted(request) for request in requests]
        outputs: list[ChatOutput] = []
        try:
            for request in fitted:
                for number in range(count):
                    outputs.append(self._start(_reseeded(request, number), make_parser(), parallel))
        except BaseException:
            for output in outputs:
                output.cancel()
            raise
        return outputs

    def _start(self, request: Request, parser: OutputParser, parallel: bool) -> ChatOutput:
        stream = self.link.submit(replace(request, adapter=self.adapter))
        output = ChatOutput(
            stream,
            parser,
            prompt_tokens=len(request.prompt),
            tally=self.tally,
            stop_token_ids=self.facts.eos_token_ids if request.stop_token_ids is None else request.stop_token_ids,
            parallel_tool_calls=parallel,
            scored_prompt=None if request.prompt_logprobs is None else request.prompt,
            on_end=self._on_end,
        )
        self.tally.prompt_tokens += len(request.prompt)
        self._outputs.add(output)
        self._idle.clear()
        if self.limits.deadline_s is not None:
            output.expire_in(self.limits.deadline_s)
        return output

    def _on_end(self, output: ChatOutput) -> None:
        self._outputs.discard(output)
        if not self._outputs:
            self._idle.set()

    def _fitted(self, request: Request) -> Request:
        """Check a request against the model's limits, and clamp max_tokens to the context length."""
        facts, length = self.facts, len(request.prompt)
        if not length:
            raise InputError("The prompt is empty; give it at least one token.")
        if request.pooling is not None and length > facts.context:
            raise ContextError(f"The input has {length} tokens; the context is limited to {facts.context}.")
        if request.pooling is None and length >= facts.context:
            raise ContextError(f"The prompt has {length} tokens; prompt and answer must fit into a context of {facts.context}.")
        for field, tokens in (("the prompt", request.prompt), ("logit_bias", request.sampling.logit_bias)):
            wrong = next((token for token in tokens if not 0 <= token < facts.vocab), None)
            if wrong is not None:
                raise InputError(f"Token id {wrong} in {field} is outside the model's vocabulary of {facts.vocab} tokens.")
        requested, room = request.sampling.max_tokens, facts.context - length
        if requested is None or requested <= room:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=room))


def _offered(conversation: Conversation) -> list[dict[str, Any]] | None:
    """Return the tools for the template; None if there are none, which templates test for."""
    return conversation.tools if conversation.tools and conversation.tool_choice != "none" else None


def _reseeded(request: Request, number: int) -> Request:
    """Derive a seed per answer, so that answers to one prompt differ."""
    seed = request.sampling.seed
    if seed is None or number == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) % (1 << 63)))
