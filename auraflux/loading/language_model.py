"""`LanguageModel`, which `auraflux.load` returns: text or tokens in; text, tokens or logits out."""

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from auraflux.adapters.loaded import adapter_number
from auraflux.engine.request import Output, Request, RequestStats, check_generates
from auraflux.engine.sampling import DefaultSampling, Sampling
from auraflux.errors import InputError, SettingsError
from auraflux.scheduler.scheduler import Scheduler
from auraflux.scheduler.sequence import Sequence as RunningSequence
from auraflux.scheduler.stats import Stats
from auraflux.vision.messages import open_image, take_images
from auraflux.vision.processor import encode_prompt
from auraflux.vision.span import ImageSpan
from auraflux.weights.experts.pool.gpu_pool import GpuExpertPool
from auraflux.weights.experts.stats import ExpertCacheStatsByLayer
from auraflux.weights.experts.store import ExpertStore
from auraflux.weights.formats.embedding import Embedding, usable_embedding
from auraflux.weights.parallel.expert_placement import PlacementResult

Prompt = str | Sequence[int]
Message = dict[str, Any]


class LanguageModel:
    """A loaded model with its tokenizer and KV cache. Threads may share it; their sequences decode in one batch.

    path        of the checkpoint
    model_type  family of the model
    tokenizer   None for a folder without one: prompts and outputs are then token ids
    scheduler   of all sequences
    stats       of the last generation
    notes       remarks for the user on how the weights were loaded
    experts     store or pool of experts that are not all on the device; its `cache_stats()` counts hits, misses and bytes
    default_sampling  settings of generations that leave them out
    vision      takes images; None for a model that takes text only
    no_images   why it takes no images
    embedding   how it embeds inputs; None for a model whose files do not say
    """

    def __init__(
        self,
        scheduler: Scheduler,
        path: Path,
        notes: list[str],
        experts: ExpertStore | GpuExpertPool | None = None,
        *,
        model_type: str = "",
        default_sampling: DefaultSampling | None = None,
        no_images: str = "",
        embedding: Embedding | None = None,
    ):
        self.scheduler, self.engine, self.tokenizer = scheduler, scheduler.engine, scheduler.builder.tokenizer
        self.path, self.notes, self.experts, self.model_type = path, notes, experts, model_type
        self.default_sampling = default_sampling or DefaultSampling()
        self.vision, self.no_images, self.embedding = self.engine.vision, no_images, embedding
        self.stats = Stats()

    @property
    def context(self) -> int:
        """Maximum tokens of a prompt and its continuation together."""
        return self.engine.cache.context

    @property
    def generates(self) -> bool:
        """Return whether the model generates text; one with bidirectional attention embeds inputs only."""
        return not self.engine.cache.bidirectional

    def embed(self, inputs: Sequence[Prompt], prompt_name: str | None = None, dimensions: int | None = None) -> np.ndarray:
        """Embed inputs in one batch, [N, D] float32; refuse a model that is not made for it, see docs/serving.md.

        prompt_name  of the model's prompts, which precedes each text; by default the model's default one
        dimensions   of the embeddings; by default all
        """
        settings = usable_embedding(self.embedding, self.path.name)
        prompt = settings.prompt(prompt_name)
        ids = [self._ids(prompt + each if isinstance(each, str) else each) for each in inputs]
        outputs = self._finished([Request(tuple(each), pooling=settings.pooling) for each in ids])
        return settings.vectors([output[-1].embedding for output in outputs], dimensions)

    def logits(self, ids: Prompt, adapter: str | None = None) -> Tensor:
        """Return the logits after each token of a prompt, computed through the KV cache: [T, V] float32."""
        tokens = self._ids(ids)
        self.scheduler.check(Request(tuple(tokens), adapter=adapter))
        with self.scheduler.exclusive():
            sequence = self.engine.cache.open()
            sequence.adapter = adapter_number(self.engine.adapters, adapter)
            try:
                return self.engine.all_logits(sequence, tokens)
            finally:
                sequence.close()

    def generate(self, prompt: Prompt, **sampling: Any) -> Iterator[str]:
        """Continue a prompt and stream text. `sampling` takes the fields of `Sampling`: max_tokens, temperature, ...

        Settings that are left out are those of `default_sampling`; temperature=0 is greedy. adapter="name" uses an adapter of
        the model, here and in the other methods.
        """
        outputs = self._stream(self._ids(prompt), sampling)
        return (output.text for _, output in outputs if output.text)

    def tokens(self, prompt: Prompt, **sampling: Any) -> Iterator[int]:
        """Continue a prompt and stream token ids."""
        return _tokens_of(self._stream(self._ids(prompt), sampling))

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Iterator[str]:
        """Reply to a conversation ({"role": ..., "content": ...}) and stream text; its cached prefix is reused.

        Content is text, or parts: {"type": "text", "text": ...} and {"type": "image", "image": a path, bytes or PIL image}.
        """
        outputs = self._run(self._chat_request(messages, sampling))
        return (output.text for _, output in outputs if output.text)

    def generate_batch(self, prompts: Sequence[Prompt], **sampling: Any) -> list[str]:
        """Continue several prompts in one batch."""
        return self._run_batch([self._request(self._ids(prompt), sampling) for prompt in prompts])

    def chat_batch(self, conversations: Sequence[Sequence[Message]], **sampling: Any) -> list[str]:
        """Reply to several conversations in one batch."""
        return self._run_batch([self._chat_request(messages, sampling) for messages in conversations])

    def _run_batch(self, requests: list[Request]) -> list[str]:
        return ["".join(output.text for output in each) for each in self._finished(requests)]

    def _finished(self, requests: list[Request]) -> list[list[Output]]:
        """Return the outputs of each request once all have finished."""
        self.stats, before = Stats(), self._traffic()
        outputs: list[list[Output]] = [[] for _ in requests]
        sequences = [self.scheduler.submit(request, each.append) for request, each in zip(requests, outputs, strict=True)]
        try:
            for sequence in sequences:
                self.scheduler.wait(lambda sequence=sequence: sequence.finish_reason is not None)  # type: ignore[misc]
                _raise_failure(sequence)
        finally:
            for sequence in sequences:
                self.scheduler.cancel(sequence)
        if sequences:
            self._measure(self.stats, [_stats_of(each[-1]) for each in outputs], before)
            self.stats.finish_reasons = tuple(_finish_reason(each[-1]) for each in outputs)
        return outputs

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """Render and encode a conversation up to the beginning of the reply."""
        return self._chat_prompt(messages)[0]

    def _chat_prompt(self, messages: Sequence[Message]) -> tuple[list[int], tuple[ImageSpan, ...]]:
        tokenizer = self._need_tokenizer("a conversation")
        messages, images = take_images(messages)
        if images and self.vision is None:
            raise InputError(f"{self.path.name} takes no images: {self.no_images}.")
        prompt, encode = tokenizer.apply_template(messages), partial(tokenizer.encode, special=False)
        if self.vision is None or not images:
            return encode(prompt), ()
        processor = self.vision.processor
        return encode_prompt(prompt, [processor.prepare(open_image(image)) for image in images], processor, encode)

    def reset(self) -> None:
        """Clear the prefix cache."""
        with self.scheduler.exclusive():
            self.scheduler.prefix_cache.clear()

    def place_experts(self) -> PlacementResult:
        """Redistribute experts over ranks by how often each was chosen, between two steps; running sequences continue."""
        if self.engine.ranks is None:
            raise SettingsError("the model runs in one process: there are no ranks to place experts on.")
        with self.scheduler.exclusive():
            return self.engine.ranks.place_experts()

    def _stream(self, prompt: list[int], sampling: dict[str, Any]) -> Iterator[tuple[RunningSequence, Output]]:
        return self._run(self._request(prompt, sampling))

    def _run(self, request: Request) -> Iterator[tuple[RunningSequence, Output]]:
        stats, before, outputs = Stats(), self._traffic(), deque[Output]()
        self.stats = stats
        sequence = self.scheduler.submit(request, outputs.append)
        try:
            while sequence.finish_reason is None or outputs:
                self.scheduler.wait(lambda: bool(outputs))
                output = outputs.popleft()
                if output.stats is not None:
                    self._measure(stats, [output.stats], before)
                    stats.finish_reasons = (_finish_reason(output),)
                    _raise_failure(sequence)
                yield sequence, output
        finally:
            # an interrupt, or a caller that takes no more
            if sequence.finish_reason is None:
                self._measure(stats, [sequence.stats()], before)
                stats.finish_reasons = ("cancelled",)
            self.scheduler.cancel(sequence)

    def _request(
        self,
        prompt: list[int],
        sampling: dict[str, Any],
        ends: frozenset[int] | None = None,
        images: tuple[ImageSpan, ...] = (),
    ) -> Request:
        """Build a request that the scheduler will admit; `sampling` may name an adapter."""
        settings = {name: value for name, value in sampling.items() if name != "adapter"}
        chosen = self._sampling(settings)
        request = Request(tuple(prompt), chosen, stop_token_ids=ends, images=images, adapter=sampling.get("adapter"))
        self.scheduler.check(request)
        return request

    def _chat_request(self, messages: Sequence[Message], sampling: dict[str, Any]) -> Request:
        """Build a request that also stops at the template's end-of-turn token."""
        check_generates(self.generates)
        prompt, images = self._chat_prompt(messages)
        ends = self.scheduler.builder.stop_token_ids | self._need_tokenizer("a conversation").end_of_turn_ids
        return self._request(prompt, sampling, ends, images)

    def _sampling(self, given: dict[str, Any]) -> Sampling:
        known = [field.name for field in fields(Sampling)]
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise InputError(f"unknown sampling settings: {', '.join(unknown)}. Known: {', '.join(known)}.")
        return self.default_sampling.sampling(**given)

    def _traffic(self) -> ExpertCacheStatsByLayer | None:
        return None if self.experts is None or self.experts.resident else self.experts.cache_stats()

    def _measure(self, stats: Stats, requests: list[RequestStats], before: ExpertCacheStatsByLayer | None) -> None:
        stats.set(requests)
        stats.invariant = self.engine.runner.invariant
        after = self._traffic()
        if after is not None and before is not None:
            stats.experts = after - before

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._need_tokenizer("a string").encode(prompt)
        return _token_ids(prompt)

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InputError(f"{self.path} has no tokenizer files, so {what} cannot be tokenized. Give a list of token ids.")
        return self.tokenizer


def _token_ids(prompt: Any) -> list[int]:
    """Convert a sequence of integers of any type to a list of int."""
    try:
        if isinstance(prompt, bytes | bytearray | memoryview):
            raise TypeError
        tokens = list(prompt)
        if any(isinstance(token, bool) for token in tokens):
            raise TypeError
        return [operator.index(token) for token in tokens]
    except TypeError as err:
        raise InputError(f"a prompt must be a string or a list of token ids, not {prompt!r:.80}.") from err


def _tokens_of(outputs: Iterator[tuple[RunningSequence, Output]]) -> Iterator[int]:
    count = 0
    for sequence, _ in outputs:
        new = sequence.generated.tokens[count:]
        count += len(new)
        yield from new


def _stats_of(output: Output) -> RequestStats:
    assert output.stats is not None, "the last output carries the request's statistics"
    return output.stats


def _finish_reason(output: Output) -> str:
    return str(output.finish_reason) if output.stop_string is None else "stop_string"


def _raise_failure(sequence: RunningSequence) -> None:
    if sequence.failure is not None:
        raise sequence.failure
