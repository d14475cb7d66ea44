"""`Sequence`: one running generation, from admission to its last output."""

import time
from collections.abc import Callable
from concurrent.futures import Future

from auraflux.cache import KVSequence, Snapshot
from auraflux.cache.prefix.prefix_cache import PrefixEntry
from auraflux.engine.request import Output, Request, RequestStats, TokenLogprob
from auraflux.scheduler.generation import Generation
from auraflux.scheduler.pooling import Pooling
from auraflux.speculative.draft_state import DraftState
from auraflux.vision.prompt_images import PromptImages
from auraflux.vision.span import prefix_ids


class Sequence:
    """The tokens of a request, their state and their KV pages.

    ids                 all known tokens: the prompt, then those generated
    generated           the generated tokens with their text, sampler state and finish reason
    kv_sequence         its pages in the cache; None while it is queued. It decodes once all tokens but the last are computed
    prefix_entry        lets other prompts branch from it
    checkpoint_lengths  lengths at which prefill makes a checkpoint, ascending
    adapter             number of the request's adapter; None without one
    cached_tokens       prompt tokens that the prefix cache had at first admission
    disk_checked        whether the prefixes on disk were searched
    disk_fetch          the prefix being read from disk
    cancelled           the client no longer wants it
    failure             the error that ended it
    draft_state         of speculative decoding; None without
    steps               decode steps so far
    draft_checkpoint    length of the checkpoint made for a verify step; None for none
    prompt_logprobs     of the computed prompt tokens, from the second on
    pooling             of a prompt that is embedded; a token after its last lets all its tokens be prefilled
    images              of its prompt; None without
    """

    def __init__(
        self,
        request: Request,
        generated: Generation,
        on_output: Callable[[Output], None],
        checkpoint_lengths: list[int],
        images: PromptImages | None = None,
        adapter: int | None = None,
    ):
        self.request, self.generated, self.on_output = request, generated, on_output
        self.checkpoint_lengths, self.images, self.adapter = checkpoint_lengths, images, adapter
        self.ids = list(request.prompt)
        self._prompt_ids = None if images is None else prefix_ids(request.prompt, images.spans)
        self.kv_sequence: KVSequence | None = None
        self.prefix_entry: PrefixEntry | None = None
        self.cached_tokens: int | None = None
        self.disk_checked = False
        self.disk_fetch: Future[Snapshot | None] | None = None
        self.cancelled = False
        self.failure: BaseException | None = None
        self.draft_state: DraftState | None = None
        self.steps = 0
        self.draft_checkpoint: int | None = None
        self.prompt_logprobs: list[TokenLogprob] = []
        self.pooling = None if request.pooling is None else Pooling(request.pooling)
        if self.pooling is not None:
            self.ids.append(self.ids[-1])
        self.arrived_at = time.perf_counter()
        self.started_at = self.first_token_at = 0.0
        self.finish_reason: str | None = None

    @property
    def kv(self) -> KVSequence:
        """Its pages in the cache, once it is admitted."""
        assert self.kv_sequence is not None, "the sequence is queued"
        return self.kv_sequence

    @property
    def uncomputed(self) -> int:
        """Tokens to prefill before it can decode."""
        return len(self.ids) - 1 - self.kv.length

    @property
    def scores_prompt(self) -> bool:
        """Return whether log probabilities of prompt tokens are still to be computed."""
        return self.request.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt) - 1

    @property
    def prefix_ids(self) -> list[int]:
        """All known tokens as the prefix cache knows them: those of images say which image."""
        return self.ids if self._prompt_ids is None else [*self._prompt_ids, *self.ids[len(self._prompt_ids) :]]

    @property
    def reusable_ids(self) -> list[int]:
        """The tokens whose KV may come from the prefix cache; none where their hidden states are needed."""
        return [] if self.needs_hidden else self.prefix_ids

    @property
    def needs_hidden(self) -> bool:
        """Return whether hidden states of prompt tokens are still to be computed."""
        return self.scores_prompt or self.pooling is not None

    def restart(self) -> None:
        """Forget what was found in hidden states, before the prompt is computed from its start."""
        if self.scores_prompt:
            self.prompt_logprobs.clear()
        if self.pooling is not None:
            self.pooling.reset()

    @property
    def next_chunk(self) -> int:
        """Tokens that one prefill chunk may have: up to the next checkpoint, or to an image that is not encoded."""
        at = self.kv.length
        end = next((length for length in self.checkpoint_lengths if length > at), len(self.ids))
        if self.images is not None and (ready := self.images.ready_until(at)) is not None:
            end = min(end, ready)
        return min(self.uncomputed, end - at)

    def whole_images(self, count: int) -> int:
        """Return how many of the next tokens a chunk of about `count` has, so that it divides no image that must be whole."""
        return count if self.images is None else self.images.chunk(self.kv.length, count)

    @property
    def room(self) -> int:
        """Tokens that may follow the next one."""
        return self.generated.limit - len(self.generated.tokens) - 1

    def append(self, token: int, logprob: TokenLogprob | None) -> None:
        """Append a sampled token and emit the output it completes."""
        scored: tuple[TokenLogprob, ...] = ()
        if not self.generated.tokens and not self.first_token_at:
            self.first_token_at = time.perf_counter()
            scored = tuple(self.prompt_logprobs)
        text = self.generated.append(token)
        self.ids.append(token)
        logprobs = () if logprob is None else (logprob,)
        if self.generated.finish_reason is None:
            self.on_output(Output(text, (token,), logprobs, prompt_logprobs=scored))
        else:
            self.finish(self.generated.finish_reason, text, (token,), logprobs, scored)

    def finish(
        self,
        reason: str,
        text: str = "",
        tokens: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
        scored: tuple[TokenLogprob, ...] = (),
    ) -> None:
        """Emit the last output."""
        self.finish_reason = reason
        error = None if self.failure is None else str(self.failure)
        embedding = b"" if self.pooling is None or reason != "stop" else self.pooling.vector()
        stop_string = self.generated.stop_string
        self.on_output(Output(text, tokens, logprobs, reason, stop_string, error, self.stats(), scored, embedding))

    def stats(self) -> RequestStats:
        """Return the statistics so far."""
        now = time.perf_counter()
        kv, draft = self.kv_sequence, self.draft_state
        return RequestStats(
            prompt_tokens=len(self.request.prompt),
            cached_tokens=self.cached_tokens or 0,
            tokens=0 if self.pooling is not None else len(self.ids) - len(self.request.prompt),
            queue_s=(self.started_at or now) - self.arrived_at,
            ttft_s=(self.first_token_at or now) - self.arrived_at,
            total_s=now - self.arrived_at,
            cache_nbytes=0 if kv is None else kv.used_nbytes,
            allocated_nbytes=0 if kv is None else kv.nbytes,
            full_precision_nbytes=0 if kv is None else kv.full_precision_nbytes,
            uncompressed_nbytes=0 if kv is None else kv.uncompressed_nbytes,
            steps=self.steps,
            drafted=0 if draft is None else draft.drafted,
            accepted=0 if draft is None else draft.accepted,
        )
