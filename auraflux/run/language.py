"""`LanguageModel`: what `auraflux.load` gives. Text or tokens in, text or tokens or scores out."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from auraflux.errors import ContextError, InputError
from auraflux.run.engine import Engine
from auraflux.run.generate import Stats, write
from auraflux.run.sampling import Sampling
from auraflux.run.session import Session
from auraflux.run.stream import Stream
from auraflux.weights.expert_store import ExpertStore
from auraflux.weights.traffic import ExpertTraffic

Prompt = str | Sequence[int]
Message = dict[str, Any]


class LanguageModel:
    """A loaded model with its tokenizer and cache.

    path       where it came from
    tokenizer  None for a folder without one: such a model reads and writes tokens as numbers
    stats      of the last generation
    notes      what a user should know about how the weights were taken
    experts    of a packed model; its `traffic()` says what was read so far
    """

    def __init__(
        self,
        make_engine: Callable[[int], Engine],
        tokenizer: Any | None,
        path: Path,
        ends: frozenset[int],
        notes: list[str],
        experts: ExpertStore | None = None,
    ):
        self.make_engine, self.tokenizer, self.path, self.ends, self.notes = make_engine, tokenizer, path, ends, notes
        self.experts = experts
        # one sequence is kept between calls, one is for `logits`
        self.engine = make_engine(2)
        self.stats = Stats()
        self._session = Session(self.engine)

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self.engine.cache.context

    def logits(self, ids: Prompt) -> Tensor:
        """Score the token after each token of a text, reading the text through the cache: [T, V] float32."""
        tokens = self._ids(ids)
        sequence = self.engine.cache.open()
        try:
            return self.engine.all_scores(sequence, tokens)
        finally:
            sequence.close()

    def generate(self, prompt: Prompt, **sampling: Any) -> Iterator[str]:
        """Continue a prompt: pieces of text as they come. Settings are those of `Sampling`: max_tokens, temperature, ..."""
        return (piece for _, piece in self._write(self._ids(prompt), sampling) if piece)

    def tokens(self, prompt: Prompt, **sampling: Any) -> Iterator[int]:
        """Continue a prompt: tokens as they come."""
        return _tokens_of(self._write(self._ids(prompt), sampling))

    def chat(self, messages: Sequence[Message], **sampling: Any) -> Iterator[str]:
        """Answer the last of some messages ({"role": ..., "content": ...}): pieces of text as they come.

        What the cache still holds of the conversation is not computed again.
        """
        return (piece for _, piece in self._write(self.chat_ids(messages), sampling) if piece)

    def generate_batch(self, prompts: Sequence[Prompt], **sampling: Any) -> list[str]:
        """Continue several prompts together, each as if it were alone."""
        if not prompts:
            return []
        settings = _sampling(sampling)
        engine = self.make_engine(len(prompts))
        streams = [self._stream(engine.cache.open(), self._ids(prompt), settings) for prompt in prompts]
        texts = dict.fromkeys(streams, "")
        self.stats, before = Stats(), self._traffic()
        for stream, piece in write(engine, streams, self.stats):
            texts[stream] += piece
        self._measure(engine, before)
        return list(texts.values())

    def chat_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation up to where the answer begins."""
        tokenizer = self._need_tokenizer("a conversation")
        return self._checked(tokenizer.encode(tokenizer.apply_template(list(messages)), special=False))

    def reset(self) -> None:
        """Forget what earlier calls left in the cache."""
        self._session.reset()

    def _write(self, prompt: list[int], sampling: dict[str, Any]) -> Iterator[tuple[Stream, str]]:
        return self._written(prompt, _sampling(sampling))

    def _written(self, prompt: list[int], settings: Sampling) -> Iterator[tuple[Stream, str]]:
        session = self._session
        held = session.align(prompt)
        stream = session.writer = self._stream(session.sequence, prompt[held:], settings, prompt[:held])
        session.extend(stream.prompt)
        self.stats, before = Stats(reused_tokens=held), self._traffic()
        try:
            for found in write(self.engine, [stream], self.stats):
                yield found
                if session.writer is not stream:
                    raise InputError(
                        "the model was given another prompt, or reset, before this text was finished. Finish one first, or "
                        "use generate_batch."
                    )
        finally:
            if session.writer is stream:
                session.extend(stream.chosen)
                self._measure(self.engine, before)

    def _stream(self, sequence: Any, prompt: list[int], settings: Sampling, before: list[int] | None = None) -> Stream:
        room = self.context - len(prompt) - len(before or []) + 1
        limit = room if settings.max_tokens is None else min(settings.max_tokens, room)
        return Stream(sequence, prompt, settings, limit, self.ends, self.tokenizer, before)

    def _traffic(self) -> ExpertTraffic | None:
        return None if self.experts is None or self.experts.share.mapped else self.experts.traffic()

    def _measure(self, engine: Engine, before: ExpertTraffic | None) -> None:
        after = self._traffic()
        if after is not None and before is not None:
            self.stats.experts = after - before
        self.stats.cache_nbytes = engine.cache.nbytes
        self.stats.plain_nbytes = engine.cache.plain_nbytes

    def _ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self._checked(self._need_tokenizer("text").encode(prompt))
        return self._checked([int(token) for token in prompt])

    def _checked(self, ids: list[int]) -> list[int]:
        """The same tokens, if there are any, the model knows them and they fit."""
        if not ids:
            raise InputError("the prompt is empty: there is nothing to continue.")
        vocab = self.engine.model.config.vocab
        wrong = next((token for token in ids if not 0 <= token < vocab), None)
        if wrong is not None:
            raise InputError(f"token {wrong} is not in the model's vocabulary of {vocab}.")
        if len(ids) > self.context:
            raise ContextError(
                f"the prompt has {len(ids)} tokens, and the context is limited to {self.context}. "
                f"Load the model with context={len(ids) + 1} or more (--context), or shorten the prompt."
            )
        return ids

    def _need_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise InputError(f"{self.path} has no tokenizer files, so {what} cannot be read. Give a list of token ids.")
        return self.tokenizer


def _tokens_of(written: Iterator[tuple[Stream, str]]) -> Iterator[int]:
    count = 0
    for stream, _ in written:
        yield from stream.tokens[count:]
        count = len(stream.tokens)


def _sampling(given: dict[str, Any]) -> Sampling:
    known = [field.name for field in fields(Sampling)]
    strange = sorted(set(given) - set(known))
    if strange:
        raise InputError(f"there is no setting {', '.join(strange)}. Those there are: {', '.join(known)}.")
    return Sampling(**given)
