"""A batch: the sequences of one step, and the protocols of the layers that read it."""

from collections.abc import Callable
from enum import Enum
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from auraflux.cache.kv_sequence import CacheGroup, KVSequence, SequenceState
from auraflux.cache.pages import LayerGroup
from auraflux.cache.step_index import EmbeddingBuffers, Embeddings, StepIndex
from auraflux.errors import CacheFull, ContextError, InputError
from auraflux.ops.rope.reference import norm_rope


class Logits(Enum):
    """Tokens of a step that need logits; the last layer only appends the others to the cache.

    ALL     every token
    LAST    the last token of each sequence
    NONE    no token
    DECODE  those of a mixed batch's decode part
    """

    ALL = "all"
    LAST = "last"
    NONE = "none"
    DECODE = "decode"


class Layer(Protocol):
    """The cache of one layer. Recurrent layers also have `convolve`, `update` and `step`.

    group                 owner of its pages or slots
    token_nbytes          bytes of one token
    full_precision_nbytes bytes of a sequence's sink and recent tokens, stored in addition to their codes
    """

    group: Any
    token_nbytes: int
    full_precision_nbytes: int = 0

    def nbytes_at(self, length: int) -> int:
        """Return the bytes of a sequence of `length` tokens, recurrent states excluded."""
        return self.token_nbytes * self.group.resident_tokens(length)

    def view(self, batch: "Batch") -> Any:
        """Return the pages or slots that the layer's ops take; computed once for each index of a batch."""


class Rotation(Protocol):
    """RoPE parameters of queries and keys, see `norm_rope`."""

    @property
    def frequencies(self) -> Tensor: ...

    @property
    def mscale(self) -> float: ...

    @property
    def interleaved(self) -> bool: ...


class AttentionLayer(Layer, Protocol):
    """A layer that stores keys and values."""

    group: LayerGroup

    def append(self, batch: "Batch", k: Tensor, v: Tensor) -> None:
        """Store the keys and values of the batch's new tokens: [T, Hkv, D] and [T, Hkv, Dv]."""

    def rope_append(
        self,
        batch: "Batch",
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rotation: Rotation,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
    ) -> Tensor:
        """Normalise and rotate queries and keys, then store keys and values; return the queries [T, Hq, D]."""
        q, k = norm_rope(q, k, rotation.frequencies, batch.positions, norms, eps, rotation.mscale, rotation.interleaved)
        self.append(batch, k, v)
        return q

    def attend(
        self, batch: "Batch", q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, Dv]."""

    def rope_append_attend(
        self,
        batch: "Batch",
        rows: tuple[Tensor, Tensor, Tensor],
        rotation: Rotation,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        scale: float,
        sinks: Tensor | None,
        softcap: float | None,
    ) -> Tensor:
        """Append the queries, keys and values `rows` as `rope_append` does, then attend."""
        return self.attend(batch, self.rope_append(batch, *rows, rotation, norms, eps), scale, sinks, softcap)


class Batch:
    """Sequences that run their steps together. Make it once and use it for as long as its sequences stay the same.

    index              tensors that kernels read about the step
    positions          [T]  int32, RoPE position of each new token; [T, R/2] for images with multimodal RoPE
    counts             new tokens of each sequence
    single             each sequence has one new token, which is a token of the vocabulary
    logits             which new tokens need logits
    embeddings         of images among the new tokens; None for none
    pieces             the step divided at multiples of a chunk size, by that size, see `ChunkedLayer`
    all_ends           see `ends`, of layers without a window and of those with one
    padding_sequences  dummy sequences after the others in a single-token step: pads the batch to a captured size
    padding            padding tokens at the end of a single sequence's step, which pad it to a captured size; None if it is
                       not padded. No token attends to them, and `drop_padding` removes them
    """

    index: StepIndex

    def __init__(
        self,
        sequences: list[KVSequence],
        context: int,
        find_index: Callable[[int, int], StepIndex],
        evict: Callable[[CacheGroup], bool],
        expected: int = 0,
        padding_sequences: int = 0,
        logits: Logits = Logits.ALL,
    ):
        if not sequences or len(set(sequences)) < len(sequences):
            raise InputError(f"a batch needs at least one sequence and each only once; it was given {len(sequences)}.")
        self.sequences, self.context, self.padding_sequences, self.logits = sequences, context, padding_sequences, logits
        self.single = False
        self.padding: int | None = None
        self.counts: list[int] = []
        self._padding_mask: Tensor | None = None
        self.embeddings: Embeddings | EmbeddingBuffers | None = None
        self.all_ends: list[Tensor | None] = [None, None]
        self._find_index, self._evict, self._expected = find_index, evict, expected
        self._views: dict[Layer, Any] = {}
        self.pieces: dict[int, Any] = {}
        self._use_index(max(sequence.length for sequence in sequences))

    @property
    def lengths(self) -> Tensor:
        return self.index.lengths

    @property
    def starts(self) -> Tensor:
        return self.index.starts

    @property
    def length_bucket(self) -> int:
        """Tokens of a sequence that the index has room for."""
        return self.index.length_bucket

    @property
    def tokens(self) -> int:
        """Number of tokens of the step, padding sequences included."""
        return sum(self.counts) + self.padding_sequences

    @property
    def has_inputs(self) -> bool:
        """Return whether a sequence has images, anywhere in its prompt."""
        return any(sequence.inputs is not None for sequence in self.sequences)

    @property
    def adapters(self) -> list[int] | None:
        """The adapter of each sequence, -1 for none, padding sequences included; None where no sequence has one."""
        if all(sequence.adapter is None for sequence in self.sequences):
            return None
        return [-1 if s.adapter is None else s.adapter for s in self.sequences] + [-1] * self.padding_sequences

    def map_parts(self, run: Callable[..., Any], *rows: Tensor | None) -> Any:
        """Call `run` once with the batch and all rows; `MixedBatch` calls it once per part."""
        return run(self, *rows)

    def append_only(self, x: Tensor, delta: Tensor | None) -> "tuple[Tensor, Tensor | None, Batch]":
        """Return the tokens that the last layer appends to the cache without computing its output, and their rows."""
        return x, delta, self

    def with_logits(self, x: Tensor, delta: Tensor | None) -> "tuple[Tensor, Tensor | None, Batch] | None":
        """Return the tokens that need logits as a step, and their rows; None where no token does."""
        if self.logits is Logits.NONE:
            return None
        last = self._select_last_tokens()
        return x[last], None if delta is None else delta[last], self

    @property
    def slots(self) -> tuple[int, ...]:
        """Recurrent-state slots of the sequences; empty where the model has no recurrent layers."""
        return tuple(
            state.slot for sequence in self.sequences for state in sequence.group_states.values() if state.slot is not None
        )

    @property
    def padding_mask(self) -> Tensor:
        """1 for padding tokens, 0 for all others: [T, 1] float32."""
        if self._padding_mask is None:
            rows = torch.arange(len(self.positions), device=self.positions.device)
            self._padding_mask = (rows >= self.index.padding_starts[1]).float().unsqueeze(1)
        return self._padding_mask

    def put_embeddings(self, x: Tensor) -> Tensor:
        """Put the embeddings of images in place of those of their tokens: [T, H]."""
        return x if self.embeddings is None else self.embeddings.put(x)

    def drop_padding(self) -> None:
        """Remove the padding tokens of a finished step from their sequence."""
        if self.padding:
            self.sequences[0].drop_padding(self.padding)
        self.padding = None

    def roll_back(self, lengths: list[int]) -> None:
        """Remove the tokens of a failed step: truncate each sequence to its length before."""
        for sequence, length in zip(self.sequences, lengths, strict=True):
            if sequence.length > length:
                sequence.truncate(length)

    def extend(self, counts: list[int], padding: int | None = None) -> None:
        """Allocate `counts` new tokens per sequence, all or nothing; every layer must then append them.

        padding  how many of a single sequence's new tokens are padding; None for a step that is not padded
        """
        self.prepare(counts)
        for group in self.sequences[0].group_states:
            self.reserve_pages(group, self.extensions(group, counts))
        self.allocate(counts, padding)

    def reserve(self, counts: list[int]) -> None:
        """Make sure of pages for `counts` new tokens per sequence in layers that store all tokens; change no sequence."""
        self.prepare(counts)
        for group in self.sequences[0].group_states:
            if group.grows:
                self.reserve_pages(group, self.extensions(group, counts))

    def extensions(self, group: CacheGroup, counts: list[int]) -> list[tuple[SequenceState, int, int]]:
        """Return the state in a group, the length and the new tokens of each sequence that grows."""
        return [(s.group_states[group], s.length, new) for s, new in zip(self.sequences, counts, strict=True) if new]

    def allocate(self, counts: list[int], padding: int | None) -> None:
        """Extend the sequences as `extend` does, after `reserve_pages` made sure that there are pages."""
        # padding may reach into an image that is not encoded yet
        self.embeddings = self._new_embeddings([new - (padding or 0) for new in counts])
        for sequence, new in zip(self.sequences, counts, strict=True):
            for state in sequence.group_states.values():
                state.extend(sequence.length, new)
            sequence.length += new
        self.counts, self.padding = counts, padding
        self.single = all(new == 1 for new in counts) and self.embeddings is None
        self._write(counts)

    def _new_embeddings(self, counts: list[int]) -> Embeddings | None:
        """Return the embeddings of the images among the new tokens."""
        made: list[Embeddings] = []
        for start, sequence, new in zip([0, *accumulate(counts)], self.sequences, counts, strict=False):
            inputs = sequence.inputs
            if inputs is not None and (found := inputs.embeddings(sequence.length, sequence.length + new)) is not None:
                made.append(Embeddings(torch.from_numpy(found[0] + start), found[1]))
        return Embeddings.joined(made)

    def _write(self, counts: list[int]) -> None:
        """Write the step to the index."""
        lengths = [sequence.length for sequence in self.sequences]
        self._use_index(max(lengths))
        self.pieces = {}
        spans = [range(length - new, length) for length, new in zip(lengths, counts, strict=True)]
        each = zip(self.sequences, spans, strict=True)
        positions = [sequence.position(span[0]) for sequence, span in each] if self.single else []
        if self.padding_sequences:
            assert self.single, "only steps of one token per sequence are padded with sequences"
            zeros = [0] * self.padding_sequences
            ones = [1] * self.padding_sequences
            lengths, counts, positions = lengths + ones, counts + ones, positions + zeros
        self.index.write(lengths, [0, *accumulate(counts)], positions, self.padding or 0)
        self._padding_mask = None
        if self.single:
            self.positions = self.index.positions
        else:
            padding = self.padding or 0
            numbers = [
                sequence.positions(span.start, span.stop, padding) for sequence, span in zip(self.sequences, spans, strict=True)
            ]
            self.positions = torch.from_numpy(_concatenated(numbers)).to(self.index.device, non_blocking=True)
        self.all_ends = [self._find_ends(spans, windowed) for windowed in (False, True)]
        for group in self.sequences[0].group_states:
            states = self.states(group)
            padded = states + [group.padding_state] * self.padding_sequences if self.padding_sequences else states
            group.update_index(self.index, padded)

    def _find_ends(self, spans: list[range], windowed: bool) -> Tensor | None:
        # a step in which tokens attend ahead is not padded
        known = [range(span.start, span.stop - (self.padding or 0)) for span in spans]
        found = [each.inputs and each.inputs.ends(span, windowed) for each, span in zip(self.sequences, known, strict=True)]
        if self.single or all(each is None for each in found):
            return None
        usual = [np.arange(span.start + 1, span.stop + 1, dtype=np.int32) for span in spans]
        made = np.concatenate([own if each is None else each for own, each in zip(usual, found, strict=True)])
        return torch.from_numpy(made).to(self.index.device, non_blocking=True)

    def ends(self, group: LayerGroup) -> Tensor | None:
        """Return the position before which each new token attends in a group, int32 [T]; None for the one after its own."""
        return self.all_ends[group.span is not None]

    def _select_last_tokens(self) -> Tensor:
        """Reduce the step to the last token of each sequence; return the rows that these tokens had, [B]."""
        rows = np.cumsum(self.counts) - 1
        self.counts, self.single = [1] * len(self.sequences), True
        self._write(self.counts)
        return torch.from_numpy(rows).to(self.index.device, non_blocking=True)

    def index_for(self, new: int) -> StepIndex:
        """Return the index of a step that gives each sequence `new` tokens."""
        return self._find_bucket(max(sequence.length for sequence in self.sequences) + new)

    def _find_bucket(self, longest: int) -> StepIndex:
        """Return the index whose length bucket holds `longest` tokens, or the expected length if that is more."""
        return self._find_index(len(self.sequences) + self.padding_sequences, max(longest, self._expected))

    def _use_index(self, longest: int) -> None:
        found = self._find_bucket(longest)
        if getattr(self, "index", None) is not found:
            self.index, self._views = found, {}

    def prepare(self, counts: list[int]) -> None:
        """Refuse new tokens past the context limit; save the checkpoints that are due."""
        if len(counts) != len(self.sequences) or min(counts) < 0:
            raise InputError(
                f"{counts} new tokens do not match {len(self.sequences)} sequences: one count of at least 0 is needed for each."
            )
        for sequence, new in zip(self.sequences, counts, strict=True):
            sequence.check_open()
            if sequence.length + new > self.context:
                raise ContextError(
                    f"a sequence of {sequence.length} tokens cannot take {new} more: the context is limited to {self.context}. "
                    f"Make the cache with context={sequence.length + new} or more."
                )
        for sequence in self.sequences:
            sequence.checkpoint_at_stride()

    def reserve_pages(self, group: CacheGroup, extensions: list[tuple[SequenceState, int, int]]) -> None:
        """Make sure that a group has free pages for a step; evict prefix entries and checkpoints if it has not."""
        for state, length, _ in extensions:
            state.release_expired(length)
        while (needed := group.pages_needed(extensions)) > group.free:
            if not group.release_expired() and not self._evict(group):
                tokens = sum(new for *_, new in extensions)
                raise CacheFull(
                    f"{tokens} new tokens need {needed} {group.describe()}, and {group.free} are free. Close a sequence, "
                    f"append fewer tokens at a time, or make the cache with more 'sequences' or 'tokens'."
                )

    def states(self, group: CacheGroup) -> list[Any]:
        """Return the state of each sequence in a group."""
        return [sequence.group_states[group] for sequence in self.sequences]

    def view(self, layer: Layer) -> Any:
        """Return `layer.view` for the present index, computed once."""
        try:
            return self._views[layer]
        except KeyError:
            self._views[layer] = layer.view(self)
            return self._views[layer]

    def table(self, group: LayerGroup) -> Tensor:
        """Return the page table of the sequences, int32 [B, M]."""
        return self.index.table(group)


def _concatenated(parts: list[np.ndarray]) -> np.ndarray:
    """Concatenate positions; those of all tokens are per frequency if some are."""
    width = max((part.shape[1] for part in parts if part.ndim == 2), default=0)
    if width:
        parts = [part if part.ndim == 2 else np.repeat(part[:, None], width, 1) for part in parts]
    return np.ascontiguousarray(np.concatenate(parts))
