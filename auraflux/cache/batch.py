"""The sequences that take a step together."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from auraflux.cache.index import StepIndex
from auraflux.cache.pages import LayerGroup
from auraflux.cache.sequence import Part, Row, Sequence
from auraflux.errors import CacheFull, ContextError, InputError
from auraflux.ops.rope.reference import norm_rope


class Layer(Protocol):
    """One layer's part of the cache. Recurrent ones also have `convolve`, `update` and `step`.

    group         whose pages or slots hold it
    token_nbytes  bytes of one token
    plain_nbytes  bytes of positions that are kept as they are beside their codes
    """

    group: Any
    token_nbytes: int
    plain_nbytes: int = 0

    def nbytes_at(self, length: int) -> int:
        """Bytes of a sequence of so many tokens, beside its states."""
        return self.token_nbytes * self.group.held(length)

    def view(self, batch: "Batch") -> Any:
        """Make what the layer's ops take besides the tokens; it is made once for an index of a batch."""


class Rotation(Protocol):
    """How queries and keys are rotated by their positions, see `norm_rope`."""

    @property
    def frequencies(self) -> Tensor: ...

    @property
    def mscale(self) -> float: ...

    @property
    def interleaved(self) -> bool: ...


class AttentionLayer(Layer, Protocol):
    """A layer that keeps keys and values."""

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
        """Normalise and rotate queries and keys, then store keys and values: gives the queries [T, Hq, D]."""
        q, k = norm_rope(q, k, rotation.frequencies, batch.positions, norms, eps, rotation.mscale, rotation.interleaved)
        self.append(batch, k, v)
        return q

    def attend(
        self, batch: "Batch", q: Tensor, scale: float, sinks: Tensor | None = None, softcap: float | None = None
    ) -> Tensor:
        """Attend from the batch's new tokens: [T, Hq, D] -> [T, Hq, Dv]."""


class Batch:
    """Sequences that take their steps together. Make it once and use it for as long as they are the same.

    index      what kernels read about the step
    positions  [T]  int32, of each new token in its sequence
    counts     of new tokens of each sequence
    single     each sequence has one new token
    silent     nobody asks what follows the new tokens: all that is wanted is that they are remembered
    ends       what follows is asked for the last of each sequence's new tokens only
    fillers    tokens of no sequence after those of a single step, so that batches of few sizes recur
    extra      tokens at the end of a single sequence's step that fill it up to a size that recurs, None for other steps; none
               before them sees them, and `drop_extra` forgets them
    """

    index: StepIndex

    def __init__(
        self,
        sequences: list[Sequence],
        context: int,
        find_index: Callable[[int, int], StepIndex],
        make_room: Callable[[Part], bool],
        expected: int = 0,
        fillers: int = 0,
        silent: bool = False,
        ends: bool = False,
    ):
        if not sequences or len(set(sequences)) < len(sequences):
            raise InputError(f"a batch of {len(sequences)} sequences was asked for; it needs one at least, and none twice.")
        self.sequences, self.context, self.fillers, self.silent = sequences, context, fillers, silent
        self.single, self.ends = False, ends
        self.extra: int | None = None
        self.counts: list[int] = []
        self._beyond: Tensor | None = None
        self._find_index, self._make_room, self._expected = find_index, make_room, expected
        self._views: dict[Layer, Any] = {}
        self._turn_to(max(sequence.length for sequence in sequences))

    @property
    def lengths(self) -> Tensor:
        return self.index.lengths

    @property
    def starts(self) -> Tensor:
        return self.index.starts

    @property
    def tokens(self) -> int:
        """How many a step has, fillers among them."""
        return sum(self.counts) + self.fillers

    def apart(self, work: Callable[..., Any], *rows: Tensor | None) -> Any:
        """Do some work for every part of a step and its rows: here there is one; others are in `Beside`."""
        return work(self, *rows)

    @property
    def places(self) -> tuple[int, ...]:
        """Where the sequences hold what is not found through the index."""
        return tuple(row.place for sequence in self.sequences for row in sequence.rows.values() if row.place is not None)

    @property
    def beyond(self) -> Tensor:
        """1 for the extra tokens of a step that can have some, 0 for the others: [T, 1] float32."""
        if self._beyond is None:
            self._beyond = (self.positions >= self.index.end).float().unsqueeze(1)
        return self._beyond

    def drop_extra(self) -> None:
        """Forget the extra tokens of a step that has been taken."""
        if self.extra:
            self.sequences[0].shorten(self.extra)
        self.extra = None

    def cut_back(self, lengths: list[int]) -> None:
        """Take back tokens that did not get through all layers: sequences are as long as they were, or shorter."""
        for sequence, length in zip(self.sequences, lengths, strict=True):
            if sequence.length > length:
                sequence.truncate(length)

    def extend(self, counts: list[int], extra: int | None = None) -> None:
        """Make room for so many new tokens of each sequence; every layer must then be given them. All or nothing.

        extra  how many of a single sequence's are; None where the step need not recur
        """
        self.prepare(counts)
        for part in self.sequences[0].rows:
            self.find_room(part, self.steps(part, counts))
        self.take_room(counts, extra)

    def steps(self, part: Part, counts: list[int]) -> list[tuple[Row, int, int]]:
        """What the sequences hold in a part of the cache, how long they are, and by how many tokens they grow."""
        return [(s.rows[part], s.length, new) for s, new in zip(self.sequences, counts, strict=True) if new]

    def take_room(self, counts: list[int], extra: int | None) -> None:
        """Make sequences longer, as `extend` does, where room has been found for them."""
        for sequence, new in zip(self.sequences, counts, strict=True):
            for row in sequence.rows.values():
                row.extend(sequence.length, new)
            sequence.length += new
        self.counts, self.single, self.extra = counts, all(new == 1 for new in counts), extra
        self._write(counts)

    def _write(self, counts: list[int]) -> None:
        lengths = [sequence.length for sequence in self.sequences]
        self._turn_to(max(lengths))
        spans = [range(length - new, length) for length, new in zip(lengths, counts, strict=True)]
        positions = [span[0] for span in spans] if self.single else []
        if self.fillers:
            assert self.single, "only steps of one token each are filled up"
            nothing = [0] * self.fillers
            lengths, counts, positions = lengths + [1] * self.fillers, counts + [1] * self.fillers, positions + nothing
        self.index.write(lengths, [0, *accumulate(counts)], positions, self.extra or 0)
        self._beyond = None
        if self.single:
            self.positions = self.index.positions
        else:
            numbers = np.concatenate([np.arange(span.start, span.stop, dtype=np.int32) for span in spans])
            self.positions = torch.from_numpy(numbers).to(self.index.device, non_blocking=True)
        for part in self.sequences[0].rows:
            rows = self.rows(part)
            part.refresh(self.index, rows + [part.filler] * self.fillers if self.fillers else rows)

    def turn_to_ends(self) -> Tensor:
        """Go on with the last of each sequence's new tokens alone, a step of one token each; gives their places among all."""
        places = np.cumsum(self.counts) - 1
        self.counts, self.single = [1] * len(self.sequences), True
        self._write(self.counts)
        return torch.from_numpy(places).to(self.index.device, non_blocking=True)

    def index_for(self, new: int) -> StepIndex:
        """The index of a step that gives each sequence so many tokens."""
        return self._reaching(max(sequence.length for sequence in self.sequences) + new)

    def _reaching(self, longest: int) -> StepIndex:
        """The index that reaches as far, or as far as is expected."""
        return self._find_index(len(self.sequences) + self.fillers, max(longest, self._expected))

    def _turn_to(self, longest: int) -> None:
        """Use the index that reaches so far."""
        found = self._reaching(longest)
        if getattr(self, "index", None) is not found:
            self.index, self._views = found, {}

    def prepare(self, counts: list[int]) -> None:
        """Refuse so many new tokens of each sequence where they cannot be; make the checkpoints that are due."""
        if len(counts) != len(self.sequences) or min(counts) < 0:
            raise InputError(
                f"{counts} new tokens were given for {len(self.sequences)} sequences; one number for each is needed."
            )
        for sequence, new in zip(self.sequences, counts, strict=True):
            sequence.check_open()
            if sequence.length + new > self.context:
                raise ContextError(
                    f"a sequence of {sequence.length} tokens cannot take {new} more: the context is limited to {self.context}. "
                    f"Make the cache with context={sequence.length + new} or more."
                )
        for sequence in self.sequences:
            sequence.pass_stride()

    def find_room(self, part: Part, steps: list[tuple[Row, int, int]]) -> None:
        """Find pages for all rows of a step; others may be given up for that."""
        for row, length, _ in steps:
            row.settle(length)
        while (needed := part.needs(steps)) > part.free:
            if not part.settle() and not self._make_room(part):
                tokens = sum(new for *_, new in steps)
                raise CacheFull(
                    f"{tokens} new tokens need {needed} {part.describe()}, and {part.free} are free. Close a sequence, "
                    f"append fewer tokens at a time, or make the cache with more 'sequences' or 'tokens'."
                )

    def rows(self, part: Part) -> list[Any]:
        """What the sequences hold in a part of the cache."""
        return [sequence.rows[part] for sequence in self.sequences]

    def view(self, layer: Layer) -> Any:
        try:
            return self._views[layer]
        except KeyError:
            self._views[layer] = layer.view(self)
            return self._views[layer]

    def table(self, group: LayerGroup) -> Tensor:
        """The page table of the sequences, int32 [B, M]."""
        return self.index.table(group)
