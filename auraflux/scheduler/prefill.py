"""Chunked prefill: which prompt chunks are next, which share a step, and which prefixes become available to others."""

from itertools import accumulate

from torch import Tensor

from auraflux.cache.prefix.prefix_cache import PrefixCache
from auraflux.engine.engine import Engine, padded_batch_size
from auraflux.scheduler.budget.prefill_budget import PrefillBudget
from auraflux.scheduler.prompt_logprobs import score_prompt
from auraflux.scheduler.sequence import Sequence
from auraflux.speculative.speculation import Speculation

ENCODE_PAUSE_S = 0.1  # by which encoding an image delays a decode step

PrefillChunk = tuple[Sequence, int]  # a sequence, and how many of its next prompt tokens


class PrefillRunner:
    """Computes prompt chunks.

    speculation  of speculative decoding, which learns from hidden states; None without
    """

    def __init__(self, engine: Engine, prefix_cache: PrefixCache, target_itl_s: float | None = None):
        self.engine, self.prefix_cache = engine, prefix_cache
        self.speculation: Speculation | None = None
        self.budget = PrefillBudget(engine.chunk, engine.device.type, target_itl_s)

    def next(self, running: list[Sequence], while_decoding: bool, ahead: bool = False) -> list[list[PrefillChunk]]:
        """Return the next chunks; those of one list share a step.

        ahead  tokens are on their way to the host, which a step of several chunks would delay
        """
        prefilling = [sequence for sequence in running if sequence.uncomputed > 0 and sequence.next_chunk]
        if not prefilling:
            if while_decoding:
                self.budget.costs.plan(padded_batch_size(len(running)), 0)
            return []
        if self.engine.cache.bidirectional:
            return [self._whole_prompts(prefilling)]
        decoding = len(running) - len(prefilling) if while_decoding else 0
        sizes = self.engine.mixed_chunk_sizes(decoding) if self.speculation is None else []
        uncomputed, one = sum(sequence.uncomputed for sequence in prefilling), bool(sizes)
        budget = self.budget.tokens(uncomputed, len(prefilling), decoding, sizes)
        if decoding == 0 and not ahead:
            budget = max(budget, self.budget.several_chunks(self._most_tokens(prefilling)))
        shares = self.budget.split([sequence.next_chunk for sequence in prefilling], budget, one)
        if decoding:
            self._plan(sum(shares), decoding, sizes)
        chunks = [(sequence, sequence.whole_images(share)) for sequence, share in zip(prefilling, shares, strict=True) if share]
        total = sum(count for _, count in chunks)
        separate = total > max(budget, self.engine.chunk) or self.engine.prefers_separate_steps(total)
        return [[each] for each in chunks] if separate else [chunks]

    def _plan(self, tokens: int, decoding: int, sizes: list[int]) -> None:
        """Note which step prompt tokens are computed in, so that its time is measured."""
        if self.budget.target is not None:
            self.budget.target.plan(tokens)
        # a chunk is padded to a size
        size = next((size for size in sizes if size >= tokens), None)
        if size is not None:
            self.budget.costs.plan(padded_batch_size(decoding), size)

    def _most_tokens(self, prefilling: list[Sequence]) -> int:
        """Return the most tokens of a step while nothing decodes."""
        if any(sequence.needs_hidden or sequence.images is not None for sequence in prefilling):
            return self.engine.chunk
        return self.engine.max_prefill_tokens([sequence.kv for sequence in prefilling])

    def _whole_prompts(self, prefilling: list[Sequence]) -> list[PrefillChunk]:
        """Return the first prompts that fit into a step, at least one."""
        totals = accumulate(sequence.uncomputed for sequence in prefilling)
        count = sum(total <= self.engine.chunk for total in totals)
        return [(sequence, sequence.uncomputed) for sequence in prefilling[: max(count, 1)]]

    def encode_images(self, running: list[Sequence], while_decoding: bool) -> None:
        """Encode the images that prompts wait for: all, or for `ENCODE_PAUSE_S` while sequences decode."""
        vision = self.engine.vision
        if vision is None:
            return
        pause_s = ENCODE_PAUSE_S if while_decoding and any(each.uncomputed <= 0 for each in running) else None
        for sequence in [each for each in running if each.images is not None]:
            images = sequence.images
            while images is not None and (number := images.next_unencoded(sequence.kv.length)) is not None:
                if (found := vision.encoder.encode(images.spans[number].image, pause_s)) is None:
                    return
                images.found[number] = found

    def decoded(self) -> None:
        """Note the end of a decode step."""
        self.budget.costs.decoded()
        if self.budget.target is not None:
            self.budget.target.decoded()

    def fits_mixed_batch(self, chunks: list[PrefillChunk], running: list[Sequence]) -> bool:
        """Return whether this chunk shares a mixed batch with the next decode step."""
        if self.speculation is not None or len(chunks) > 1 or chunks[0][0].needs_hidden:
            return False
        decoding = sum(sequence.uncomputed <= 0 for sequence in running)
        return all(self.engine.fit_mixed_chunk(decoding, tokens, tokens < sequence.next_chunk) for sequence, tokens in chunks)

    def completes_prompts(self, chunks: list[PrefillChunk], running: list[Sequence]) -> bool:
        """Return whether this step can return last-token logits: it ends all its prompts, and nothing else decodes."""
        tokens = sum(count + 1 for _, count in chunks)
        fits = tokens <= self.engine.chunk and not self.engine.prefers_separate_steps(tokens)
        alone = self.speculation is None and all(sequence.uncomputed for sequence in running)
        ends = all(sequence.uncomputed == count and not sequence.needs_hidden for sequence, count in chunks)
        return self.engine.supports_last_logits(len(chunks)) and fits and alone and ends

    def run(self, chunks: list[PrefillChunk]) -> None:
        """Compute prompt chunks in one step."""
        sequences, starts = [sequence for sequence, _ in chunks], [sequence.kv.length for sequence, _ in chunks]
        ids = [sequence.ids[at : at + count] for (sequence, count), at in zip(chunks, starts, strict=True)]
        with self.budget.measured(sum(count for _, count in chunks)):
            needed = any(sequence.needs_hidden for sequence in sequences)
            hidden = self.engine.prefill([sequence.kv for sequence in sequences], ids, hidden=needed)
            if needed or (self.speculation is not None and self.engine.returns_hidden):
                rows = list(zip(sequences, starts, hidden.split([count for _, count in chunks]), strict=True))
                self._observe(rows)
        for sequence in sequences:
            self.publish(sequence)

    def _observe(self, rows: list[tuple[Sequence, int, Tensor]]) -> None:
        """Use the hidden states of chunks: each with its sequence and the position of its first token."""
        for sequence, start, states in rows:
            if sequence.pooling is not None:
                sequence.pooling.add(states)
                if not sequence.uncomputed:
                    sequence.pooling.result = self._pooled(sequence, sequence.pooling.pooled(), states)
            elif sequence.scores_prompt:
                sequence.prompt_logprobs += score_prompt(self.engine, sequence.request, start, states)
        if self.speculation is not None and self.engine.returns_hidden:
            self.speculation.observe_hidden(rows)

    def _pooled(self, sequence: Sequence, pooled: Tensor, states: Tensor) -> Tensor:
        """Return the embedding of a prompt: logits of its labels, or its pooled hidden states after the Dense modules."""
        if sequence.request.labels:
            return self.engine.compute_logits(states[-1:])[0][list(sequence.request.labels)]
        for module in self.engine.dense_modules:
            pooled = module(pooled)
        return pooled

    def run_to_logits(self, sequences: list[Sequence]) -> Tensor:
        """Compute the rest of prompts including their last tokens; return the last-token logits, [B, V]."""
        ids = [sequence.ids[sequence.kv.length :] for sequence in sequences]
        logits = self.engine.prefill_last_logits([sequence.kv for sequence in sequences], ids)
        for sequence in sequences:
            self.publish(sequence, with_last=True)
        return logits

    def publish(self, sequence: Sequence, with_last: bool = False) -> None:
        """Make the computed prefix of a sequence available to other prompts, at checkpoints and at the end of its prompt.

        with_last  the last token of the prompt is computed too
        """
        if sequence.kv.length - with_last in sequence.checkpoint_lengths:
            sequence.kv.checkpoint(before=int(with_last))
        if sequence.uncomputed <= 0 and sequence.prefix_entry is None and sequence.pooling is None:
            sequence.prefix_entry = self.prefix_cache.insert_live(sequence.prefix_ids[:-1], sequence.kv)
