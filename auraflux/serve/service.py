"""The service behind every API: conversations and prompts in, streams of deltas out."""

import asyncio
import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from functools import partial

from starlette.requests import Request as HttpRequest

from auraflux.engine.request import Request, check_generates
from auraflux.engine.sampling import Sampling
from auraflux.errors import RankError
from auraflux.serve.chat.conversation import Conversation, Format
from auraflux.serve.chat.deltas import Finish
from auraflux.serve.chat.output import ChatOutput, OutputParser, PlainTextParser
from auraflux.serve.chat.prompts import Prompts, offered_tools
from auraflux.serve.failures import Failure, check_finish, not_ready
from auraflux.serve.keep_alive import parse_keep_alive
from auraflux.serve.limits import Limits, at_most
from auraflux.serve.listing import KeepAlive, Listing
from auraflux.serve.metrics import Metrics, ModelMetrics, Tally
from auraflux.serve.transport.link import Link
from auraflux.serve.transport.model_names import adapter_of, is_model
from auraflux.weights.parallel.expert_placement import PlacementResult

# for cancelled sequences to end
STOP_S = 2.0


class Service:
    """Access to the model over a link, within limits.

    aliases   other names of the model
    adapter   of its requests; None for the model alone
    draining  whether the server is stopping: running requests finish, new ones are refused
    created   start time, in seconds since 1970
    """

    def __init__(self, link: Link, limits: Limits | None = None, *, aliases: tuple[str, ...] = (), tally: Tally | None = None):
        self.link, self.limits, self.aliases = link, limits or Limits(), aliases
        self.prompts = Prompts(link, self.limits.image_urls)
        self.adapter: str | None = None
        self.tally = tally or Tally()
        self.metrics = Metrics(lambda: [ModelMetrics(link.facts.name if link.facts else "", self.tally, link.gauges)])
        self.draining, self.created = False, int(time.time())
        self._outputs: set[ChatOutput] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def active(self) -> int:
        """Number of running answers."""
        return len(self._outputs)

    def check_ready(self) -> None:
        """Raise Failure 503 while requests cannot be served."""
        if self.draining:
            raise not_ready("The server is stopping.")
        _ = self.prompts.facts

    def check_model(self, name: str | None) -> None:
        """Raise Failure 404 if `name` is another model; None stands for the served one."""
        facts = self.prompts.facts
        if name and not self.serves(name):
            adapters = f", with the adapters {', '.join(facts.adapters)}" if facts.adapters else ""
            message = f"The model {name!r} is not served here. The served model: {facts.name}{adapters}."
            raise Failure(404, message, code="model_not_found", param="model")

    def serves(self, name: str) -> bool:
        """Return whether `name` is the served model's or one of its adapters'."""
        facts = self.prompts.facts
        return is_model(facts, self.aliases, name) or adapter_of(facts, self.aliases, name) is not None

    def for_model(self, name: str | None) -> "Service":
        """Return the service whose requests use the adapter that a name of a model gives."""
        if (adapter := adapter_of(self.prompts.facts, self.aliases, name)) is None:
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
        return Listing.of(self.prompts.facts, self.link.tokenizer, self.aliases)

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
        check_generates(self.prompts.facts.generates)
        self.limits.check(conversation)
        prompt = await asyncio.to_thread(self.prompts.chat, conversation)
        tools, resumed = offered_tools(conversation), conversation.continue_final_message

        def parser() -> OutputParser:
            return self.prompts.syntax.parser(prompt.tail, tools, resumed=resumed)

        return self._submit([prompt.request], conversation.count, parser, conversation.parallel_tool_calls)

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
        check_generates(self.prompts.facts.generates)
        self.limits.check_sampling(sampling, format, count)
        build = partial(self.prompts.completions, format=format, user=user, prompt_logprobs=prompt_logprobs, suffix=suffix)
        return self._submit(await asyncio.to_thread(build, prompts, sampling), count, PlainTextParser)

    async def embed(
        self, inputs: Sequence[str | Sequence[int]], *, user: str, prompt_name: str | None = None, truncate: bool = False
    ) -> list[ChatOutput]:
        """Return the finished outputs of inputs, with their embeddings before normalization.

        prompt_name  of the model's prompts, which precedes each text; None for the default one
        truncate     whether inputs that exceed the context are cut
        """
        self.check_ready()
        # a model without embeddings refuses before the inputs are counted
        _ = self.prompts.embedding
        at_most("input", len(inputs), self.limits.embeddings)
        build = partial(self.prompts.embeddings, user=user, prompt_name=prompt_name, truncate=truncate)
        return await self.pool(await asyncio.to_thread(build, inputs))

    async def pool(self, requests: Sequence[Request]) -> list[ChatOutput]:
        """Return the finished outputs of requests with `pooling`."""
        outputs: list[ChatOutput] = []
        # more would fill the queue
        free = asyncio.Semaphore(self.prompts.facts.max_sequences)

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
        return await asyncio.to_thread(self.prompts.tokens, conversation, add_generation_prompt)

    def _submit(
        self, requests: list[Request], count: int, make_parser: Callable[[], OutputParser], parallel: bool = True
    ) -> list[ChatOutput]:
        outputs: list[ChatOutput] = []
        try:
            for request in requests:
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
            stop_token_ids=self.prompts.facts.eos_token_ids if request.stop_token_ids is None else request.stop_token_ids,
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


def _reseeded(request: Request, number: int) -> Request:
    """Derive a seed per answer, so that answers to one prompt differ."""
    seed = request.sampling.seed
    if seed is None or number == 0:
        return request
    return replace(request, sampling=replace(request.sampling, seed=(seed + number) % (1 << 63)))
