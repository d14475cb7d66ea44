"""The sequences of a step: their page tables, lengths and starts as tensors that stay where they are from step to step."""

from itertools import accumulate, chain
from typing import Any, Protocol

import torch
from torch import Tensor

from auraflux.cache.pages import LayerGroup
from auraflux.cache.sequence import Checkpoints, Part, Sequence
from auraflux.errors import CacheFull, ContextError, InputError


class Layer(Protocol):
    """One layer's part of the cache. Attention layers also have `append` and `attend`, recurrent ones `convolve` and `update`.

    token_nbytes  bytes of one token
    """

    token_nbytes: int

    def view(self, batch: "Batch") -> Any:
        """Make what the layer's ops take besides the tokens; it is made once for a batch."""


class Batch:
    """Sequences that take their steps together. Make it once and use it for as long as they are the same.

    lengths    [B]      int32, the new tokens among them
    starts     [B + 1]  int32, where each sequence's new tokens begin in the stack
    positions  [T]      int32, of each new token in its sequence
    single     each sequence has one new token
    """

    def __init__(self, sequences: list[Sequence], context: int, checkpoints: Checkpoints, device: torch.device):
        if not sequences or len(set(sequences)) < len(sequences):
            raise InputError(f"a batch of {len(sequences)} sequences was asked for; it needs one at least, and none twice.")
        self.sequences, self.context, self.device = sequences, context, device
        self.lengths = torch.zeros(len(sequences), dtype=torch.int32, device=device)
        self.starts = torch.zeros(len(sequences) + 1, dtype=torch.int32, device=device)
        self.positions = torch.zeros(0, dtype=torch.int32, device=device)
        self._one_each = torch.zeros_like(self.lengths)
        self.single = False
        self._checkpoints = checkpoints
        self._tables: dict[LayerGroup, tuple[Tensor, list[int | None]]] = {}
        self._views: dict[Layer, Any] = {}

    def extend(self, counts: list[int]) -> None:
        """Make room for so many new tokens of each sequence; every layer must then be given them. All or nothing."""
        self._check(counts)
        for sequence in self.sequences:
            sequence.pass_stride()
        for part in self.sequences[0].rows:
            self._find_room(part, counts)
        for sequence, new in zip(self.sequences, counts, strict=True):
            for row in sequence.rows.values():
                row.extend(sequence.length, new)
            sequence.length += new
        self.single = all(new == 1 for new in counts)
        self.lengths.copy_(torch.tensor([sequence.length for sequence in self.sequences], dtype=torch.int32))
        self.starts.copy_(torch.tensor([0, *accumulate(counts)], dtype=torch.int32))
        spans = [range(s.length - new, s.length) for s, new in zip(self.sequences, counts, strict=True)]
        positions = torch.tensor([*chain.from_iterable(spans)], dtype=torch.int32)
        self.positions = self._one_each.copy_(positions) if self.single else positions.to(self.device)
        for group in self._tables:
            self._refresh(group)

    def _check(self, counts: list[int]) -> None:
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

    def _find_room(self, part: Part, counts: list[int]) -> None:
        steps = [(s.rows[part], s.length, new) for s, new in zip(self.sequences, counts, strict=True) if new]
        for row, length, _ in steps:
            row.settle(length)
        while (needed := part.needs(steps)) > part.free:
            if not self._checkpoints.make_room(part):
                raise CacheFull(
                    f"{sum(counts)} new tokens need {needed} {part.describe()}, and {part.free} are free. Close a sequence, "
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
        if group not in self._tables:
            width = -(-self.context // group.size)
            table = torch.zeros(len(self.sequences), width, dtype=torch.int32, device=self.device)
            self._tables[group] = table, [None] * len(self.sequences)
            self._refresh(group)
        return self._tables[group][0]

    def _refresh(self, group: LayerGroup) -> None:
        table, stamps = self._tables[group]
        for b, row in enumerate(self.rows(group)):
            if row.stamp != stamps[b]:
                table[b, row.first : row.first + len(row.pages)] = torch.tensor(row.pages, dtype=torch.int32)
                stamps[b] = row.stamp
